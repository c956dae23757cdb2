"""Rights that messages to a broker need, and the place that a key may be bound to."""

from collections.abc import Mapping

import msgspec

from stageline.broker.control.protocol import opened
from stageline.broker.errors import BadMessage
from stageline.broker.keys.pairs import short
from stageline.broker.keys.register import EnrolledKey, Right

_ANY_WORK = frozenset({Right.WORK})
RIGHTS_FOR: Mapping[str, frozenset[Right]] = {
    "hello": _ANY_WORK,
    "report": _ANY_WORK,
    "failed": _ANY_WORK,
    "finished": _ANY_WORK,
    "goodbye": _ANY_WORK,
    "declined": _ANY_WORK,
    "exited": frozenset(),
    "key-order": frozenset(),
    "stop-run": frozenset({Right.STOP}),
    "ask": frozenset({Right.LOOK}),
    "ask join": _ANY_WORK,
    "ask status": frozenset({Right.LOOK, Right.WORK}),  # a worker looks for places of lost replicas
    "ask queues": frozenset({Right.INSPECT}),
}
"""Rights by the tag of a message, of which one suffices; without any, only the operator may say it.

A question has a row of its own, "ask WHAT", or that of "ask".
"""


class Outline(msgspec.Struct):
    """Fields by which the gate judges a message. All others are skipped."""

    is_: str = msgspec.field(name="is")
    what: str = ""
    incarnation: int = 0
    claim: int | None = None


_outline = msgspec.msgpack.Decoder(Outline)


class NotAllowed(Exception):
    """Error that a key may not say something; its text is for the key's owner."""


def outline_of(frame: bytes | None) -> Outline | None:
    """Return the outline of a message; None for what is none."""
    try:
        return _outline.decode(opened(frame or b"")[0])
    except (BadMessage, ValueError, RecursionError):
        return None


def demand_right(known: EnrolledKey, outline: Outline) -> None:
    """Raise `NotAllowed` unless a right of the key covers the message."""
    said = f"{outline.is_} {outline.what}" if outline.is_ == "ask" else outline.is_
    wanted = RIGHTS_FOR.get(said, RIGHTS_FOR.get(outline.is_, frozenset()))
    if wanted & set(known.rights):
        return
    if not wanted:
        raise NotAllowed(
            f"the key {short(known.key)} may not say {said!r}: that is for the broker's own user, on its machine"
        )
    right = min(wanted)
    options = " ".join(f"--right {each}" for each in (*known.rights, right))
    raise NotAllowed(
        f"the key {short(known.key)} has no right to {right}, which {said!r} needs: `stageline keys admit {known.key} "
        f"{options}` on the broker's machine gives it"
    )


def demand_place(known: EnrolledKey, outline: Outline) -> None:
    """Raise `NotAllowed` if a newcomer does not ask for the place that its key is bound to."""
    bound = known.worker is not None and outline.is_ == "hello" and not outline.incarnation
    if bound and outline.claim != known.worker:
        asked = "any place" if outline.claim is None else f"place {outline.claim}"
        raise NotAllowed(
            f"the key {short(known.key)} may be worker {known.worker} alone, and asks for {asked}: "
            f"start it with --index {known.worker}"
        )
