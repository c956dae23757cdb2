"""Saved checkpoint of a scripted run in a folder of its own, from which a new run begins.

    saved.json                                  written last: which run, how many steps, how many stages
    plan.json                                   the run's plan
    evaluations.jsonl                           what its script has evaluated so far
    batches.jsonl                               checksums of the batches of its newest steps
    checkpoints/stage-0/step-0000000120/        a snapshot, as in a run's folder, of a position without calls

Each worker writes the snapshots of its stages into a draft of the folder, or why it could not (`stage-0.lacks`); the
script completes the draft and gives it its name: a folder of that name is whole. A run that begins from it gets a copy.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from stageline.broker.control.messages import Assigned
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish, sync, write_file, write_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics import EVALUATIONS, METRICS, carry_lines
from stageline.workers.runtime.progress import Progress

from .directory import FOLDER, SnapshotDirectory, SnapshotFailed
from .snapshot import UNSEALED, Snapshot, SnapshotDamaged, read_manifest, write_manifest

SAVED = "saved.json"
NOTHING_TRAINED = "no step was trained yet, so there is nothing to go on from; state_dict() has the weights"


class NotSaved(StagelineError):
    """Error that a checkpoint could not be saved; nothing is left of it, and the run continues.

    Mend: Save to an empty folder on a disk with room.

    Example: runs/best is there already, and not empty: a checkpoint goes to a folder of its own
    """

    error_code = "SL405"


class SavedRun(msgspec.Struct, frozen=True):
    """Identity of a saved checkpoint: the run's id, the step, and the number of the model's stages."""

    run: str
    step: int
    stages: int


def save_stages(
    folder: Path, plan: Plan, assigned: Assigned, stages: Mapping[int, Stage], step: int, progress: Progress
) -> None:
    """Write the stages' snapshots into a draft; they survive a power failure.

    A stage that cannot be written is lacking, and the folder has the reason if it takes that: the run need not fail for
    it. A missing draft means a repeated call whose answer the script has: nothing is written.

    Args:
        folder: Draft of the checkpoint's folder.
        plan: Plan of the run.
        assigned: Place of the worker.
        stages: Stages of the worker.
        step: Number of steps done.
        progress: Has the losses.
    """
    if not folder.is_dir():
        return
    checkpoints = SnapshotDirectory.of(folder, assigned.run, plan)
    known = {**progress.losses, **dict([progress.newest] if progress.newest else [])}
    losses = {each: loss for each, loss in known.items() if each % plan.run.log_every == 0 or each == step - 1}
    with progress.writing("a snapshot is"):
        for index, stage in stages.items():
            of_stage = losses if index == progress.last else {}
            try:
                checkpoints.write(Snapshot(index, step, assigned.incarnation, stage.snapshot(), of_stage))
            except SnapshotFailed as error:
                with suppress(OSError):  # on a full disk, there may be no room for the reason either
                    write_file(_reason_file(folder, index), str(error).encode())
                return


def _reason_file(draft: Path, stage: int) -> Path:
    return draft / f"stage-{stage}.lacks"


def _reason(draft: Path, stage: int) -> str:
    """Return why `stage` is lacking."""
    try:
        return _reason_file(draft, stage).read_text(errors="replace")
    except OSError:
        return f"stage {stage} has written none"


def draft_folder(folder: Path) -> Path:
    """Make a draft of `folder`, which must be empty or missing, and return its path. Raises `NotSaved`."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise NotSaved(f"{folder} is there already, and not empty: a checkpoint goes to a folder of its own")
        make_folder(folder.parent)
        draft = draft_of(folder)
        draft.mkdir()
    except OSError as error:
        raise NotSaved(f"the checkpoint cannot be saved in {folder}: {error}") from error
    return draft


def complete_draft(draft: Path, folder: Path, plan: Plan, saved: SavedRun) -> None:
    """Publish the draft as `folder` if it has all stages, once all workers have replied. Raises `NotSaved`.

    Args:
        draft: Draft of the folder.
        folder: Folder of the checkpoint.
        plan: Plan of the run.
        saved: Identity of the checkpoint.
    """
    there = SnapshotDirectory.of(draft, saved.run, plan)
    try:
        present = {*there.present()}
        if lacking := [stage for stage in range(saved.stages) if (stage, saved.step) not in present]:
            reasons = sorted(lacking, key=lambda stage: not _reason_file(draft, stage).exists())  # those told first
            raise NotSaved(f"the checkpoint cannot be saved in {folder}: {_reason(draft, reasons[0])}")
        for stage in range(saved.stages):  # of an attempt before the one that succeeded
            _reason_file(draft, stage).unlink(missing_ok=True)
        write_json(draft / runs.PLAN, plan.as_mapping())
        write_json(draft / SAVED, saved)
        sync(draft / FOLDER)
        publish(draft, folder)
    except OSError as error:
        raise NotSaved(f"the checkpoint cannot be saved in {folder}: {error}") from error


def is_saved(folder: Path) -> bool:
    """Return True if a checkpoint was saved in `folder`."""
    return (folder / SAVED).exists()


def begin_from_saved(plan: Plan, folder: Path) -> str:
    """Make the folder of a new run of `plan` that continues the checkpoint in `folder`; return the run's id.

    Nothing in `folder` changes. Raises `PlanRefused` for another plan, `SnapshotDamaged` for a file that was changed,
    `FolderUnusable`, or `OSError`.
    """
    runs.require_same_plan(plan, folder)
    return begin_from(plan, folder, read_saved(folder))


def begin_from(plan: Plan, folder: Path, saved: SavedRun) -> str:
    """Make the folder of a new run of `plan` that continues a checkpoint; return the run's id.

    Args:
        plan: Plan of both runs.
        folder: Folder with the checkpoint, in which nothing changes.
        saved: Run and step of the checkpoint.

    Raises:
        SnapshotDamaged: A file of the checkpoint was changed.
        FolderUnusable: The new folder cannot be made.
        OSError: The checkpoint cannot be read or copied.
    """
    run = runs.new_id(plan)
    made = runs.make_folder(plan, run)
    theirs, ours = SnapshotDirectory.of(folder, saved.run, plan), SnapshotDirectory.of(made, run, plan)
    try:
        for stage in range(saved.stages):
            _copy(theirs, ours, stage, saved.step)
        carry_lines(folder, saved.step, made, METRICS, EVALUATIONS)
        write_json(made / runs.PLAN, plan.as_mapping())
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return run


def read_saved(folder: Path) -> SavedRun:
    """Return which checkpoint is saved in `folder`. Raises `SnapshotDamaged`."""
    try:
        return msgspec.json.decode((folder / SAVED).read_bytes(), type=SavedRun)
    except msgspec.MsgspecError as error:
        raise SnapshotDamaged(folder, [f"{SAVED} is damaged: {error}"]) from error


def _copy(theirs: SnapshotDirectory, ours: SnapshotDirectory, stage: int, step: int) -> None:
    """Copy one snapshot to the new run, which has made no calls, and write its id into it. Raises `SnapshotDamaged`."""
    source, target = theirs.path(stage, step), ours.path(stage, step)
    if found := theirs.verify(stage, step):
        raise SnapshotDamaged(source, found)
    make_folder(target)
    manifest = read_manifest(source)
    for name in manifest.files:
        shutil.copyfile(source / name, target / name)  # not its permissions: what is saved may be read-only
        sync(target / name)
    begun = {"run": ours.origin.run, "calls": 0, "evaluations": 0}
    write_manifest(target, msgspec.structs.replace(manifest, **begun, sha256=UNSEALED))
    sync(target)
