"""Launch of a run on this machine: the plan is checked, run to its end, and the result kept.

The run's folder also gets checksums of the data's first batches: a resumed run has to go on with the same data.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import msgspec

from stageline.broker.control.records import RunLength
from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.addresses import dialled
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.plan import Plan
from stageline.pipeline.process import last_line
from stageline.pipeline.process.child import Spawn
from stageline.pipeline.process.signals import Signals
from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import Schedule
from stageline.workers.control.questions import Questions
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.disk.owned_folder import demand_short_socket_paths
from stageline.workers.extras.preflight.trial_result import (
    FirstBatches,
    StageMemory,
    Transcript,
    WorkerEstimate,
    goes_on,
)
from stageline.workers.extras.preflight.trials import cut_arguments, memory_arguments, try_plan
from stageline.workers.keys.keyring import own_broker
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts, LaunchOutcome, Result, result_of
from stageline.workers.runs.records import measured_timetable

from .children import LocalRun, ScriptProcess
from .supervisor import supervise
from .template import Template


@dataclass(frozen=True, slots=True)
class Launch:
    """Run ready to start: its plan works and its folder exists."""

    plan: Plan
    schedule: Schedule
    run: str
    folder: Path
    length: RunLength
    warnings: tuple[str, ...]
    resumes: bool = False
    spares: int = 0
    decided: tuple[str, ...] = ()  # the cut and what stages do for a limit, if the plan did not say it, as arguments
    memory: tuple[StageMemory, ...] = ()  # what stages do for a limit, if that was chosen now
    workers: Sequence[WorkerEstimate] = ()

    @property
    def steps(self) -> int:
        """Number of steps to train."""
        return self.length.training


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """End of a run: `code` is the exit code of `train`, `result` is None unless the run finished.

    `timed` are the measured actions of one of the last steps, if their times were kept.
    """

    code: int
    reason: str
    result: Result | None = None
    timed: Sequence[Timed] = ()


def prepare_launch(
    plan: Plan,
    arguments: Sequence[str],
    spawn: Spawn,
    resume: str | None = None,
    spares: int = 0,
    run: str = "",
) -> Launch:
    """Check that the plan can be run, name the run and make its folder.

    A resumed run whose plan lays the work out differently goes on as a run of its own.

    Args:
        plan: Plan of the run.
        arguments: Arguments that name the plan on a command line.
        spawn: Starts the processes in which the plan is tried.
        resume: Id of the run to continue, "" for the plan's newest, None for a new one.
        spares: Number of spare workers.
        run: Id of the run, if a `StartingRun` has named it.

    Raises:
        PlanRefused, ModelRefused, DataError: The plan cannot work.
        NoSuchRun, NoCheckpoint, SnapshotDamaged: The run cannot be continued.
        FolderUnusable, TooDeep: The folder, or that for temporary files, cannot be used.
    """
    if not plan.queues.in_one_process:
        demand_short_socket_paths()
    name = run or runs.name_of(plan, resume)
    cut = runs.recorded_cut(plan, runs.folder(plan, name)) if resume is not None else None
    if cut is not None:
        plan = plan.with_cut(cut)
        arguments = [*arguments, *cut_arguments(cut)]
    memory = runs.recorded_memory(plan, runs.folder(plan, name)) if resume is not None else {}
    plan, arguments = plan.with_memory(memory), [*arguments, *memory_arguments(memory)]
    differs = resume is not None and bool(runs.differences_from(plan.with_known_stages(), runs.folder(plan, name)))
    tried = try_plan(plan, arguments, spawn, layouts=differs)
    if resume is not None and (not differs or runs.lengthens(plan, runs.folder(plan, name))) and plan.data.check:
        demand_same_data(runs.folder(plan, name), tried.transcript)
    expected = tried.estimate
    if tried.cut is not None:
        cut = list(tried.cut)
        plan = plan.with_cut(cut)
    memory = memory or tried.memory
    plan = plan.with_memory(memory).resolved(len(expected.stages))
    warnings = [*expected.warnings]
    if resume is not None:
        name = _resumed(plan, name, tried.layouts, warnings.append)
    if plan.queues.in_one_process:
        import stageline.workers.process.in_process  # noqa: F401  # loads torch, before progress is drawn
    folder = runs.make_folder(plan, name)
    if resume is None:  # a resumed run has its own plan there
        persist_json(folder / runs.PLAN, plan.as_mapping())
    keep_first_batches(folder, tried.transcript)
    schedule = plan.make_schedule(first_trainable=tried.first_trainable)
    decided = (*(() if cut is None else cut_arguments(cut)), *memory_arguments(memory))
    return Launch(
        plan,
        schedule,
        name,
        folder,
        tried.length,
        tuple(warnings),
        resume is not None,
        spares,
        decided,
        expected.memory,
        expected.workers,
    )


def _resumed(plan: Plan, run: str, layouts: Sequence[StageLayout], tell: Callable[[str], None]) -> str:
    """Return the id of the run to continue: `run`, or a run of its own if `plan` lays the work out differently."""
    if not runs.differences_from(plan, runs.folder(plan, run)):
        return run
    from stageline.workers.checkpoint.continuable import needs_recut  # load torch
    from stageline.workers.checkpoint.recut import continued
    from stageline.workers.checkpoint.source import source_in

    source = source_in(runs.folder(plan, run))
    return continued(plan, source, layouts, tell) if needs_recut(plan, source) else run


def run_launch(
    launch: Launch,
    arguments: Sequence[str],
    on_status: Callable[[Facts], None],
    template: Template,
    questions: Questions | None = None,
) -> LaunchResult:
    """Run the launch to its end.

    Args:
        launch: Run that is ready to start.
        arguments: Arguments that name the plan on the command lines of its processes.
        on_status: Called with every new status of the broker.
        template: Starts the processes.
        questions: Questions of other threads to a broker in this process, of a run in one process.
    """
    started = monotonic()
    outcome = _outcome(launch, arguments, on_status, template, questions)
    if outcome.code:
        return LaunchResult(outcome.code, outcome.reason)
    result = keep_result(launch.plan, launch.folder, outcome.facts, monotonic() - started)
    if launch.plan.queues.in_one_process:
        return LaunchResult(0, outcome.reason, result)
    timed = measured_timetable(launch.plan, launch.run, launch.schedule, launch.steps)
    return LaunchResult(0, outcome.reason, result, timed)


def keep_result(plan: Plan, folder: Path, facts: Facts, seconds: float) -> Result:
    """Write the result of a finished run to its folder, and return it.

    Args:
        plan: Plan of the run.
        folder: Folder of the run.
        facts: The broker's last status.
        seconds: Duration of the run.
    """
    result = result_of(folder.name, plan.schedule.in_step, facts, seconds)
    persist_json(folder / runs.RESULT, result)
    return result


def _outcome(
    launch: Launch,
    arguments: Sequence[str],
    on_status: Callable[[Facts], None],
    template: Template,
    questions: Questions | None,
) -> LaunchOutcome:
    plan, arguments = launch.plan, [*arguments, *launch.decided]
    if plan.queues.in_one_process:
        from stageline.workers.process.in_process import run_memory  # loads torch
        from stageline.workers.runtime.job import prepare

        with Signals(once=True) as signals, last_line.exit_is_failure():
            return run_memory(prepare(plan), launch.run, launch.folder, on_status, lambda: signals.count > 0, questions)

    def record(facts: Facts) -> None:
        template.warm()  # if it was killed, the next replacement does not wait for torch
        on_status(facts)

    resume, spares, length = launch.resumes, launch.spares, launch.length
    local = local_run(plan, launch.folder, arguments, template, resume, spares=spares, length=length)
    return supervise(local, record)


def local_run(
    plan: Plan,
    folder: Path,
    arguments: Sequence[str],
    template: Template,
    resume: bool,
    *,
    spares: int = 0,
    script: ScriptProcess | None = None,
    length: RunLength | None = None,
    remote: bool = False,
) -> LocalRun:
    """Return the task of the run in `folder`.

    Args:
        plan: Plan of the run.
        folder: Folder of the run.
        arguments: Arguments that name the plan on command lines.
        template: Starts the processes.
        resume: Continue the stopped run.
        spares: Number of spare workers.
        script: Script of a scripted run.
        length: Number of steps, if known.
        remote: Workers come from other machines.
    """
    broker, pair = _broker_of(plan) if remote else ("", None)
    return LocalRun(
        arguments,
        0 if remote else len(plan.workers),
        folder,
        template,
        template.sockets,
        plan.recovery.loading,
        restarts=plan.recovery.on,
        resume=resume,
        spares=spares,
        gone=lambda: template.gone,
        script=script,
        length=length,
        broker=broker,
        pair=pair,
    )


def _broker_of(plan: Plan) -> tuple[str, KeyPair | None]:
    """Return where the broker at `broker.url`, which is started here, is found from here, and the pair to dial with."""
    url = dialled(plan.broker.url)
    return own_broker(url, os.environ) if plan.broker.has_keys else (url, None)


FILE = "batches.json"


def keep_first_batches(folder: Path, made: Transcript) -> None:
    """Write the checksums of the first batches to the run's `folder`, unless it has some."""
    if not (folder / FILE).exists():
        persist_json(folder / FILE, FirstBatches(made.first, made.held_out))


def demand_same_data(folder: Path, now: Transcript) -> None:
    """Raise `ModelRefused` if the run in `folder` began with other data than a trial has found `now`.

    A missing or damaged file is ignored: it is a check, and no part of the run.
    """
    try:
        begun = msgspec.json.decode((folder / FILE).read_bytes(), type=FirstBatches)
    except (OSError, msgspec.MsgspecError):  # the file is a check, and no part of the run
        return
    if difference := goes_on(begun, now):
        raise ModelRefused(difference)
