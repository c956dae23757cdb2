"""Parties of a run: who owns which places, by which keys, and with which rights, as each process's own plan says.

A plan's parties are outside its digest, and are compared by themselves: the broker compares a worker's with its own,
and workers compare theirs with each other, in notes that the broker cannot open (`party_secrets.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated

import msgspec

from stageline.broker.errors import BadKey

from .pairs import PublicKey, short

if TYPE_CHECKING:  # pydantic takes long to load
    from stageline.pipeline.plan import Plan

MOST_PARTIES = 100  # that a message may tell of
_SHOWN = 12  # characters of a digest

_Text = Annotated[str, msgspec.Meta(max_length=64)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Party(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Owner of machines.

    Attributes:
        name: Name in the plan.
        keys: Texts of its public keys: one, or two while they change.
        places: Indexes of its places; that of the script comes after those of all workers.
        rights: What it may do at the broker.
    """

    name: _Text
    keys: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=2)]
    places: Annotated[tuple[_Index, ...], msgspec.Meta(max_length=20_000)] = ()
    rights: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=8)] = ("work",)

    @property
    def shown(self) -> str:
        """The party's keys for people: `k1.2n8Fh0XQ... or k1.aAC9zKS9...`."""
        return " or ".join(map(short, self.keys))

    @property
    def workers(self) -> str:
        """The party's places for people: `worker 0`, `workers 0 and 2`, `no worker`."""
        if not self.places:
            return "no worker"
        return f"worker{'s' * (len(self.places) > 1)} {' and '.join(map(str, self.places))}"


Parties = tuple[Party, ...]
ReceivedParties = Annotated[tuple[Party, ...], msgspec.Meta(max_length=MOST_PARTIES)]


def parties_of(plan: "Plan") -> Parties:
    """Return the parties of a plan whose workers are known, by name; none if it has no such table.

    Raises `PlanRefused` for a key that no secret key leads to.
    """
    for name, party in (plan.parties or {}).items():
        for field, text in (("key", party.key), ("next_key", party.next_key)):
            try:
                PublicKey.parse(text or party.key)
            except BadKey as error:
                raise plan.refused(f"parties.{name}.{field}", str(error)) from error
    script = len(plan.workers)
    return tuple(
        Party(name, party.keys, (*sorted(party.workers), *((script,) if party.script else ())), party.rights)
        for name, party in sorted((plan.parties or {}).items())
    )


def party_at(parties: Parties, place: int) -> Party | None:
    """Return the party that owns a place; None if there is none."""
    return next((each for each in parties if place in each.places), None)


def party_with(parties: Parties, key: str) -> Party | None:
    """Return the party that has the key with this text; None if no party has it."""
    return next((each for each in parties if key in each.keys), None)


def way_in(key: str, parties: Sequence[object]) -> str:
    """Return how a key that is not admitted is let in, for people."""
    if not parties:
        return f"`stageline keys admit {key}` admits it"
    return "if it is a party's, write it into [parties.NAME] on every side; then `stageline keys reload` admits it"


def digest_of(parties: Iterable[Party]) -> str:
    """Return the SHA-256 (hex) of parties."""
    return sha256(msgspec.json.encode(sorted(parties, key=lambda each: each.name))).hexdigest()


def differences(here: Parties, there: Parties) -> Iterator[str]:
    """Yield a text for each party that two plans have differently, with both digests, and what differs."""
    ours, theirs = _named(here), _named(there)
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine != other:
            what = "; ".join(_details(mine, other))
            yield f"party {name} (digest {_digest(mine)} here, {_digest(other)} there): {what}"


def conflict(here: Parties, there: Parties) -> bool:
    """Return True if two plans have parties that cannot work together: other places, or no key in common.

    While a party changes its key, or a right, one machine has the new plan before another.
    """
    ours, theirs = _named(here), _named(there)
    both = [(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()]
    apart = any(mine.places != other.places or not {*mine.keys} & {*other.keys} for mine, other in both)
    return apart or ours.keys() != theirs.keys()


def _details(mine: Party | None, other: Party | None) -> Iterator[str]:
    if mine is None or other is None:
        yield f"only the plan {'here' if other is None else 'there'} has it"
        return
    if mine.keys != other.keys:
        yield f"its key is {mine.shown} here, {other.shown} there"
    if mine.places != other.places:
        yield f"it has {mine.workers} here, {other.workers} there"
    if mine.rights != other.rights:
        yield f"it may {' '.join(mine.rights)} here, {' '.join(other.rights)} there"


def _digest(party: Party | None) -> str:
    return "none" if party is None else digest_of([party])[:_SHOWN]


def _named(parties: Parties) -> Mapping[str, Party]:
    return {each.name: each for each in parties}
