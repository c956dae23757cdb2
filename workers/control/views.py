"""Views of a worker's process that its broker may ask for: retained messages, stacks, and what it has logged."""

from collections.abc import Callable
from dataclasses import dataclass

from stageline.broker.control.peek import Look, Peek, Peeked, ShowLog, ShowStacks

from .kept_log import shown_log
from .peeking import shown_stacks

NO_LOG = "this process shows none"


def refuse_peeks(peek: Peek) -> Peeked:
    """Return the refusal of a process that shows no messages."""
    return Peeked(0, peek.id, refusal="this process shows no messages")


@dataclass(frozen=True, slots=True)
class Views:
    """Views of a process that its broker may ask for.

    Attributes:
        peek: Looks at retained messages; it must not take longer than a report may be late.
        shows_code: True if the broker may learn lines and paths of this process's code.
        log_withheld: Why the broker must not learn what this process logs; "" if it may.
    """

    peek: Callable[[Peek], Peeked] = refuse_peeks
    shows_code: bool = False
    log_withheld: str = NO_LOG

    def seen(self, request: Look) -> Peeked:
        """Return the answer to a request of the broker."""
        match request:
            case Peek():
                return self.peek(request)
            case ShowStacks():
                return shown_stacks(request, bare=not self.shows_code)
            case ShowLog():
                return shown_log(request, self.log_withheld)


NOTHING = Views()
