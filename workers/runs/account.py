"""Account of a run: its plan in short, how far it came, its pace, its losses of workers, its files. No broker is asked.

`comparison.py` compares the accounts of two runs.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from stageline.broker.control.pace_answers import PaceFact
from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.pauses import Pause
from stageline.broker.ledger.recovery import LostAttempt
from stageline.broker.ledger.times import totals
from stageline.pipeline.addresses import masked

from .listing import ending_of
from .records import RecordedRun, RecordedState

_PACED = 200  # newest steps whose times are looked at
_SNAPSHOTS = "checkpoints/stage-*/step-*"


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan of a run in short.

    Attributes:
        digest: Digest of what counts for the weights; None before the broker has begun.
        microbatches: Microbatches of a batch.
        queues: Address of the queues, without a password.
        restarts: Most replacements of a worker.
        snapshot_every: Steps from one snapshot to the next.
    """

    digest: str | None
    schedule: str
    mode: str
    stages: int
    workers: int
    batch_size: int | None
    microbatches: int | None
    optimizer: str | None
    queues: str
    restarts: int | None
    snapshot_every: int | None


class LossOfWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker that was lost during a run.

    Attributes:
        at: Time of the loss, in seconds since the epoch.
        generation: 1 for the first process in its place.
        step: Step from which its replacement began.
        repeated: Finished steps of its stage that were done again.
        why: The loss in words.
    """

    at: float
    worker: str
    generation: int
    step: int
    repeated: int
    why: str


class RunAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Account of a run: its state, and what became of it.

    Attributes:
        name: Name of the run in its plan.
        state: "starting", "running", "paused", "finished", "failed", "stopped" or "killed".
        reason: Why it ended or rests; None if it goes on.
        action: What to do.
        began: When it was begun or resumed, in seconds since the epoch.
        as_of: When its records were last written, likewise.
        plan: The plan; None before it is known to work.
        steps: Finished steps of `total`, which is None while a script decides.
        script: True if a script calls the run.
        loss: Loss of the newest finished step; None without rows.
        step_seconds: Median time of a step, of the newest 200; None before the third one.
        pace: Steps per second and the bubble of a run that goes on.
        restarts: Workers that were replaced.
        losses_of_workers: The newest of these losses.
        pauses: Its newest pauses, in order.
        checkpoint: Step of the newest complete checkpoint; None in a run that has not begun.
        snapshots: Steps of which all stages in this folder have a snapshot.
        weights_sha256: Digest of the weights of a finished run.
        bytes: Size of the folder's files.
    """

    run: str
    folder: str
    name: str | None
    state: str
    reason: str | None
    action: str
    began: float | None
    as_of: float
    plan: PlanSummary | None
    steps: int
    total: int | None
    script: bool
    loss: float | None
    step_seconds: float | None
    pace: PaceFact | None = None
    restarts: int
    losses_of_workers: list[LossOfWorker]
    pauses: list[Pause]
    checkpoint: int | None
    snapshots: list[int]
    weights_sha256: str | None
    bytes: int


def account_of(run: RecordedRun) -> RunAccount:
    """Return the account of a run; its `pace`, which a broker alone knows, is None."""
    ending, outcome, owner = ending_of(run), run.outcome, run.owner
    goes_on = run.state in (RecordedState.RUNNING, RecordedState.STARTING)
    named = (run.plan or {}).get("run", {}).get("name")
    return RunAccount(
        run=run.id,
        folder=str(run.folder),
        name=named or (None if owner is None else owner.name),
        state=str(run.state),
        reason=None if goes_on else ending.text,
        action=ending.action,
        began=None if owner is None else owner.began,
        as_of=run.as_of,
        plan=None if run.plan is None else summary_of(run.plan, run.stored.facts.get("run", {}).get("plan")),
        steps=run.steps,
        total=run.training_steps,
        script=run.scripted,
        loss=losses_of(run).get(run.steps - 1),
        step_seconds=_step_seconds(run),
        restarts=_restarts(run),
        losses_of_workers=list(_losses_of_workers(run)),
        pauses=run.pauses.pauses,
        checkpoint=run.complete if run.progress else None,
        snapshots=snapshots_in(run.folder),
        weights_sha256=outcome.weights_sha256 if outcome is not None else None,
        bytes=size_of(run.folder),
    )


