"""What serves one connection of a worker to Redis: the computing thread while it uses the queues, else a thread.

A hand-over between threads costs more than all else that a small message needs, so the computing thread, when it puts
or waits for a message, exchanges with the server itself, without ever waiting for an answer. The thread does what it
leaves: what takes time, what goes wrong, and everything while it computes.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from stageline.broker.errors import BrokerError
from stageline.broker.queues.base import Trouble

from .answers import RedisAway, RedisGarbled, RedisRefusal, RedisUnfit
from .connection import RedisLink
from .stream_reader import StreamReader
from .stream_writer import StreamWriter

FIRST_RETRY, LONGEST_RETRY = 0.02, 1.0  # seconds before the first retry, and at most

# What a damaged answer can lead to, since the protocol has no checksum: the commands are sent once more, over another
# connection, before the error is believed.
GARBLED = (RedisUnfit, TypeError, ValueError, LookupError)


@dataclass(slots=True, eq=False)
class SharedEnds:
    """What the computing thread and the two threads of a worker share; `lock` guards it, and `changed`, which says that
    it has changed, is made of it.

    `over`: both threads are to end. `failure` is the error that ended one of them.
    """

    lock: "threading.RLock" = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    writers: list[StreamWriter] = field(default_factory=list)
    readers: list[StreamReader] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def close(self, failure: Exception | None = None) -> None:
        """Lets both threads end."""
        with self.changed:
            self.over.set()
            self.failure = failure or self.failure
            self.changed.notify_all()


class RedisThread(threading.Thread, ABC):
    """Takes turns until `ends` are over, over `link`. Calls `wake` after an error that trying again cannot mend.

    `lead` is held by the thread that uses `link`. `patience`: seconds in which a server may answer what cannot be.
    """

    def __init__(self, name: str, link: RedisLink, ends: SharedEnds, wake: Callable[[], None], patience: float) -> None:
        super().__init__(name=f"redis {name}", daemon=True)
        self.link = link
        self.lead = threading.Lock()
        self.trouble: Trouble | None = None  # why nothing can be exchanged now
        self._patience = patience
        self._garbled_since = 0.0  # since when all answers are garbled; 0: they are not
        self._ends = ends
        self._wake = wake
        self._error: Exception | None = None  # of a turn that another thread took
        self._pause = FIRST_RETRY
        self._was_garbled = False

    def can_lead(self) -> bool:
        """Takes the lead for another thread, if this one does not have it, nor something to mend."""
        if not self.lead.acquire(blocking=False):
            return False
        if self._error is None and self.link.is_fit:
            return True
        self.lead.release()
        return False

    def act(self, step: Callable[[], bool]) -> bool:
        """Does a part of a turn for another thread, which has the lead. Gives it back if this thread must go on, to
        which any error goes: then False."""
        try:
            if step():
                return True
        except Exception as error:  # noqa: BLE001 - this thread raises it
            self._error = error
        self.lead.release()
        return False

    def run(self) -> None:
        try:
            while self._take_lead():
                try:
                    self._try_turn()
                finally:
                    self.lead.release()
        except Exception as error:  # noqa: BLE001 - it is raised where the queues are used
            self._ends.close(error)
            self._wake()
        finally:
            with self.lead:  # the computing thread may still wait for this connection
                self.link.close()

    @abstractmethod
    def _take_lead(self) -> bool:
        """Takes the lead once this thread is needed. False if the queues are closed."""

    @abstractmethod
    def _turn(self) -> None:
        """Exchanges with the server, waiting for it."""

    def _try_turn(self) -> None:
        try:
            if self._error is not None:
                raise self._error
            self._turn()
            self._pause, self._was_garbled = FIRST_RETRY, False
        except (RedisAway, RedisRefusal) as error:
            self._back_off(error)
        except GARBLED as error:
            if self._was_garbled and isinstance(error, BrokerError):
                raise
            if self._was_garbled:
                raise RedisGarbled(f"Redis at {self.link.address} answered wrongly twice: {error!r:.200}") from error
            self._was_garbled = True
            self.link.close()
            self._back_off(error)
        self._error = None

    def _back_off(self, error: Exception) -> None:
        """Waits a little, longer each time. Raises `error` if all answers have been garbled for too long."""
        self._note(error)
        if self._garbled_since and monotonic() - self._garbled_since >= self._patience:
            raise error
        self._wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_RETRY)

    def _note(self, error: Exception) -> Trouble:
        self.trouble = Trouble(str(error), self.trouble.since if self.trouble else monotonic())
        self._garbled_since = self._garbled_since or monotonic() if isinstance(error, RedisGarbled) else 0.0
        return self.trouble

    def _mended(self) -> None:
        """An exchange has gone well."""
        self.trouble, self._garbled_since = None, 0.0

    def _wait(self, seconds: float) -> None:
        self._ends.over.wait(seconds)
