"""Control messages for a look into a worker, at messages, threads or its log: a request of the broker, and the answer.

Like all control messages, they are lost if the connection breaks: who asked asks again.
"""

from typing import Annotated

import msgspec

from .answers import MOST_THREADS, PeekFacts, ThreadStack
from .log_answer import KeptLines
from .records import Count, Name

PIECE = 512 * 1024  # bytes of a message that are sent at once
LONGEST_REFUSAL = 10_000  # characters


class _PeekMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """The base of both messages; the field "is" of an encoded message names its type."""


class Peek(_PeekMessage, frozen=True, tag="peek"):
    """A request for a look at messages that the worker retains. The control thread answers; the loop is not disturbed.

    Attributes:
        id: Number of the request, for the answer.
        queue: Name of a queue that the worker puts into.
        count: Messages to look at.
        at: Number of the first of them; None for the newest ones.
        offset: With it, the bytes of message `at` from there on are wanted instead.
    """

    id: Count
    queue: Name
    count: Count = 1
    at: Count | None = None
    offset: Count | None = None


class ShowStacks(_PeekMessage, frozen=True, tag="show-stacks"):
    """A request for the stacks of the worker's threads, with its number for the answer. The control thread answers."""

    id: Count


class ShowLog(_PeekMessage, frozen=True, tag="show-log"):
    """A request for lines that the worker has logged, from number `start` on. The control thread answers."""

    id: Count
    start: Count = 0


class Peeked(_PeekMessage, frozen=True, tag="peeked"):
    """A worker's answer to the Peek, ShowStacks or ShowLog of this `id`.

    Attributes:
        facts: What was seen; None if bytes were asked for.
        piece: Bytes of the message, from the offset on, `PIECE` at most.
        sizes: Bytes of each frame of the message; empty if it is not retained.
        refusal: Why there is no answer; "" if there is one.
        threads: Threads with their stacks; None if something else was asked for.
        log: Lines of the worker's log; None if something else was asked for.
    """

    incarnation: Count
    id: Count
    facts: PeekFacts | None = None
    piece: Annotated[bytes, msgspec.Meta(max_length=PIECE)] = b""
    sizes: list[Count] = []
    refusal: Annotated[str, msgspec.Meta(max_length=LONGEST_REFUSAL)] = ""
    threads: Annotated[list[ThreadStack], msgspec.Meta(max_length=MOST_THREADS)] | None = None
    log: KeptLines | None = None


Look = Peek | ShowStacks | ShowLog
