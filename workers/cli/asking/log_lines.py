"""Lines of a run's logs, merged by time: of the files in its folder, and of workers whose log is elsewhere.

    folder    broker.log, worker-0.log, ...          read as files
    worker    a log on another machine, or in a terminal: the worker tells its newest lines through the broker

Times are by the broker's clock: those of a worker whose clock differs from it are moved by the known offset.
"""

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import msgspec

from stageline.broker.control.log_answer import LogLine, WorkerLog
from stageline.broker.slowness.steps import Clocks
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.logs import FileLine, LogFile, logs_in
from stageline.workers.runs.owner import read_owner

Ask = Callable[..., Facts]
TAIL = 8 * 2**20  # bytes of each file that are looked at for its newest lines
_NAMED = re.compile(r"worker-(\d{1,9})")
_WARNING, _ERROR = "stageline: warning: ", "stageline: "  # before a line; without a time, the latter is any message
_PLAIN = ("", "info")  # levels that no line shows
_BROKER = "broker"  # name of its log
_BY_TIME = attrgetter("time")


class LogPlaces:
    """Workers of a run by the names of their processes, their machines and their clocks, as the status has them."""

    def __init__(self, status: Facts, folder: Path | None) -> None:
        """Take the status of the run, whose folder is here or None."""
        self.run: str = status["run"]
        self._rows = {row["index"]: row for row in status["workers"] if row.get("name")}
        self._folder = folder
        offsets = {index: tuple(row["clock"]) for index, row in self._rows.items() if row.get("clock")}
        self._clocks = Clocks.of(offsets, {index: row["host"] for index, row in self._rows.items()})
        self._host = _owner_host(folder)

    def worker(self, log: str) -> int | None:
        """Return the worker whose process has this log; None for a log of another process."""
        known = {row["name"]: index for index, row in self._rows.items() if self._is_of_folder(row)}
        found = _NAMED.fullmatch(log)
        return known.get(log, int(found[1]) if found else None)

    def ahead(self, worker: int | None) -> float:
        """Return the seconds to add to the times of a worker's log."""
        return 0.0 if worker is None else self._clocks.of_worker(worker)

    def host(self, worker: int | None) -> str:
        """Return the machine of a worker; "" if it is not known."""
        return str(self._rows.get(worker if worker is not None else -1, {}).get("host", ""))

    def elsewhere(self) -> Iterator[tuple[int, str]]:
        """Yield the workers whose logs are not in the folder, with the names of their processes."""
        for index, row in sorted(self._rows.items()):
            if not (self._is_of_folder(row) and self._folder and (self._folder / f"{row['name']}.log").exists()):
                yield index, row["name"]

    def _is_of_folder(self, row: Facts) -> bool:
        """Return True if a process ran on the machine whose processes log into the folder."""
        return self._folder is not None and self._host in ("", row["host"])


def _owner_host(folder: Path | None) -> str:
    with suppress(ValueError):
        if folder is not None and (owner := read_owner(folder)) is not None:
            return owner.host
    return ""


class FileLog:
    """Log of a process in the run's folder."""

    def __init__(self, path: Path) -> None:
        """Begin at the start of the file `path`."""
        self.file = LogFile(path)

    def lines(self, places: LogPlaces, *, whole: bool) -> Iterator[LogLine]:
        """Yield the lines since the last look; with `whole`, none that has no end yet."""
        worker = places.worker(self.file.name)
        ahead, host = places.ahead(worker), places.host(worker)
        for each in self.file.lines(whole=whole):
            level, text = _level(each)
            yield LogLine(
                run=places.run,
                log=self.file.name,
                worker=worker,
                host=host,
                time=each.time + ahead,
                exact=each.exact,
                level=level,
                text=text,
                source="folder",
            )


def _level(line: FileLine) -> tuple[str, str]:
    """Return the level of a line, and the line without it."""
    if line.text.startswith(_WARNING):
        return "warning", line.text.removeprefix(_WARNING)
    if line.exact and line.text.startswith(_ERROR):
        return "error", line.text.removeprefix(_ERROR)
    return "", line.text


