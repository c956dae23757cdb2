"""The runs in a folder, one row each, from their records alone: no broker is asked, and no plan is validated.

A row says why a run does not go on, and what can be done.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stageline.pipeline.addresses import Reach, transport_of
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.workers.runs import folder as runs

from .records import RecordedRun, RecordedState, recorded_run


@dataclass(frozen=True, slots=True)
class Ending:
    """`text`: what has become of the run; `action`: what can be done. Without a full stop."""

    text: str
    action: str


def ending_of(run: RecordedRun) -> Ending:
    """Return what has become of `run`, and the command that goes on with it."""
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


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of schema run-ls/1. `began` and `as_of` (when this was so) are seconds since the epoch.

    `script`: it is called by a script, and has no `total` before its end.
    `state` is one of `RecordedState`, or "damaged": then `reason` names the file. `steps` of `total` are finished, and
    `loss` is the last one's; `plan` is the plan's digest.
    """

    run: str
    folder: str
    name: str | None = None
    began: float | None = None
    as_of: float | None = None
    state: str = "damaged"
    steps: int = 0
    total: int | None = None
    script: bool = False
    loss: float | None = None
    checkpoint: int | None = None
    plan: str | None = None
    weights_sha256: str | None = None
    reason: str | None = None


def run_rows(folder: Path) -> Iterator[RunRow]:
    """The runs in `folder`, by the time at which each was begun or resumed."""
    return map(_row, runs.all_in(folder))


def _row(folder: Path) -> RunRow:
    try:
        with recorded_run(folder) as run:
            return _of(run)
    except (StagelineError, OSError) as error:
        return RunRow(run=folder.name, folder=str(folder), reason=str(error))


def _of(run: RecordedRun) -> RunRow:
    outcome, state = run.outcome, run.state
    finished = state is RecordedState.FINISHED
    return RunRow(
        run=run.id,
        folder=str(run.folder),
        name=_name(run),
        began=run.owner.began if run.owner is not None else None,
        as_of=run.as_of,
        state=str(state),
        steps=run.steps,
        total=run.training_steps,
        script=run.scripted,
        loss=_loss(run),
        checkpoint=run.complete if run.progress else None,
        plan=_digest(run),
        weights_sha256=outcome.weights_sha256 if outcome is not None else None,
        reason=None if finished or state is RecordedState.RUNNING else ending_of(run).text,
    )


def _name(run: RecordedRun) -> str | None:
    named = (run.plan or {}).get("run", {}).get("name")
    if named is not None:
        return str(named)
    return None if run.owner is None else run.owner.name


def _loss(run: RecordedRun) -> float | None:
    if run.result is not None:
        return run.result.loss
    return run.stored.losses.get(run.steps - 1)


def _digest(run: RecordedRun) -> str | None:
    kept = run.stored.facts.get("run", {}).get("plan")
    return None if kept is None else str(kept)
