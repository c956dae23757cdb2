"""Control messages about a pause: a request, the order to workers, what they know of it; and facts of answers."""

from typing import Annotated

import msgspec

from .records import Count, Name

LONGEST_REASON = 1000  # characters of why a run pauses

_Reason = Annotated[str, msgspec.Meta(max_length=LONGEST_REASON)]


class _PauseMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """The base of both messages; the field "is" of an encoded message names its type."""


class PauseRun(_PauseMessage, frozen=True, tag="pause-run"):
    """A command's request that the run pauses at the end of a step, or goes on if it `resumes`.

    `by` says for people who asks; a broker with keys puts the name of the key there.
    """

    by: Name
    reason: _Reason = ""
    resumes: bool = False


class Hold(_PauseMessage, frozen=True, tag="hold"):
    """An order to begin no training step from `step` on; without a step, to hold nothing back.

    Orders are numbered, and an older one changes nothing. A worker that has begun later steps holds the first that it
    has not begun. Repeated until every worker's reports show it. If it is `settled`, no worker has begun `step`, and
    each takes a snapshot of the state before it. A pause for workers that are `leaving` ends once they have left.
    """

    number: Count
    step: Count | None = None
    settled: bool = False
    leaving: bool = False


class HeldBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Knowledge that a worker has of a pause, in its reports.

    Attributes:
        number: Number of the newest Hold that it knows; 0 if it knows none.
        step: First step that it does not begin; None if it holds nothing back.
        stands: True if it has done all before that step, and waits.
        leaving: True if the pause ends once workers that are leaving have left.
    """

    number: Count = 0
    step: Count | None = None
    stands: bool = False
    leaving: bool = False


NOT_HELD = HeldBack()


class PauseFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pause that lasts.

    Attributes:
        by: Who has asked for it.
        reason: Why; "" without a reason.
        since: When it was asked for.
        step: The run pauses once the steps before it are finished; None before workers agree on it.
        in_effect: True once every worker has come there and waits.
    """

    by: str
    reason: str
    since: float
    step: int | None
    in_effect: bool


class PauseChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that was to pause or to go on; `changed` is False if that was so already."""

    run: str
    changed: bool
    paused: PauseFacts | None
