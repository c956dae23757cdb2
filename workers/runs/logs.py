"""Logs in the folder of a run: a file for each process, whose lines begin with their time.

    2026-11-29 09:26:07.123+00:00 assigned: this process is worker 0 ...

What user code prints has no time: such a line counts as of the time of the line before it, or, at the end of a file, of
the file's last change, which was its writing.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

SUFFIX = ".log"
OTHERS = frozenset({"keys"})  # logs of another kind: records of what became of keys
LONGEST = 2**16  # characters of a line; the rest of it counts as further lines
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?) ?")
_OWN_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ")  # alone as `stamped` writes it
_MOST_HELD = 10_000  # lines without a time before the first line that has one
_SLACK = 1.0  # seconds that a file system may be behind the clock


def stamped(time: float, text: str) -> str:
    """Return `text` with its time before it, in seconds since the epoch, as a line of a log has it."""
    return f"{datetime.fromtimestamp(time).astimezone().isoformat(' ', 'milliseconds')} {text}"


def own_text(line: str) -> str | None:
    """Return a line of a log without its time; None if it has none as `stamped` writes it: another date is none."""
    return line[found.end() :] if (found := _OWN_STAMP.match(line)) else None


def unstamped(line: str) -> str:
    """Return a line of a log without its time."""
    return line[found.end() :] if (found := _STAMP.match(line)) else line


@dataclass(frozen=True, slots=True)
class FileLine:
    """A line of a log with its time, in seconds since the epoch; `exact` is False if the line itself has none."""

    time: float
    exact: bool
    text: str


class LogFile:
    """Log of one process, read from its beginning on, and again what was added since."""

    def __init__(self, path: Path) -> None:
        """Begin at the start of the file `path`."""
        self.path = path
        self._at = 0
        self._time: float | None = None  # of the newest line

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.path.name.removesuffix(SUFFIX)

    def skip_to(self, bytes_left: int) -> None:
        """Leave out the lines that begin before the last `bytes_left` bytes."""
        with self.path.open("rb") as file:
            if (start := os.fstat(file.fileno()).st_size - bytes_left) > self._at:
                file.seek(start - 1)
                file.readline()
                self._at = file.tell()

    def lines(self, *, whole: bool = False) -> Iterator[FileLine]:
        """Yield the lines that were added since the last look, in order; their times never fall.

        Args:
            whole: Leave a last line that has no end yet to the next look.
        """
        with self.path.open("rb") as file:
            known = os.fstat(file.fileno())
            if known.st_size < self._at:  # it was emptied
                self._at = 0
            file.seek(self._at)
            held: list[str] = []
            while self._at < known.st_size and (raw := file.readline(LONGEST)):
                if whole and len(raw) < LONGEST and not raw.endswith(b"\n"):
                    break
                self._at += len(raw)
                text = raw.decode(errors="replace").rstrip("\r\n")
                time = _time_of(text, self._time, known.st_mtime + _SLACK)
                held.append(text)
                if time is not None:
                    yield from self._dated(held[:-1], self._time or time)
                    self._time = time
                    yield FileLine(time, exact=True, text=unstamped(held.pop()))
                elif len(held) < _MOST_HELD:
                    continue
                else:
                    yield from self._dated(held, self._time or known.st_mtime)
                held.clear()
            if held:
                self._time = max(self._time or known.st_mtime, known.st_mtime)
                yield from self._dated(held, self._time)

    def _dated(self, texts: Sequence[str], time: float) -> Iterator[FileLine]:
        """Yield lines that have no time of their own, as of `time`."""
        return (FileLine(time, exact=False, text=each) for each in texts)


def _time_of(text: str, before: float | None, latest: float) -> float | None:
    """Return the time at which a line begins; None if it has none, or one that cannot be the time of its writing."""
    found = _STAMP.match(text)
    if found is None:
        return None
    try:
        time = datetime.fromisoformat(found[1].replace(",", ".")).timestamp()
    except ValueError:
        return None
    return time if (before is None or time >= before - 1e-3) and time <= latest else None


def logs_in(folder: Path) -> list[Path]:
    """Return the files of the processes' logs in a run's folder, by name."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem not in OTHERS)