def paced(account: RunAccount, pace: Mapping[str, Any] | None) -> RunAccount:
    """Return the account with the pace that the run's broker has told."""
    return account if pace is None else msgspec.structs.replace(account, pace=msgspec.convert(pace, PaceFact))


def summary_of(plan: Mapping[str, Any], digest: object) -> PlanSummary:
    """Return a recorded plan in short; `digest` is the one that its broker has recorded, if any."""
    data, schedule, recovery = (plan.get(table, {}) for table in ("data", "schedule", "recovery"))
    model = plan.get("model", {})
    return PlanSummary(
        digest=None if digest is None else str(digest),
        schedule=str(schedule.get("name")),
        mode=str(schedule.get("mode")),
        stages=model.get("stages") or len(model.get("cut") or ()) + 1,
        workers=len(plan.get("workers", ())),
        batch_size=data.get("batch_size"),
        microbatches=schedule.get("microbatches"),
        optimizer=plan.get("optimizer", {}).get("factory"),
        queues=masked(str(plan.get("queues", {}).get("url", ""))),
        restarts=recovery.get("restarts"),
        snapshot_every=recovery.get("snapshot_every"),
    )


def losses_of(run: RecordedRun) -> dict[int, float | None]:
    """Return the known losses of a run by step: all that its records hold, or those of its result."""
    kept = {} if run.result is None else {int(step): loss for step, loss in run.result.losses.items()}
    if run.result is not None:
        kept[run.result.steps - 1] = run.result.loss
    return {**kept, **run.stored.losses}


def snapshots_in(folder: Path) -> list[int]:
    """Return the steps of which every stage with snapshots in `folder` has one, in order."""
    steps: dict[str, set[int]] = {}
    for found in folder.glob(_SNAPSHOTS):
        step = found.name.removeprefix("step-")
        if step.isdigit() and len(step) < 16:
            steps.setdefault(found.parent.name, set()).add(int(step))
    return sorted(set.intersection(*steps.values())) if steps else []


def size_of(folder: Path) -> int:
    """Return the bytes of the files in `folder`; links are not followed, and a file with two names counts once."""
    return sum({(found.st_dev, found.st_ino): found.st_size for found in _files(folder)}.values())


def _files(folder: Path) -> Iterator[os.stat_result]:
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(place, name))
            except FileNotFoundError:  # a run that goes on has replaced it
                continue
            if stat.S_ISREG(found.st_mode):
                yield found


def _step_seconds(run: RecordedRun) -> float | None:
    """Return the median time between the ends of two steps on the last stage; waits of a resumed run are outliers."""
    if not run.stored.finished:
        return None
    stage = max(run.stored.finished)
    finished = run.stored.finished[stage]
    wanted = [(stage, step) for step in range(max(0, finished - _PACED), finished)]
    ends = dict(filter(None, map(_end, run.store.records(wanted))))
    took = [ends[step + 1] - ends[step] for step in ends if step + 1 in ends]
    return median(took) if len(took) > 1 else None


def _end(record: StepRecord) -> tuple[int, float] | None:
    found = totals(record)
    return None if found is None else (found.step, found.end)


def _restarts(run: RecordedRun) -> int:
    if run.result is not None:
        return run.result.restarts
    return sum(int(count) for _, count in run.progress.get("replacing", {}).get("ever", ()))


def _losses_of_workers(run: RecordedRun) -> Iterator[LossOfWorker]:
    """Yield each loss of a worker once, in order: its record has an entry for each of its stages."""
    found = msgspec.convert(run.progress.get("attempts", []), list[LostAttempt])
    earliest = {(each.name, each.generation): each for each in sorted(found, key=lambda lost: -lost.at)}
    for each in sorted(earliest.values(), key=lambda lost: lost.at):
        yield LossOfWorker(
            at=each.at,
            worker=each.name,
            generation=each.generation,
            step=each.start,
            repeated=max(0, each.finished - each.start),
            why=each.why,
        )
