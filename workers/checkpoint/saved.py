"""A checkpoint of a scripted run in a folder of its own, to go on from when the run has moved on or is gone.

    saved.json                                  written last: which run, how many steps, how many stages
    plan.json                                   the run's plan
    checkpoints/stage-0/step-0000000120/        a snapshot, as in a run's folder, of a position without calls

Each worker writes the snapshots of its stages into a draft of the folder, which the script completes and gives its
name: a folder of that name is whole. A run that begins from it gets a copy.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stageline.broker.control.messages import Assigned
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish, sync, write_json
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.progress import Progress

from .directory import FOLDER, SnapshotDirectory, SnapshotFailed
from .snapshot import FILES, UNSEALED, Origin, Snapshot, SnapshotDamaged, read_manifest, write_manifest

SAVED = "saved.json"


class NotSaved(StagelineError):
    """A checkpoint could not be saved; nothing is left of it, and the run goes on."""


class SavedRun(msgspec.Struct, frozen=True):
    """What is in a folder: the checkpoint of `step` of the run of that id, whose model has so many stages."""

    run: str
    step: int
    stages: int


def save_stages(
    folder: Path, plan: Plan, assigned: Assigned, stages: Mapping[int, Stage], step: int, progress: Progress
) -> str | None:
    """Writes the stages' snapshots into the draft `folder`; they survive a power failure. If the draft is not there any
    more, this repeats a call that the script has an answer to, and nothing is written.

    Returns why it could not: the run need not fail for that. `step` steps are done; `progress` has the losses.
    """
    progress.waits = progress.writes = True
    try:
        return _write(folder, plan, assigned, stages, step, progress)
    finally:
        progress.writes = False


def _write(
    folder: Path, plan: Plan, assigned: Assigned, stages: Mapping[int, Stage], step: int, progress: Progress
) -> str | None:
    if not folder.is_dir():
        return None
    checkpoints = SnapshotDirectory(folder / FOLDER, Origin(assigned.run, plan.digest()))
    known = {**progress.losses, **dict([progress.newest] if progress.newest else [])}
    losses = {each: loss for each, loss in known.items() if each % plan.run.log_every == 0 or each == step - 1}
    try:
        for index, stage in stages.items():
            of_stage = losses if index == progress.last else {}
            checkpoints.write(Snapshot(index, step, assigned.incarnation, stage.snapshot(), of_stage))
    except SnapshotFailed as error:
        return str(error)
    return None


def draft_folder(folder: Path) -> Path:
    """A draft of `folder`, which must be empty or not there. Raises `NotSaved`."""
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
    """All stages have written their snapshots; `folder` is the draft from now on. Raises `NotSaved`."""
    there = SnapshotDirectory(draft / FOLDER, Origin(saved.run, plan.digest()))
    try:
        if lacking := {(stage, saved.step) for stage in range(saved.stages)} - {*there.present()}:
            raise NotSaved(f"the checkpoint cannot be saved in {folder}: stage {min(lacking)[0]} has written none")
        write_json(draft / runs.PLAN, plan.as_mapping())
        write_json(draft / SAVED, saved)
        sync(draft / FOLDER)
        publish(draft, folder)
    except OSError as error:
        raise NotSaved(f"the checkpoint cannot be saved in {folder}: {error}") from error


def is_saved(folder: Path) -> bool:
    """Whether a checkpoint was saved in `folder`."""
    return (folder / SAVED).exists()


def begin_from_saved(plan: Plan, folder: Path) -> str:
    """Makes the folder of a new run of `plan` that goes on from the checkpoint in `folder`; returns the run's id.

    Nothing in `folder` changes. Raises `PlanRefused` for another plan, `SnapshotDamaged` for a file that was changed,
    `FolderUnusable`, or `OSError`.
    """
    runs.require_same_plan(plan, folder)
    saved = _read(folder)
    run = runs.new_id(plan)
    made = runs.make_folder(plan, run)
    try:
        for stage in range(saved.stages):
            _copy(folder, made, stage, saved, Origin(run, plan.digest()))
        write_json(made / runs.PLAN, plan.as_mapping())
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return run


def _read(folder: Path) -> SavedRun:
    try:
        return msgspec.json.decode((folder / SAVED).read_bytes(), type=SavedRun)
    except msgspec.MsgspecError as error:
        raise SnapshotDamaged(folder, [f"{SAVED} is damaged: {error}"]) from error


def _copy(folder: Path, made: Path, stage: int, saved: SavedRun, origin: Origin) -> None:
    """Copies one snapshot; the copy is the new run's."""
    theirs = SnapshotDirectory(folder / FOLDER, Origin(saved.run, origin.plan))
    if found := theirs.verify(stage, saved.step):
        raise SnapshotDamaged(theirs.path(stage, saved.step), found)
    source, target = theirs.path(stage, saved.step), SnapshotDirectory(made / FOLDER, origin).path(stage, saved.step)
    make_folder(target)
    for name in FILES:
        shutil.copyfile(source / name, target / name)  # not its permissions: what is saved may be read-only
        sync(target / name)
    write_manifest(target, msgspec.structs.replace(read_manifest(source), run=origin.run, sha256=UNSEALED))
    sync(target)
