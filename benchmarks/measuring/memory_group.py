"""A control group of Linux, which limits the memory of processes: what they allocate, and what is in memory of files.

Over its limit, the system takes pages of files from the group, writes those that have changed, and at last kills.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import click

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """The group whose files are in `folder`, of version 1 or 2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def most(self) -> int:
        """The most bytes that it has had in memory."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        return int(next(path for name in names if (path := self.folder / name).exists()).read_text())

    def limit(self, size: int) -> None:
        names = ("memory.max", "memory.limit_in_bytes")
        next(path for name in names if (path := self.folder / name).exists()).write_text(str(size))


@contextmanager
def memory_group(limit: int | None) -> Iterator[MemoryGroup]:
    """A group that may have `limit` bytes in memory, for as long as the context lasts."""
    parent = next((each for each in (_ROOT / "memory", _ROOT) if each.is_dir()), None)
    try:
        if parent is None:
            raise FileNotFoundError(_ROOT)
        group = MemoryGroup(Path(mkdtemp(prefix="stageline-", dir=parent)))
    except OSError as error:
        raise click.ClickException(f"no control group can be made here, which limits memory: {error}") from error
    try:
        if limit is not None:
            group.limit(limit)
        yield group
    finally:
        group.folder.rmdir()
