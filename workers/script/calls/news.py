"""News of a script's run for people: lost workers, what a run waits for, its end before its time, and its progress.

Progress is a line that changes on a terminal, elsewhere a line every few seconds. A thread draws it from what the
script has seen; the loop does not wait for that.

Each line on stderr is marked as stageline's. Each question to the broker has a connection of its own, so any thread may
ask; a broker that does not answer is gone, or busy: then nothing is known, which is no error.
"""

import atexit
import os
import shlex
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from stageline.broker.keys.pairs import KeyPair
from stageline.broker.ledger.member import worker_label
from stageline.pipeline.addresses import EVERY_INTERFACE, host_of, is_showable, masked
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan import Plan
from stageline.pipeline.printable import printable_line
from stageline.pipeline.process.steady_clock import STEADY
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.keys.keyring import own_address, own_join_line
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.listing import ending_of
from stageline.workers.runs.records import RecordedState, recorded_run
from stageline.workers.runtime.progress import Progress

from .fit_progress import Shown, shown
from .page import Seen
from .surfaces import NewsAlone, has_surface, surface_for_progress

ANSWER_TIMEOUT = 2.0  # seconds for the broker to answer
PATIENCE = 1.5  # seconds that a call or the script's own code may take before it is said what the run waits for
LONG = 5.0  # seconds that an empty place is waited for before it is told

Asked = Callable[[str], Facts | None]  # a kind of facts -> the broker's answer; None if it does not answer
LostProcess = tuple[int, int]  # the worker's index, and the pid of the process that was lost
GO_ON = "go on with: "
PERIOD = 0.25  # seconds between two looks
WINDOW = 3.0  # seconds over which the rate is measured


def say(*lines: str) -> None:
    """Write the lines to stderr at once."""
    for line in lines:
        print(f"stageline: {line}", file=sys.stderr, flush=True)


def ask(url: str, what: str, pair: KeyPair | None) -> Facts | None:
    """Return the facts of the broker's answer; None if it does not answer.

    Args:
        url: Address of the broker.
        what: Kind of facts, such as "status".
        pair: Pair by which the broker knows this process; None for an address without a key.
    """
    try:
        with Client(url, pair=pair) as client:
            return client.ask(what, timeout=ANSWER_TIMEOUT)
    except (BrokerUnreachable, ValueError):
        return None


def waits_for(progress: Progress, asked: Asked) -> str:
    """Return what a run has waited for longer than `PATIENCE`; "" for nothing.

    `progress` is the script's own; if the script waits, the broker is `asked` for the reason.
    """
    if STEADY.time() - progress.since < PATIENCE:
        return ""
    if not progress.waits:
        return f"the script {progress.activity().said}"
    facts = asked("why")
    return "the broker does not answer" if facts is None else printable_line(str(facts["text"]))


def worker_lines(asked: Asked) -> list[str]:
    """Return one line for each worker with its state, as the broker knows it; none if there is no broker any more."""
    facts = asked("status")
    return [] if facts is None else [_worker(row) for row in facts["workers"]]


def _worker(row: dict[str, Any]) -> str:
    stages = f"worker {row['index']}, stage {', '.join(map(str, _stages(row)))}"
    process = f", process {row['pid']} on {row['host']}" if "pid" in row else ""
    return printable_line(f"{stages}{process}: {row.get('now') or row['standing']}")


class Run(Protocol):
    """Run that a script may leave open."""

    def abort(self, reason: str) -> None:
        """End the run with what it can save, and tell where it is."""


def watch_for_close(run: Run, folder: Path, progress: Progress) -> "weakref.finalize[..., object]":
    """Return a finalizer that ends `run` when it is forgotten or this process ends, and tells stderr.

    Detach it when `run` is closed.

    Args:
        run: Run that may be left open.
        folder: Folder of the run.
        progress: Progress of the script.
    """
    return weakref.finalize(run, _leave, os.getpid(), weakref.ref(run), folder, progress)


