"""Removal of the folders of runs that are over.

A mark is written first, then what makes the folder that of a run is deleted, so that no command takes what is half
removed for a run; the mark is deleted last. A removal that was interrupted can be repeated. No link is followed: a link
within the folder is deleted, and a folder that is a link is refused.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from time import time

from stageline.broker.transports.base import backend_of
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import StagelineError

from . import folder as runs
from .account import size_of
from .owner import RunOwner, read_owner
from .records import FRESH, RecordedState, read_note, recorded_run

MARK = "stageline-removing"  # a file's name
HALF = "partly removed"
_WITHOUT_END = (*(each for each in RecordedState if each.goes_on), RecordedState.KILLED, "damaged")


class RunKept(StagelineError):
    """Error that a run is not removed.

    Mend: Do what the message says: stop the run, give the command on its machine, or name the folder itself.

    Example: run a goes on: stageline train, pid 812, runs it. `stageline run stop runs/a` ends it at a step
    """

    error_code = "SL516"


@dataclass(frozen=True, slots=True)
class Removable:
    """Folder that may be removed.

    Attributes:
        folder: The folder, without links in its path.
        state: State of the run, "damaged", or `HALF`.
        steps: Finished steps.
        size: Bytes of its files.
        store: Address at which the run's records stay; "" if they are in the folder.
    """

    folder: Path
    state: str
    steps: int
    size: int
    store: str = ""


def half_removed(folder: Path) -> bool:
    """Return True if a removal of `folder` was interrupted."""
    return (folder / MARK).exists() or (folder.is_dir() and not any(folder.iterdir()))


def removable(folder: Path) -> Removable:
    """Return what would be removed.

    Args:
        folder: Folder of a run, as the user has named it.

    Raises:
        RunKept: The run goes on, or may; another run reads it, or would if it was resumed; the folder is a link.
        NoSuchRun: It is not the folder of a run.
    """
    if folder.is_symlink():
        target = folder.readlink()
        raise RunKept(f"{folder} is a link to {target}: name that folder, or delete the link itself with rm")
    if half_removed(folder):
        return Removable(folder.resolve(), HALF, 0, size_of(folder))
    if not runs.is_known(folder):
        raise runs.NoSuchRun(runs.no_run(folder))
    real, owner = folder.resolve(), _owner(folder)
    _demand_no_process(folder, owner)
    state, steps, store = _recorded(folder)
    if owner is None or owner.alive is None:
        _demand_end(folder, owner, state)
    _demand_no_reader(real)
    return Removable(real, state, steps, size_of(real), store)


def remove(found: Removable) -> None:
    """Remove the folder, after another look: the run may have been resumed since.

    Raises `RunKept`, and `OSError`; then it can be repeated.
    """
    folder = found.folder
    if not folder.exists():  # it was named twice
        return
    removable(folder)
    (folder / MARK).touch()
    for name in (runs.PLAN, runs.OWNER):
        (folder / name).unlink(missing_ok=True)
    for each in list(folder.iterdir()):
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != MARK:
            each.unlink(missing_ok=True)
    (folder / MARK).unlink()
    folder.rmdir()


def _owner(folder: Path) -> RunOwner | None:
    try:
        return read_owner(folder)
    except ValueError:  # damaged: of which process it tells is not known
        return None


def _demand_no_process(folder: Path, owner: RunOwner | None) -> None:
    if owner is not None and owner.alive:
        who = "the launcher of a script" if owner.command == "script" else f"stageline {owner.command}"
        raise RunKept(f"run {folder.name} goes on: {who}, pid {owner.pid}, runs it. {_stop(folder)}")
    url = runs.read_broker_url(folder)
    if url is not None and backend_of(url).listens(url):
        raise RunKept(f"run {folder.name} goes on: its broker at {masked(url)} is there. {_stop(folder)}")


def _stop(folder: Path) -> str:
    return f"`stageline run stop {folder}` ends it at a step"


def _demand_end(folder: Path, owner: RunOwner | None, state: str) -> None:
    """Raise `RunKept` if a process that cannot be looked at from here may still write to the folder."""
    if owner is not None and state in _WITHOUT_END:
        raise RunKept(
            f"run {folder.name} was begun on {owner.host}, and no end of it is recorded: give the command on "
            f"{owner.host}; if that machine is gone, delete {folder / runs.OWNER} first"
        )
    if owner is None and (ago := time() - _written(folder)) < FRESH:
        raise RunKept(
            f"something wrote to {folder} {max(0.0, ago):.0f} s ago: a process of another machine may have that run; "
            f"stop it, and give the command again after {FRESH:g} s"
        )


def _written(folder: Path) -> float:
    """Return when a file in the folder was last written, in seconds since the epoch."""
    return max((each.lstat().st_mtime for each in folder.rglob("*") if not each.is_dir()), default=0.0)


def _recorded(folder: Path) -> tuple[str, int, str]:
    """Return state and steps of the run, and the address of records that are not in its folder."""
    try:
        with recorded_run(folder) as run:
            kept = str((run.plan or {}).get("broker", {}).get("store", runs.IN_FOLDER))
            return str(run.state), run.steps, "" if kept == runs.IN_FOLDER else masked(kept)
    except (StagelineError, OSError):
        return "damaged", 0, ""


def _demand_no_reader(folder: Path) -> None:
    """Raise `RunKept` if a run in the same folder of runs continues this one's checkpoint, and may read it again."""
    for other in runs.all_in(folder.parent):
        note, owner = read_note(other), _owner(other)
        if note is None or note.run != folder.name:
            continue
        reads = f"run {other.name} goes on from step {note.step} of run {folder.name}"
        if owner is not None and owner.alive:
            raise RunKept(
                f"{reads}, whose checkpoint it may read again: stop it first, with `stageline run stop {other}`"
            )
        if not _has_own_checkpoint(other, note.step):
            raise RunKept(
                f"{reads} and has no complete checkpoint of its own, so that it cannot be resumed without that one: "
                f"resume it until it has one, or delete it first, with `stageline run rm {other}`"
            )


def _has_own_checkpoint(folder: Path, begun: int) -> bool:
    """Return True if the run, which continues another from step `begun`, has finished or saved a later step."""
    try:
        with recorded_run(folder) as run:
            return run.state == RecordedState.FINISHED or run.complete > begun
    except (StagelineError, OSError):
        return False
