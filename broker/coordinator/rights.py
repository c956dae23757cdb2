"""Rights that messages to a broker need, and the place that a key may be bound to."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from stageline.broker.control.protocol import opened
from stageline.broker.errors import BadMessage
from stageline.broker.keys.pairs import short
from stageline.broker.keys.parties import Parties, party_at
from stageline.broker.keys.register import EnrolledKey, Right

_ANY_WORK = frozenset({Right.WORK})
RIGHTS_FOR: Mapping[str, frozenset[Right]] = {
    "hello": _ANY_WORK,
    "report": _ANY_WORK,
    "failed": _ANY_WORK,
    "finished": _ANY_WORK,
    "goodbye": _ANY_WORK,
    "peeked": _ANY_WORK,
    "declined": _ANY_WORK,
    "exited": frozenset(),
    "key-change": frozenset(),
    "stop-run": frozenset({Right.STOP}),
    "pause-run": frozenset({Right.STOP}),
    "leave-worker": frozenset({Right.STOP}),
    "ask": frozenset({Right.LOOK}),
    "ask join": _ANY_WORK,
    "ask status": frozenset({Right.LOOK, Right.WORK, Right.STOP}),  # workers look for places, who stops for the end
    "ask queues": frozenset({Right.INSPECT}),
    "ask measures": frozenset({Right.INSPECT}),  # they have those of the queues
    "ask queue": frozenset({Right.INSPECT}),
    "ask peek": frozenset({Right.INSPECT}),
    "ask export": frozenset({Right.INSPECT}),
    "ask stack": frozenset({Right.INSPECT}),
    "ask log": frozenset({Right.INSPECT}),
}
"""Rights by the tag of a message, of which one suffices; without any, only the operator may say it.

A question has a row of its own, "ask WHAT", or that of "ask".
"""


_Kind = Annotated[str, msgspec.Meta(max_length=64)]  # told in refusals, which are remembered


class Remembered(msgspec.Struct):
    """The place in a Hello's memory of its run: a broker that has lost its records gives places by it."""

    index: int


class Outline(msgspec.Struct):
    """Fields by which the gate judges a message. All others are skipped. A Report's `memory` is a number."""

    is_: _Kind = msgspec.field(name="is")
    what: _Kind = ""
    incarnation: int = 0
    claim: int | None = None
    memory: Remembered | int | None = None
    key: str = ""

    def asked(self, *, claims: bool = True) -> list[int | None]:
        """Return the places that a Hello asks for, None for any: by its claim, if that `claims`, and by its memory."""
        remembered = [self.memory.index] if isinstance(self.memory, Remembered) else []
        return [self.claim, *remembered] if claims else [*remembered]


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
    if known.party:
        raise NotAllowed(
            f"the key {short(known.key)} of party {known.party} has no right to {right}, which {said!r} needs: add it "
            f"to the rights in [parties.{known.party}] on every side, then `stageline keys reload` with the broker"
        )
    options = " ".join(f"--right {each}" for each in (*known.rights, right))
    raise NotAllowed(
        f"the key {short(known.key)} has no right to {right}, which {said!r} needs: `stageline keys admit {known.key} "
        f"{options}` on the broker's machine gives it"
    )


def demand_place(known: EnrolledKey, outline: Outline, parties: Parties = ()) -> None:
    """Raise `NotAllowed` if a process asks for a place that its key may not have.

    A key of a party, or one that is bound to a place, has to claim its place. An incarnation of a bound key has claimed
    it before, but what the process remembers counts at any time.
    """
    if outline.is_ != "hello":
        return
    if parties:
        _demand_party(known, outline, parties)
        return
    stray = [each for each in outline.asked(claims=not outline.incarnation) if each != known.worker]
    if known.worker is not None and stray:
        raise NotAllowed(
            f"the key {short(known.key)} may be worker {known.worker} alone, and asks for {_named(stray[0])}: "
            f"start it with --index {known.worker}"
        )


def _named(place: int | None) -> str:
    return "any place" if place is None else f"place {place}"


def _demand_party(known: EnrolledKey, outline: Outline, parties: Parties) -> None:
    names = ", ".join(each.name for each in parties)
    if not known.party:
        raise NotAllowed(
            f"the places of this run are its parties' ({names}), and the key {short(known.key)} is of none: write it "
            "into [parties.NAME] of the plan on every side, then `stageline keys reload` on the broker's machine"
        )
    if outline.key != known.key:
        raise NotAllowed(
            f"this run has parties ({names}), and the worker's plan does not tell of the key {short(known.key)} with "
            "which it speaks: give it the [parties] of the broker's plan"
        )
    if stray := [each for each in outline.asked() if each not in known.places]:
        other = None if stray[0] is None else party_at(parties, stray[0])
        whose = f", which is {other.name}'s" if other is not None else ""
        own = " or ".join(f"--index {each}" for each in known.places) or "no place"
        raise NotAllowed(
            f"the key {short(known.key)} is of party {known.party} in the broker's plan, and asks for "
            f"{_named(stray[0])}{whose}: start it with {own}; if its own plan lists that key under another name, give "
            "both the same [parties]"
        )