def _leave(owner: int, run: "weakref.ref[Run]", folder: Path, progress: Progress) -> None:
    if os.getpid() != owner:  # in a fork
        return
    saved = ""
    if (left := run()) is None:
        saved = f"; {_saved(folder, progress.complete)}"
    else:
        with suppress(KeyboardInterrupt):  # once more: then nothing is saved any longer
            left.abort("the script has ended without closing its line")
    print(
        f"stageline: the line of {folder} was not closed, so its weights were not kept{saved}. Use it in a `with`, or "
        "call close()",
        file=sys.stderr,
    )


def _saved(folder: Path, complete: int) -> str:
    if not complete:
        return "nothing is saved yet"
    return f"the state after {complete} steps is saved, and Line.resume({str(folder)!r}, ...) goes on there"


class LostWorkers:
    """Source of lines for people about workers that were lost, from successive statuses."""

    def __init__(self, start: str) -> None:
        """Take `start`, the text that says how a replacement is started."""
        self._start = start
        self._told: dict[LostProcess, dict[str, Any]] = {}
        self._awaited: set[LostProcess] = set()  # those of which the long wait was told
        self._finished = 0  # steps, as of the last status

    def lines(self, facts: Facts) -> Iterator[str]:
        """Yield lines about losses: at first, once more if the place is empty for long, and when it is filled again."""
        rows = {(row["index"], row["pid"]): row for row in facts["recovering"]}
        for loss, row in rows.items():
            if loss not in self._told:
                yield printable_line(f"{_label(row)} {row['how']}{self._next(facts)}")
            if loss not in self._awaited and not row["given"] and row["since"] >= LONG:
                self._awaited.add(loss)
                yield printable_line(self._waiting(row))
        lost = {index for index, _ in rows}
        for loss, row in self._told.items():
            if loss not in rows and row["index"] not in lost:
                yield printable_line(_replaced(row, facts))
        self._told = rows  # a process of the same pid may take the place later
        self._awaited &= set(rows)
        self._finished = facts["finished_floor"]

    def _next(self, facts: Facts) -> str:
        """Return the step at which the replacement begins, and how many finished steps are done again."""
        step, finished = facts["checkpoint"] or 0, max(self._finished, facts["finished_floor"])
        steps = "1 step is" if finished == step + 1 else f"{finished - step} steps are"
        again = f", so that {steps} done again" if finished > step else ""
        return f"; its replacement begins at step {step}{again}"

    def _waiting(self, row: dict[str, Any]) -> str:
        return (
            f"waiting for {_label(row)}, lost {row['since']:.0f} s ago. {self._start}. The run ends with its newest "
            f"checkpoint if none joins within {row['left']:.0f} s"
        )


def _replaced(row: dict[str, Any], facts: Facts) -> str:
    there = (each for each in facts["workers"] if each["index"] == row["index"] and "pid" in each)
    process = next((f", in process {each['pid']}" for each in there), "")
    return f"{_label(row)} computes again{process}, {row['since']:.1f} s after it was lost"


def _label(row: dict[str, Any]) -> str:
    return worker_label(row["index"], _stages(row))


def _stages(row: Facts) -> Sequence[int | str]:
    """Return the labels of a worker's stages, which are their numbers where no stage has replicas."""
    labels: Sequence[int | str] = row.get("labels") or row["stages"]
    return labels


def early_end(folder: Path, store: str, *, knows_failure: bool = False) -> str:
    """Return a sentence on a run whose broker has ended early, in the words of `stageline why`.

    Args:
        folder: Folder of the run.
        store: Address of the broker's records. If they cannot be read, only the folder is named.
        knows_failure: The script knows the failure, so that it is not named.
    """
    where = f"the run is in {folder}"
    try:
        with recorded_run(folder, store) as run:
            ending, complete = ending_of(run), run.complete
            failure = f"it has failed: {ending.text}; " if run.state is RecordedState.FAILED else ""
    except (StagelineError, OSError):
        return where
    begins = f". It begins at step {complete}" if complete and GO_ON in ending.action else ""
    return f"{where}; {'' if knows_failure else failure}{ending.action}{begins}"


