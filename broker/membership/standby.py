"""Workers on standby until a place becomes free: first come, first served."""

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.broker.control.messages import Hello

from .member import may_take

MOST = 1000  # processes at a time, beside one for each place
SILENCE = 3.0  # seconds after which a worker on standby, which should send Hello every second, is gone

ProcessKey = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class Contact:
    """A process without a place: its newest Hello, its address, when it was last seen, and when it came (seconds since
    the epoch)."""

    hello: Hello
    sender: bytes
    last_seen: float
    came: float = 0.0


class StandbyWorkers(dict[ProcessKey, Contact]):
    """The contacts on standby by `process_key`, in the order in which they came; a repeated Hello keeps its turn."""

    def take(self, index: int, stages: Sequence[int], *, length_known: bool = True) -> Contact | None:
        """Removes and returns the first process that accepts place `index`, of `stages`, and lacks nothing for it."""
        able = ((key, contact.hello) for key, contact in self.items() if length_known or not contact.hello.needs_length)
        found = next((key for key, hello in able if may_take(hello.claim, index, stages)), None)
        return None if found is None else self.pop(found)

    def prune(self, now: float) -> None:
        """Removes workers that have become silent."""
        for key in [key for key, contact in self.items() if now - contact.last_seen >= SILENCE]:
            del self[key]


def process_key(hello: Hello) -> ProcessKey:
    """What tells processes apart; by the token, which no one is shown, also one that names itself as another."""
    return hello.name, hello.host, hello.pid, hello.token
