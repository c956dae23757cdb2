"""How the compute loop waits for the disk: so that reports of it name what it waits for."""

from collections.abc import Hashable

from stageline.workers.disk.background_writer import BackgroundWriter

from .loop import PATIENCE
from .progress import Progress


def has_room(writer: BackgroundWriter, key: Hashable, progress: Progress, what: str, longest: float) -> bool:
    """Whether `writer` has room under `key`; waits for that up to `longest` seconds. `what` continues "waits until"
    and is continued by "written"."""
    if writer.has_room(key, PATIENCE):
        return True
    progress.waits, progress.writes = True, what
    try:
        return writer.has_room(key, longest)
    finally:
        progress.writes = ""
