"""`stageline logs`: the logs of a run, merged by time."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from time import sleep, time

import click
import msgspec

from stageline.broker.control.log_answer import LogLine
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.asking.log_lines import Ask, LogPlaces, RunLogs, last
from stageline.workers.cli.asking.looking import EVERY, goes_on
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import CommandFailed, answer, say
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.runs.folder import Facts

_LOOK = 0.25  # seconds between two looks into the files
_FOLLOWED = 20  # lines that --follow begins with
_OTHERS = re.compile(r"broker|launcher|script|on-stall|spare-\d{1,9}")
_AGO = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)")
_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d)?")


def _since(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float:
    """Return the time that `--since` names, in seconds since the epoch; -inf without the option."""
    if value is None:
        return float("-inf")
    if (ago := _AGO.fullmatch(value)) is not None:
        return time() - float(ago[1]) * _UNITS[ago[2]]
    try:
        if _CLOCK.fullmatch(value):
            at = datetime.strptime(value, "%H:%M:%S" if value.count(":") > 1 else "%H:%M").time()
            found = datetime.combine(datetime.now().date(), at).timestamp()
            return found if found <= time() else found - 86400
        return datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no time: write how long ago, such as 90s, 10min, 2h or 1d, a time of the last 24 hours, "
            "such as 14:30, or a date and a time, such as '2026-11-29 14:30'"
        ) from None


@click.command(
    cls=Command,
    examples=("stageline logs --since 10min", "stageline logs -f 1 runs/digits-20260131-101500-1f0c"),
    groups={"Lines": ("--follow", "--since", "--lines")},
    codes=codes(
        ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, ExitCode.REFUSED, usage="an option is wrong, or no such log"
    ),
)
@click.argument("more", metavar="[WORKER] [WHERE]", nargs=-1, shell_complete=completion.runs_and_plans)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until the run is over.")
@click.option(
    "--since",
    metavar="TIME",
    callback=_since,
    help="Leave out older lines: 10min, 2h, 14:30, or '2026-11-29 14:30'.",
)
@click.option(
    "--lines",
    type=click.IntRange(min=0),
    help=f"Show the last N of these lines. Default: all, with --follow {_FOLLOWED}.",
)
@broker_address.broker
@options.as_json
def logs(
    more: tuple[str, ...], follow: bool, since: float, lines: int | None, broker: str | None, as_json: bool
) -> None:
    """Show the logs of a run, merged by time.

    Logs are files in the run's folder. A worker whose log is elsewhere, on another machine, tells its newest lines
    through the broker. WORKER is a worker's number, broker, launcher, script, or a spare such as spare-1. Default: all.
    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    wanted, where = _more(more)
    run = _LoggedRun(where, broker)
    found = RunLogs(run.folder, wanted)
    found.find(run.places)
    _demand_logs(found, wanted, run.status)
    if (count := _FOLLOWED if follow and lines is None else lines) is not None:
        found.newest(count)
    print_line = partial(_print, as_json=as_json, width=max(map(len, found.names)))
    with run.asking() as ask:
        shown = (each for each in found.lines(run.places, ask, whole=follow) if each.time >= since)
        _show(last(shown, count), print_line)
    told = _tell(found, run, {})
    while follow:
        follow = run.goes_on
        found.find(run.places)
        with run.asking() as ask:
            _show(found.lines(run.places, ask, whole=follow), print_line)
        told = _tell(found, run, told)
        if follow:
            sleep(_LOOK)
            run.look()


class _LoggedRun:
    """Run whose logs are read: its folder, if it is here, and its status, which is asked again about once a second.

    Attributes:
        status: The newest status.
        folder: Folder of the run; None if it is not here.
        places: Workers of the run.
    """

    def __init__(self, where: str | None, broker: str | None) -> None:
        """Ask for the status. Raises what `options.answer_about` raises."""
        self._where, self._broker = where, broker
        self.status, self._looked, self._asked = options.answer_about(where, broker, "status"), time(), False
        self.folder = _folder(where, broker, self.status["run"])
        self.places = LogPlaces(self.status, self.folder)

    @property
    def goes_on(self) -> bool:
        """True if the run may go on."""
        return goes_on(self.status)

    @property
    def answers(self) -> bool:
        """True if the run's broker answers."""
        return bool(self.status["source"] == "broker")

    def look(self) -> None:
        """Ask for the status again if the last one is old."""
        if time() - self._looked >= EVERY:
            self.status, self._looked = options.answer_about(self._where, self._broker, "status"), time()
            self.places, self._asked = LogPlaces(self.status, self.folder), False

    @contextlib.contextmanager
    def asking(self) -> Iterator[Ask | None]:
        """Return a context whose value asks the run's broker, once for each status; None if it does not answer."""
        with contextlib.ExitStack() as stack:
            ask: Ask | None = None
            if self.answers and not self._asked:
                with contextlib.suppress(BrokerUnreachable):
                    ask = stack.enter_context(options.asking(self._where, self._broker))
            self._asked = True
            yield ask


def _more(words: tuple[str, ...]) -> tuple[int | str | None, str | None]:
    """Return the worker or process, and the run that a command line names, each None if it does not."""
    found = list(words)
    wanted: int | str | None = None
    if found and re.fullmatch("[0-9]{1,9}", found[0]):
        wanted = int(found.pop(0))
    elif found and _OTHERS.fullmatch(found[0]):
        wanted = found.pop(0)
    if len(found) > 1:
        raise click.UsageError(f"{found[1]!r} is one word too many: the number of a worker and a run are taken")
    return wanted, found[0] if found else None


def _folder(where: str | None, broker: str | None, run: str) -> Path | None:
    """Return the folder of the run, None if it is not here."""
    if broker is not None:
        return None
    try:
        folder = options.folder_of(where)
    except CommandFailed:
        return None
    return folder if folder.resolve().name == run else None


def _demand_logs(found: RunLogs, wanted: int | str | None, status: Facts) -> None:
    """Raise `CommandFailed` if the run has no log, or not the one that is wanted."""
    if found.names:
        return
    if wanted is None:
        raise CommandFailed(f"run {status['run']} has no logs here, and no worker to ask for one", ExitCode.USAGE)
    what = f"worker {wanted}" if isinstance(wanted, int) else wanted
    workers = ", ".join(str(each["index"]) for each in status["workers"]) or "none"
    raise CommandFailed(f"run {status['run']} has no log of {what} here; its workers are {workers}", ExitCode.USAGE)


def _show(lines: Iterable[LogLine], print_line: Callable[[LogLine], None]) -> None:
    for line in lines:
        print_line(line)


def _print(line: LogLine, *, as_json: bool, width: int) -> None:
    level = {"": "", "warning": "warning: "}.get(line.level, "error: ")
    at = f"{datetime.fromtimestamp(line.time):%F %T.%f}"[:-3]
    facts = {"schema": "logs/1", **msgspec.to_builtins(line)}
    answer(facts, as_json, lambda: say(f"{at} {line.log:{width}}  {level}{line.text}"))


def _tell(found: RunLogs, run: _LoggedRun, told: dict[str, str]) -> dict[str, str]:
    """Say on stderr which logs are lacking, each once; return those."""
    if not run.answers:
        found.note_silence(run.places)
    found.note_broker()
    options.warn([reason for name, reason in found.lacking.items() if name not in told])
    return dict(found.lacking)
