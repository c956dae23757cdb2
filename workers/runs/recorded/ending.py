"""Why a run of which no broker answers does not go on, and what can be done, in words."""

from dataclasses import dataclass

from stageline.pipeline.addresses import Reach, transport_of
from stageline.pipeline.errors import ExitCode

from .records import RecordedRun, RecordedState


@dataclass(frozen=True, slots=True)
class Ending:
    """`text`: what has become of the run; `action`: what can be done. Without a full stop."""

    text: str
    action: str


def ending_of(run: RecordedRun) -> Ending:
    """What has become of `run`, and the command that goes on with it."""
    match run.state:
        case RecordedState.FINISHED:
            return Ending(_finished(run), f"nothing: `stageline status {run.folder}` shows the result")
        case RecordedState.STARTING:
            return Ending("the run is starting: its plan is tried, then its processes start", "wait")
        case RecordedState.RUNNING:
            return _running(run)
        case RecordedState.KILLED:
            return _killed(run)
        case _:
            reason = run.outcome.reason if run.outcome is not None else ""
            return Ending(reason, _after_stop(run))


def _finished(run: RecordedRun) -> str:
    return run.outcome.reason if run.outcome is not None else "all steps are done"


def _running(run: RecordedRun) -> Ending:
    if _in_memory(run):
        return Ending("the run is one process, which answers no questions", "nothing: its records are a second old")
    who = "the script's launcher" if run.scripted else "`train`"
    return Ending("its broker does not answer", f"wait: workers train without a broker, and {who} restarts it")


def _killed(run: RecordedRun) -> Ending:
    who = "the run's broker" if run.owner is not None and run.owner.command == "broker" else "the run"
    if not run.progress:
        return Ending(f"{who} was killed or lost its machine before it began", _again(run))
    saved = f"checkpoint {run.complete} is complete" if run.complete else "no checkpoint is complete"
    total = "" if run.training_steps is None else f" of {run.training_steps}"
    return Ending(f"{who} was killed or lost its machine at step {run.steps}{total}; {saved}", _go_on(run))


def _after_stop(run: RecordedRun) -> str:
    code = run.outcome.code if run.outcome is not None else ExitCode.FAILED
    if code == ExitCode.REFUSED:
        return "correct the plan, the model or the data, and begin another run"
    if code in (ExitCode.SAVED, ExitCode.INTERRUPTED):
        return _go_on(run)
    return f"remove the cause; then {_go_on(run)}"


def _go_on(run: RecordedRun) -> str:
    if not _saves(run):
        return f"begin another run, since without snapshots nothing is saved: {_begin(run)}"
    where = "" if run.complete else " (it begins at step 0)"
    return f"go on with: {_resume(run)}{where}"


def _again(run: RecordedRun) -> str:
    return f"begin another run: {_begin(run)}"


def _saves(run: RecordedRun) -> bool:
    recovery = (run.plan or {}).get("recovery", {})
    return not _in_memory(run) and bool(recovery.get("restarts")) and bool(recovery.get("snapshot_every"))


def _in_memory(run: RecordedRun) -> bool:
    return transport_of(str((run.plan or {}).get("queues", {}).get("url", ""))).reach is Reach.PROCESS


def _resume(run: RecordedRun) -> str:
    if run.scripted:
        return f"Line.resume({str(run.folder)!r}, ...) in the script"
    return f"stageline train CONFIG --resume {run.id}" if run.owner is None else run.owner.resume(run.id)


def _begin(run: RecordedRun) -> str:
    if run.scripted:
        return "the script"
    return "stageline train CONFIG" if run.owner is None else run.owner.begin
