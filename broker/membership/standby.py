"""Workers on standby until a place becomes free: first come, first served."""

from collections.abc import Iterator
from dataclasses import dataclass

from stageline.broker.control.protocol import Hello

SILENCE = 3.0  # seconds after which a worker on standby, which should send Hello every second, is gone

ProcessKey = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Contact:
    """A process without a place: its newest Hello, its address, and when it was last seen (seconds since the epoch)."""

    hello: Hello
    sender: bytes
    last_seen: float


class StandbyWorkers:
    """The contacts on standby, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[ProcessKey, Contact] = {}

    def __iter__(self) -> Iterator[Contact]:
        return iter(self._waiting.values())

    def __contains__(self, hello: Hello) -> bool:
        return process_key(hello) in self._waiting

    def add(self, hello: Hello, sender: bytes, now: float) -> None:
        """A worker that is on standby already keeps its turn."""
        self._waiting[process_key(hello)] = Contact(hello, sender, now)

    def remove(self, hello: Hello) -> None:
        self._waiting.pop(process_key(hello), None)

    def take(self, index: int) -> Contact | None:
        """Removes and returns the first worker that accepts place `index`."""
        found = next((contact for contact in self if contact.hello.claim in (None, index)), None)
        if found is not None:
            self.remove(found.hello)
        return found

    def prune(self, now: float) -> None:
        """Removes workers that have become silent."""
        self._waiting = {key: contact for key, contact in self._waiting.items() if now - contact.last_seen < SILENCE}


def process_key(hello: Hello) -> ProcessKey:
    """What tells processes apart."""
    return hello.name, hello.host, hello.pid
