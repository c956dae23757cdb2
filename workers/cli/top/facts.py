"""Facts that `stageline top` knows of a run: a thread asks the broker, or the run's records, and hands each look on.

    thread    status, queues, timetable, why, microbatches  ──> Glance ──> the screen

Each question has a bound in time, and the screen waits for none. The thread only asks: it changes nothing of the run.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from time import time

from stageline.pipeline.errors import StagelineError
from stageline.workers.cli import options
from stageline.workers.cli.asking.looking import goes_on
from stageline.workers.cli.output import message_of
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.runs.folder import Facts

Ask = Callable[..., Facts]

EVERY = 1.0  # seconds from one look to the next
_SELDOM = 4  # looks from one question for the causes to the next: they change slowly
_PANELS = ("queues", "timetable", "microbatches")
_FIRST_STEPS = 8  # newest steps that are asked for at the first look
_KEPT = 600  # looks whose steps are remembered
_WINDOW = 5.0  # seconds of which a pace is the mean, at least


@dataclass(frozen=True, slots=True)
class Question:
    """Question for a part of the run that is looked at closely: its name and its parameters."""

    what: str
    of: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Glance:
    """Facts of a run at one look.

    Attributes:
        at: Time of the look, in seconds since the epoch.
        answers: Answers by the name of the question; those that are refused are lacking.
        refused: Why a question has no answer, by its name.
        trouble: Why the run's broker does not answer; "" if it does, or the run is over.
        over: True if the run is over: nothing changes any more.
        close: The question for the part that is looked at closely, with its answer, or why there is none.
    """

    at: float
    answers: Mapping[str, Facts]
    refused: Mapping[str, str]
    trouble: str = ""
    over: bool = False
    close: tuple[Question, Facts | str] | None = None


class PaceCourse:
    """Steps per second over time, from the numbers of steps that were finished at each look."""

    def __init__(self) -> None:
        """Begin without a look."""
        self._seen: deque[tuple[float, int]] = deque(maxlen=_KEPT)
        self.rates: deque[float] = deque(maxlen=_KEPT)

    def note(self, at: float, steps: int, usual: float | None) -> None:
        """Note the steps that are finished at a time.

        Args:
            at: Time, in seconds.
            steps: Finished steps.
            usual: Steps per second as the broker counts them: a pace is the mean over three steps, at least.
        """
        window = max(_WINDOW, 3 / usual) if usual else _WINDOW
        before = [each for each in self._seen if at - each[0] >= window]
        since = before[-1] if before else next(iter(self._seen), None)
        self._seen.append((at, steps))
        if since is not None and at > since[0]:
            self.rates.append(max(0.0, (steps - since[1]) / (at - since[0])))


class Looker:
    """Thread that looks at a run about once a second, and at once if something else is looked at closely."""

    def __init__(
        self,
        show: Callable[[Glance], object],
        asking: Callable[[], AbstractContextManager[Ask]],
        recorded: Ask | None,
        every: float = EVERY,
    ) -> None:
        """Prepare the thread.

        Args:
            show: Takes what was seen, in the thread.
            asking: Opens a connection to the run's broker, as `options.asking` does.
            recorded: Answers from the records of the run while its broker does not; None without records.
            every: Seconds from one look to the next.
        """
        self._show = show
        self._asking = asking
        self._recorded = recorded
        self._every = every
        self._close: Question | None = None
        self._wake = threading.Event()
        self._ends = self._over = False
        self._why: Facts | str | None = None
        self._looks = 0
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the question that it has asked, which has a bound in time."""
        self._ends = True
        self._wake.set()
        self._thread.join(2 * options.PATIENCE)

    @property
    def runs(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def look_closely(self, question: Question | None) -> None:
        """Look at a part of the run, at once and from now on; at none for None."""
        self._close = question
        self._wake.set()

    def _run(self) -> None:
        while not self._ends:
            try:
                with self._asking() as ask:
                    while not self._ends:
                        self._show(self._seen(ask))
                        self._pause()
            except (StagelineError, OSError) as error:
                self._look_into_records(message_of(error))
                self._pause()
            except Exception as error:  # noqa: BLE001 - whatever it is, the screen must tell, and not stand still
                self._show(Glance(time(), {}, {}, f"the looks have ended: {type(error).__name__}: {error}"))
                return

    def _pause(self) -> None:
        self._wake.wait(None if self._over else self._every)
        self._wake.clear()

    def _look_into_records(self, trouble: str) -> None:
        """Show what the run's records tell while its broker does not answer."""
        if self._recorded is not None and not self._ends:
            try:
                seen = self._seen(self._recorded)
            except (StagelineError, OSError) as error:
                trouble = message_of(error)
            else:
                over = self._over = not goes_on(seen.answers["status"])
                self._show(Glance(seen.at, seen.answers, seen.refused, "" if over else trouble, over, seen.close))
                return
        self._show(Glance(time(), {}, {}, trouble))

    def _seen(self, ask: Ask) -> Glance:
        """Return one look. Raises `BrokerUnreachable` if the broker does not answer in time."""
        answers, refused = {"status": ask("status")}, dict[str, str]()
        if self._looks % _SELDOM == 0 or self._why is None:
            self._why = _answered(ask, "why")
        self._looks += 1
        found: dict[str, Facts | str] = {what: _answered(ask, what) for what in _PANELS} | {"why": self._why}
        if self._looks == 1 and isinstance(several := _newest_steps(ask, answers["status"]), dict):
            found["timetable"] = several
        for what, each in found.items():
            if isinstance(each, str):
                refused[what] = each
            else:
                answers[what] = each
        question = self._close
        close = None if question is None else (question, _answered(ask, question.what, **question.of))
        return Glance(time(), answers, refused, close=close)


def _answered(ask: Ask, what: str, **of: str) -> Facts | str:
    """Return an answer, or why it is refused. Raises `BrokerUnreachable` if there is none in time."""
    try:
        return ask(what, **of)
    except BrokerUnreachable:
        raise
    except (ValueError, StagelineError) as refusal:
        return str(refusal)


def _newest_steps(ask: Ask, status: Facts) -> Facts | str:
    """Return the newest steps, for what is a mean over steps from the first look on; why not if they are refused."""
    last = int(status["finished_floor"]) - 1
    return _answered(ask, "timetable", first=str(max(0, last - _FIRST_STEPS + 1)), last=str(max(0, last)))


def looker(where: str | None, broker: str | None, show: Callable[[Glance], object], every: float) -> Looker:
    """Return the thread that looks at a run, not yet started.

    Args:
        where: Folder of a run, or a plan; None for the newest run in ./runs.
        broker: Address of the only broker to ask.
        show: Takes what was seen, in the thread.
        every: Seconds from one look to the next.
    """
    recorded = partial(options.answer_about, where, None) if broker is None else None
    return Looker(show, partial(options.asking, where, broker), recorded, every)


_PART_OF = {"data": "data", "disk": "disk", "offload": "disk"}


def bars(steps: Sequence[Facts]) -> dict[int, dict[str, float]]:
    """Return by worker the seconds of some steps in which it computed, waited, and was held up by data and the disk.

    The disk has snapshots, and activations in files.

    Args:
        steps: Steps of the answer `timetable`.
    """
    found: dict[int, dict[str, float]] = {}
    for step in steps:
        end = step["start"] + step["seconds"]
        for each in step["actions"]:
            bar = found.setdefault(each["worker"], dict.fromkeys(("compute", "wait", "data", "disk"), 0.0))
            bar["compute"] += each["end"] - each["start"]
        for each in step["idle"]:
            bar, seconds = found[each["worker"]], max(0.0, min(end, each["end"]) - each["start"])
            bar[_PART_OF.get(each["cause"], "wait")] += seconds
            if each["cause"] in ("data", "offload"):  # within the action
                bar["compute"] = max(0.0, bar["compute"] - seconds)
        for worker in found:
            last = max((each["end"] for each in step["actions"] if each["worker"] == worker), default=end)
            found[worker]["wait"] += end - last
    return found