class Display(AbstractContextManager["Display"]):
    """Display of a run's progress, drawn by a thread until it is closed."""

    def __init__(
        self, name: str, seen: Seen, waits_for: Callable[[], str], surface: NewsAlone, news: Callable[[], list[str]]
    ) -> None:
        """Start the thread.

        Args:
            name: Name of the run.
            seen: Losses that the script has seen.
            waits_for: Returns what the run waits for, "" for nothing; may be slow.
            surface: Where to draw.
            news: Returns the lines of news since its last call.
        """
        self._name = name
        self._seen = seen
        self._waits_for = waits_for
        self._surface = surface
        self._news = news
        self._history = deque([(monotonic(), seen.steps)])
        self._began = monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # of a line that is never closed

    def __exit__(self, *_: object) -> None:
        """Close the display."""
        self.close()

    def close(self) -> None:
        """End the drawing, and leave its last state."""
        if not self._over.is_set():
            self._over.set()
            atexit.unregister(self.close)
            self._thread.join(PERIOD)  # it may wait for the broker; then it draws no more
            self._tell()
            self._surface.close(self._shown(self._seen.steps - self._seen.start, monotonic() - self._began))

    def _draw(self) -> None:
        while not self._over.wait(PERIOD):
            self._tell()
            waits = self._waits_for()
            self._history.append((monotonic(), self._seen.steps))
            while self._history[-1][0] - self._history[1][0] > WINDOW:
                self._history.popleft()
            (earlier, before), (later, after) = self._history[0], self._history[-1]
            shown = self._shown(after - before, later - earlier)
            if not self._over.is_set():
                self._surface.show(shown, waits)

    def _tell(self) -> None:
        for line in self._news():
            self._surface.say(line)

    def _shown(self, steps: int, seconds: float) -> Shown:
        """Return what is shown now; the rate is `steps` in `seconds`."""
        seen, rate = self._seen, steps / seconds if steps and seconds else None
        return shown(self._name, seen.steps, seen.loss, seen.fit, rate)


def display_of(
    name: str,
    seen: Seen,
    waits_for: Callable[[], str],
    progress: bool | None,
    news: Callable[[], list[str]] | None = None,
) -> Display | None:
    """Return a display of the run's progress and news, None if nothing is shown.

    A terminal on which another bar is drawn, of another line or of the script, is left to it.

    Args:
        name: Name of the run.
        seen: Losses that the script has seen.
        waits_for: Returns what the run waits for.
        progress: True shows all, False nothing. None shows progress on a terminal and in a notebook, elsewhere only
            `news`.
        news: Returns news of the workers; None if there can be none.
    """
    if progress is False or sys.stderr is None:
        return None
    if progress or has_surface():
        return Display(name, seen, waits_for, surface_for_progress(), news or list)
    return None if news is None else Display(name, seen, lambda: "", NewsAlone(sys.stderr), news)


def command_there(plan: Plan, run: str) -> str:
    """Return the command that starts a worker of `run` on another machine: with keys, it has the line for it.

    A password of a server is not shown.
    """
    broker = plan.broker.url
    shown = masked(broker)
    if plan.broker.has_keys:
        if not is_showable(broker):
            return (
                "stageline worker --join @FILE, with FILE from here: stageline keys invite > FILE (it has a password)"
            )
        if plan.parties is not None:
            address = shlex.quote(own_address(broker, os.environ))
            return f"stageline worker --join {address}, with the machine's own parties (--set parties.NAME.key=...)"
        return f"stageline worker --join {shlex.quote(own_join_line(broker, run, os.environ))}"
    if shown != broker:
        return f"stageline worker --join, with STAGELINE_BROKER__URL={shown} and its password in the environment"
    if host_of(broker) in EVERY_INTERFACE:
        shown = f"tcp://{socket.gethostname()}:{broker.rpartition(':')[2]}"
    return f"stageline worker --join {shown}"
