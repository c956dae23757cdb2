"""A whole run on this machine, from the plan to its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from pipeline.plan import Plan

from . import runs
from .job import Job, prepare
from .result import Result, keep, result_of
from .supervise import Facts, Local, run


@dataclass(frozen=True, slots=True)
class Launch:
    """A run that is about to begin: its plan has met its model and data, and its folder is there."""

    job: Job
    run: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. `result` is there if it has finished; `code` is the exit code of whoever waited for it."""

    code: int
    reason: str
    result: Result | None


def ready(plan: Plan) -> Launch:
    """Finds out whether the plan can be run, before any process starts; names the run and makes its folder.

    Raises `PlanRefused`, `ModelRefused` or `DataError`.
    """
    job = prepare(plan)
    name = runs.new_id(plan)
    folder = runs.folder(plan, name)
    keep(folder, runs.PLAN, job.plan.as_mapping())
    return Launch(job, name, folder)


def go(launch: Launch, words: Sequence[str], on_status: Callable[[Facts], None]) -> Ended:
    """Runs it to the end. `words` name the plan on command lines of ours; `on_status` hears how it goes."""
    plan = launch.job.plan
    started = monotonic()
    outcome = run(Local(words, len(plan.workers), launch.folder, plan.recovery.lease), on_status)
    if outcome.code:
        return Ended(outcome.code, outcome.reason, None)
    result = result_of(plan, launch.run, outcome.facts, monotonic() - started)
    keep(launch.folder, runs.RESULT, result)
    return Ended(0, outcome.reason, result)
