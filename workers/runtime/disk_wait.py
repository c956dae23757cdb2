"""How the compute loop waits for the disk: so that reports of it name what it waits for."""

from collections.abc import Callable, Hashable

from stageline.workers.disk.background_writer import BackgroundWriter

from .loop import PATIENCE
from .progress import Progress


def has_room(writer: BackgroundWriter, key: Hashable, progress: Progress, what: str, longest: float) -> bool:
    """Whether `writer` has room under `key`; waits for that up to `longest` seconds. `what` continues "waits until"
    and is continued by "written"."""
    return _told(lambda timeout: writer.has_room(key, timeout), progress, what, longest)


def is_written(
    writer: BackgroundWriter,
    key: Hashable,
    progress: Progress,
    what: str,
    longest: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Whether all that `writer` was given under `key` is done; waits as `has_room` does, and calls `meanwhile` now and
    then."""
    return _told(lambda timeout: writer.is_done(key, timeout), progress, what, longest, meanwhile)


def in_turns(wait: Callable[[float], bool], longest: float, meanwhile: Callable[[], None]) -> bool:
    """What `wait` returns once it is true, or after `longest` seconds; calls `meanwhile` every `PATIENCE` seconds."""
    while longest > PATIENCE:
        meanwhile()
        if wait(PATIENCE):
            return True
        longest -= PATIENCE
    return wait(longest)


def _told(
    wait: Callable[[float], bool],
    progress: Progress,
    what: str,
    longest: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    if wait(PATIENCE):
        return True
    with progress.writing(what):
        return in_turns(wait, longest, meanwhile)
