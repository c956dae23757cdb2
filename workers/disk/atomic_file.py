"""Files and folders that are there whole or not at all, whenever their writer is killed.

.plan.json-5fa0c1d2    a draft: written and flushed to the disk, or left so by a kill; it counts for nothing
plan.json              the same after one rename, and a flush of the folder
"""

import os
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import msgspec

from stageline.pipeline.retry import ResourceFault, persist

_Written = TypeVar("_Written")


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a file, in place of the one that is there; when this returns, it survives a power failure.

    `mode` is its permissions, from which the umask is taken. Makes its folder if need be. Raises `OSError`; then
    nothing has changed.
    """
    make_folder(path.parent)
    draft = draft_of(path)
    try:
        with open(draft, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
        sync(draft)
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def keep_trying(write: Callable[[], _Written], path: Path) -> _Written:
    """Calls `write`, which writes `path`, and again for a minute if a fault that may pass stops it; warns of that.
    Returns what `write` does."""
    told = False

    def note(fault: ResourceFault | None) -> None:
        nonlocal told
        if fault is not None and not told:
            import structlog  # imports rich, for which commands that only ask would wait

            structlog.get_logger().warning("waiting", reason=f"this process {fault.told(monotonic())}")
        told = True

    return persist(write, f"write {path}", note, now=monotonic, wait=sleep)


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON, as `write_file` does."""
    write_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def persist_json(path: Path, value: object) -> None:
    """As `write_json`, but keeps trying."""
    keep_trying(partial(write_json, path, value), path)


def draft_of(path: Path) -> Path:
    """A free name beside `path`, which begins with a dot."""
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def publish(draft: Path, path: Path) -> None:
    """Gives a draft that is on the disk its name: a file in place of another, or a folder where there is none."""
    draft.replace(path)
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Removes a folder in one instant for all readers. What cannot be deleted stays as a draft. Raises `OSError`."""
    shutil.rmtree(path.rename(draft_of(path)), ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; when this returns, they survive a power failure. Raises `OSError`."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of its files, to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