class WorkerLines:
    """Log of a worker that is elsewhere, as the worker tells it."""

    def __init__(self, worker: int, name: str) -> None:
        """Begin at the oldest line that the worker keeps."""
        self.worker, self.name = worker, name
        self._start = 0

    def lines(self, places: LogPlaces, ask: Ask) -> Iterator[LogLine]:
        """Yield the lines since the last look. Raises `ValueError` or `BrokerUnreachable` if they are not told."""
        while True:
            facts = ask("log", worker=str(self.worker), start=str(self._start))
            found = msgspec.convert({key: facts[key] for key in WorkerLog.__struct_fields__}, WorkerLog)
            if found.name != self.name:  # another process has the place now
                self.name, self._start = found.name, 0
                continue
            if not found.kept.lines:
                return
            if found.kept.first > self._start > 0:
                skipped = f"({found.kept.first - self._start} lines were not kept)"
                yield self._line(places, found.kept.lines[0].time, "", skipped)
            self._start = found.kept.first + len(found.kept.lines)
            for each in found.kept.lines:
                level = "" if each.level in _PLAIN else each.level
                for text in each.text.splitlines() or [""]:
                    yield self._line(places, each.time, level, text)

    def _line(self, places: LogPlaces, time: float, level: str, text: str) -> LogLine:
        return LogLine(
            run=places.run,
            log=self.name,
            worker=self.worker,
            host=places.host(self.worker),
            time=time + places.ahead(self.worker),
            exact=True,
            level=level,
            text=text,
            source="worker",
        )


class RunLogs:
    """Logs of a run, which may grow while they are read.

    Attributes:
        lacking: Why lines are missing, by the name of the log.
    """

    def __init__(self, folder: Path | None, wanted: int | str | None) -> None:
        """Begin with no log.

        Args:
            folder: Folder of the run, None if it is not here.
            wanted: Worker, or name of another process, whose log alone is wanted; None for all.
        """
        self._folder = folder
        self._wanted = wanted
        self._files: dict[Path, FileLog] = {}
        self._workers: dict[int, WorkerLines] = {}
        self.lacking: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Names of the logs that were found."""
        return [each.file.name for each in self._files.values()] + [each.name for each in self._workers.values()]

    def newest(self, count: int) -> None:
        """Leave out what cannot be among the newest `count` lines, of files that are long."""
        for each in self._files.values():
            each.file.skip_to(max(TAIL, count * 1000))

    def find(self, places: LogPlaces) -> None:
        """Look for logs that were not there before."""
        for path in logs_in(self._folder) if self._folder is not None else ():
            if self._is_wanted(path.stem, places.worker(path.stem)):
                self._files.setdefault(path, FileLog(path))
        for worker, name in places.elsewhere():
            if self._is_wanted(name, worker):
                self._workers.setdefault(worker, WorkerLines(worker, name))

    def _is_wanted(self, name: str, worker: int | None) -> bool:
        return self._wanted is None or self._wanted in (name, worker)

    def lines(self, places: LogPlaces, ask: Ask | None, *, whole: bool = False) -> Iterator[LogLine]:
        """Return the lines since the last look, by time.

        Args:
            places: Workers of the run.
            ask: Asks the broker of the run; None to leave out what workers tell.
            whole: Leave a line that has no end yet to the next look.
        """
        files = (each.lines(places, whole=whole) for each in self._files.values())
        told = (self._told(each, places, ask) for each in self._workers.values() if ask is not None)
        return heapq.merge(*files, *told, key=_BY_TIME)

    def note_silence(self, places: LogPlaces) -> None:
        """Note that no broker answers which could ask workers for their lines."""
        for each in self._workers.values():
            reason = "no broker answers that could ask the worker"
            self.lacking.setdefault(each.name, _lacking(each, places, reason))

    def note_broker(self) -> None:
        """Note that the log of the broker is not here, if all logs are wanted."""
        if self._wanted is None and _BROKER not in self.names:
            self.lacking.setdefault(
                _BROKER,
                "the log of the broker is not here: it is what `stageline broker` writes to its stderr, or a file "
                "in the run's folder on the broker's machine",
            )

    def _told(self, log: WorkerLines, places: LogPlaces, ask: Ask) -> Sequence[LogLine]:
        """Return the lines that a worker tells; note why if it tells none."""
        found: list[LogLine] = []
        try:
            found.extend(log.lines(places, ask))
        except (ValueError, BrokerUnreachable) as error:
            self.lacking.setdefault(log.name, _lacking(log, places, str(error)))
        return found


def _lacking(log: WorkerLines, places: LogPlaces, reason: str) -> str:
    """Return the sentence that a log is not here, and where it is."""
    host = places.host(log.worker)
    return (
        f"the log of worker {log.worker} ({log.name} on {host}) is not in the run's folder: {reason}. It is what that "
        f"process writes to its stderr, on {host}"
    )


def last(lines: Iterable[LogLine], count: int | None) -> Iterable[LogLine]:
    """Return the last `count` of the lines, all for None."""
    return lines if count is None else deque(lines, maxlen=count)
