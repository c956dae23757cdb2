"""Files and folders that are there whole or not at all, whenever their writer is killed.

.plan.json-5fa0c1d2    a draft: written and flushed to the disk, or left so by a kill; it counts for nothing
plan.json              the finished file, after one rename and a flush of the folder
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import msgspec

from stageline.pipeline.retry import ResourceFault, persist

_Written = TypeVar("_Written")


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically, replacing an existing one; once this returns, it survives a power failure.

    Makes the file's folder if needed.

    Args:
        path: Path of the file.
        data: Contents.
        mode: Permissions, from which the umask is taken.

    Raises:
        OSError: The file could not be written; nothing has changed.
    """
    with _draft(path, data, mode) as draft:
        publish(draft, path)


def create_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file as `write_file` does, unless there is one: of several writers, one makes it.

    Args:
        path: Path of the file.
        data: Contents.
        mode: Permissions, from which the umask is taken.

    Raises:
        FileExistsError: There is one.
        OSError: The file could not be written; nothing has changed.
    """
    with _draft(path, data, mode) as draft:
        os.link(draft, path)
        sync(path.parent)


@contextmanager
def _draft(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Return a context with a draft of `path` that is on the disk; it is gone at the end."""
    make_folder(path.parent)
    draft = draft_of(path)
    try:
        with open(draft, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
        sync(draft)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def keep_trying(write: Callable[[], _Written], path: Path) -> _Written:
    """Call `write`, which writes `path`, and return its result; retry for a minute after a fault that may pass.

    The first such fault is logged as a warning.
    """
    told = False

    def note(fault: ResourceFault | None) -> None:
        nonlocal told
        if fault is not None and not told:
            import structlog  # imports rich, for which commands that only ask would wait

            structlog.get_logger().warning("waiting", reason=f"this process {fault.told(monotonic())}")
        told = True

    return persist(write, f"write {path}", note, now=monotonic, wait=sleep)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically; see `write_file`."""
    write_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def persist_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically, and keep trying for a minute; see `keep_trying`."""
    keep_trying(partial(write_json, path, value), path)


def draft_of(path: Path) -> Path:
    """Return a free name beside `path` that begins with a dot."""
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def publish(draft: Path, path: Path) -> None:
    """Rename a draft that is on the disk to `path`; once this returns, `path` survives a power failure.

    A file may replace a file, a folder only an empty folder. Raises `OSError`.
    """
    draft.replace(path)
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder in one instant for all readers.

    Files that cannot be deleted stay in a folder with the name of a draft. Raises `OSError`.
    """
    shutil.rmtree(path.rename(draft_of(path)), ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; once this returns, they survive a power failure. Raises `OSError`."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of its files, to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
