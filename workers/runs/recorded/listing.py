"""The runs in a folder, one row each, from their records alone: no broker is asked, and no plan is validated."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from stageline.pipeline.errors import StagelineError
from stageline.workers.runs import folder as runs

from .ending import ending_of
from .records import RecordedRun, RecordedState, recorded_run


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
