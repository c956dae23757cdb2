"""Workers that stand by for a place to become free: first come, first called."""

from collections.abc import Iterator
from dataclasses import dataclass

from stageline.broker.control.protocol import Hello

SILENCE = 3.0  # seconds after which a worker that stands by, and should say hello every second, is gone

_Process = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Spare:
    """A worker that stands by, as it was `heard` last, in seconds since the epoch."""

    hello: Hello
    sender: bytes
    heard: float


class Spares:
    """Knows who stands by."""

    def __init__(self) -> None:
        self._waiting: dict[_Process, Spare] = {}

    def __iter__(self) -> Iterator[Spare]:
        return iter(self._waiting.values())

    def knows(self, hello: Hello) -> bool:
        """Whether the process that says `hello` stands by."""
        return _process(hello) in self._waiting

    def note(self, hello: Hello, sender: bytes, now: float) -> None:
        """A worker stands by, or still does: it keeps its turn."""
        self._waiting[_process(hello)] = Spare(hello, sender, now)

    def forget(self, hello: Hello) -> None:
        """The process that says `hello` has a place, or was refused."""
        self._waiting.pop(_process(hello), None)

    def take(self, index: int) -> Spare | None:
        """The first that would be worker `index`; it stands by no more."""
        fitting = (spare for spare in self if spare.hello.claim in (None, index))
        found = next(fitting, None)
        if found is not None:
            self.forget(found.hello)
        return found

    def prune(self, now: float) -> None:
        """Forgets those that are gone."""
        self._waiting = {key: spare for key, spare in self._waiting.items() if now - spare.heard < SILENCE}


def _process(hello: Hello) -> _Process:
    return hello.name, hello.host, hello.pid
