"""A whole run on this machine, from the plan to its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Schedule
from stageline.pipeline.schedule.check import Timed
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.preflight.estimate import estimate_of
from stageline.workers.process import socket_paths as sockets
from stageline.workers.process.in_process import run_memory
from stageline.workers.process.signals import Signals
from stageline.workers.runs import folder as runs
from stageline.workers.runs import measured_timetable as measured
from stageline.workers.runs.open_store import kept_store
from stageline.workers.runs.result import Result, result_of
from stageline.workers.runtime.job import prepare

from .children import LocalRun, Spawn
from .prefork import Prefork
from .supervisor import Facts, LaunchOutcome, run

IN_MEMORY = "memory://"
SETTLED = 15.0  # seconds of a run after which a process is kept ready for the next loss


@dataclass(frozen=True, slots=True)
class Launch:
    """A run that is about to begin: its plan has been tried, and its folder is there. `steps` are those it trains."""

    plan: Plan
    schedule: Schedule
    run: str
    folder: Path
    steps: int
    warnings: tuple[str, ...]
    resumes: bool = False
    spares: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. `result` is there if it has finished; `code` is the exit code of whoever waited for it.

    `timed` holds a late step's actions as they really ran, if their times were kept.
    """

    code: int
    reason: str
    result: Result | None = None
    timed: Sequence[Timed] = ()


def ready(plan: Plan, resume: str | None = None, spares: int = 0) -> Launch:
    """Finds out whether the plan can be run, before any process starts; names the run and makes its folder.

    `resume`: the run that is to go on, "" for the plan's newest; None for a new one. `spares`: how many workers
    wait for another to be lost.
    Raises `PlanRefused`, `ModelRefused`, `DataError`, `NoSuchRun`, `FolderUnusable` or `TooDeep`.
    """
    if plan.queues.url != IN_MEMORY:
        sockets.check()
    name = runs.new_id(plan) if resume is None else runs.run_to_resume(plan, resume)
    job = prepare(plan)
    if resume is not None:
        runs.require_same_plan(job.plan, runs.folder(plan, name))
    expected = estimate_of(job)
    folder = runs.make_folder(plan, name)
    if resume is None:  # a run that goes on has its own plan there
        write_json(folder / runs.PLAN, job.plan.as_mapping())
    return Launch(job.plan, job.schedule, name, folder, job.steps, expected.warnings, resume is not None, spares)


def go(launch: Launch, words: Sequence[str], on_status: Callable[[Facts], None]) -> Ended:
    """Runs it to the end. `words` name the plan on command lines of ours; `on_status` hears how it goes."""
    started = monotonic()
    outcome = _outcome(launch, words, on_status)
    if outcome.code:
        return Ended(outcome.code, outcome.reason)
    result = result_of(launch.plan, launch.run, outcome.facts, monotonic() - started)
    write_json(launch.folder / runs.RESULT, result)
    store = None if launch.plan.queues.url == IN_MEMORY else kept_store(launch.plan, launch.run)
    return Ended(0, outcome.reason, result, measured.of_run(store, launch.schedule, launch.steps))


def _outcome(launch: Launch, words: Sequence[str], on_status: Callable[[Facts], None]) -> LaunchOutcome:
    plan = launch.plan
    if plan.queues.url != IN_MEMORY:
        with Prefork() as reserve:
            return run(_local(launch, words, reserve), _filling(reserve, launch, on_status))
    with Signals(once=True) as signals:
        return run_memory(prepare(plan), launch.run, launch.folder, on_status, lambda: signals.count > 0)


def _local(launch: Launch, words: Sequence[str], spawn: Spawn) -> LocalRun:
    recovers, workers = launch.plan.recovery.on, len(launch.plan.workers)
    return LocalRun(words, workers, launch.folder, recovers, spawn, launch.resumes, launch.spares)


def _filling(reserve: Prefork, launch: Launch, on_status: Callable[[Facts], None]) -> Callable[[Facts], None]:
    """`on_status`, which also has a process made ready for the next loss whenever there is nothing more urgent: not at
    the beginning, where loading torch once more would take time from a run that may be short."""
    started = monotonic()

    def heard(facts: Facts) -> None:
        settled = monotonic() - started > SETTLED
        if settled and facts.get("phase") == "running" and not facts.get("recovering"):
            reserve.fill()
        on_status(facts)

    wanted = launch.plan.recovery.on and not launch.spares  # a spare is in no hurry
    return heard if wanted else on_status
