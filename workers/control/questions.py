"""Questions of threads to their broker.

The broker's own thread answers them, once in each turn: its coordinator is for that thread alone.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from stageline.broker.control.messages import Answer, Ask

if TYPE_CHECKING:  # a command that only asks imports this file, too
    from stageline.broker.coordinator.coordinator import Coordinator

Facts = Mapping[str, Any]


class Questions:
    """Questions that wait for an answer. `ask` is for any thread, `answer` for the thread of the coordinator."""

    def __init__(self) -> None:
        """Start without questions."""
        self._lock = Lock()
        self._waiting: deque[tuple[str, Future[Facts]]] = deque()

    def __len__(self) -> int:
        """Return the number of questions that wait."""
        return len(self._waiting)

    def ask(self, what: str, timeout: float) -> Facts:
        """Return the facts of the answer to the question `what`, such as "measures".

        Raises `TimeoutError` after `timeout` seconds without an answer, `ValueError` if the question is refused, and
        what the coordinator has raised.
        """
        found: Future[Facts] = Future()
        asked = what, found
        with self._lock:
            self._waiting.append(asked)
        try:
            return found.result(timeout)
        finally:
            if found.cancel():  # the thread waits no more, and a broker that takes no turn takes none out
                with self._lock, suppress(ValueError):
                    self._waiting.remove(asked)

    def answer(self, core: "Coordinator", now: float) -> None:
        """Answer all questions that wait; the same one is answered once. `now` is in seconds since the epoch.

        An exception of the coordinator is for who asks: the broker's turn goes on.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        known: dict[str, object] = {}
        for what, found in waiting:
            if not found.set_running_or_notify_cancel():
                continue
            if what not in known:
                known[what] = _answer(core, what, now)
            match known[what]:
                case Answer(_, facts):
                    found.set_result(facts)
                case Exception() as raised:
                    found.set_exception(raised)
                case refused:
                    found.set_exception(ValueError(getattr(refused, "reason", "no answer")))


def _answer(core: "Coordinator", what: str, now: float) -> object:
    """Return the answer of the coordinator, or the exception that it raises."""
    try:
        return core.answer(b"", Ask(what), now)[1]
    except Exception as error:  # noqa: BLE001  # raised again by the thread that asks
        return error
