"""Control messages about a worker that leaves on notice: a request, the order to the worker, and what it reports."""

from typing import Annotated

import msgspec

from .pauses import LONGEST_REASON
from .records import Count, Name

LONGEST_NOTICE = 86_400.0  # seconds

_Reason = Annotated[str, msgspec.Meta(max_length=LONGEST_REASON)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_NOTICE)]


class _LeaveMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """The base of both messages; the field "is" of an encoded message names its type."""


class LeaveWorker(_LeaveMessage, frozen=True, tag="leave-worker"):
    """A command's request that the worker of place `index` leaves at the end of a step, within `seconds`.

    `by` says for people who asks; a broker with keys puts the name of the key there.
    """

    by: Name
    index: Count
    seconds: _Seconds
    reason: _Reason = ""


class Leave(_LeaveMessage, frozen=True, tag="leave"):
    """An order to a worker to leave within `seconds`, for `reason`. Repeated until its reports show that it leaves."""

    seconds: _Seconds
    reason: _Reason


class Leaving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Notice of a worker, in its reports, that it leaves for `reason`, in `seconds` at the latest."""

    seconds: _Seconds
    reason: _Reason
