"""Whether a run's folder on this machine is that of the run which a worker has joined by an address alone.

The broker gives the run's id, and with it the folder: what poses as a broker could name that of any other run in
`run.dir`, whose snapshots and weights would be deleted and overwritten.

    joined.json     the plan, in a folder that such a worker has made; where the run was begun, plan.json has it
"""

from pathlib import Path

import msgspec

from stageline.pipeline.plan import Plan, differences
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs import folder as runs

from .directory import FOLDER, SnapshotDirectory
from .snapshot import Origin, SnapshotDamaged, read_manifest

NOTE = "joined.json"
_LISTED = 5  # differences that a refusal names


def why_not_own(plan: Plan, run: str) -> str | None:
    """Why the folder of `run` cannot be used for `plan`, which has its stages filled in; None if it can: it is not
    there, or empty, or its plan and the snapshots in it are the same. Changes nothing."""
    folder = runs.folder(plan, run)
    try:
        wrong = _what_else(plan, run, folder)
    except OSError as error:
        wrong = f"it cannot be read: {error}"
    if wrong is None:
        return None
    return (
        f"the broker's run is {run}, but the folder {folder} is not this run's: {wrong}. Nothing in it was changed. "
        "Move it away, or join from another folder"
    )


def note_own(plan: Plan, run: str) -> None:
    """Notes the plan in the folder of `run`, which is made if need be, for the next worker that begins there. Raises
    `FolderUnusable`, `OSError`."""
    folder = runs.make_folder(plan, run)
    if not any((folder / name).exists() for name in (runs.PLAN, NOTE)):
        persist_json(folder / NOTE, plan.as_mapping())


def _what_else(plan: Plan, run: str, folder: Path) -> str | None:
    there = [entry for entry in _entries(folder) if not entry.name.startswith(".")]  # before the note is looked for
    noted = [folder / name for name in (runs.PLAN, NOTE) if (folder / name).exists()]
    for file in noted:
        if wrong := _other_plan(plan, file):
            return wrong
    if there and not noted:
        return f"it has neither {runs.PLAN} nor {NOTE}"
    return _other_snapshot(plan, run, folder)


def _other_plan(plan: Plan, file: Path) -> str | None:
    """How the plan in `file` differs."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"its {file.name} cannot be read"
    found = differences(plan.as_mapping(), kept)
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    first = "; ".join(map(str, found[:_LISTED])) + more
    return f"it was begun with another plan: {first} (here: the broker's, there: the folder's)" if found else None


def _other_snapshot(plan: Plan, run: str, folder: Path) -> str | None:
    """A snapshot that was written for another run or plan. What is damaged belongs to none."""
    checkpoints = SnapshotDirectory(folder / FOLDER, Origin(run, plan.digest()))
    for stage, step in checkpoints.present():
        path = checkpoints.path(stage, step)
        try:
            manifest = read_manifest(path)
        except SnapshotDamaged:
            continue
        if (manifest.run, manifest.plan) != (run, plan.digest()):
            return f"{path} is of run {manifest.run}, of a plan with the digest {manifest.plan[:12]}"
    return None


def _entries(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.exists() else []
