"""Secrets between two parties, which each makes of its own key pair and the other's public key, and no broker can make.

    X25519(own secret, other's key) ──HKDF, run and places──> secret of the link between two places
                                    └─HKDF, sender first────> key of the notes from one party to the other

A link's secret takes the place of one that a broker draws in a run without parties: the keys of the queues between the
two places are derived from either in the same way. Two places of one party have a link as well, with the party's own
key at both ends. A note tells what the sender's plan is; the broker carries it, and can neither open nor change it.
"""

from dataclasses import dataclass

import msgspec
from cryptography.exceptions import InvalidTag

from stageline.broker.errors import BadMessage

from .pairs import KeyPair, PublicKey
from .parties import ReceivedParties
from .single_use import SALT, TAG, RandomBytes, key_of, opened, root_of, sealed

MOST_NOTE = 2**20  # bytes


@dataclass(frozen=True, slots=True)
class LinkContext:
    """Place of a link that no other link has, in this run, in any other, and in one of the same name.

    Attributes:
        salt: Random bytes of the run.
        run: Id of the run.
        generation: Count of the secrets that the link has had.
    """

    salt: bytes
    run: str
    generation: int


def link_secret(pair: KeyPair, peer: PublicKey, context: LinkContext, place: int, other: int) -> bytes:
    """Return the secret of the link between two places, the same at both ends.

    Args:
        pair: Pair of the party that has `place`.
        peer: Key of the party that has `other`.
        context: Run of the link.
        place: Index of the one place.
        other: Index of the other.
    """
    ends = sorted([(place, pair.public.raw), (other, peer.raw)])
    terms = ("stageline link", 2, context.salt, context.run, ends, context.generation)
    return root_of(pair.agreed(peer.raw), msgspec.msgpack.encode(terms))


class PartyNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms under which the process in a place takes part in a run.

    Attributes:
        run: Id of the run.
        place: Index of the place.
        plan: Digest of its plan.
        parties: Parties of its plan.
    """

    run: str
    place: int
    plan: str
    parties: ReceivedParties


def sealed_note(pair: KeyPair, peer: PublicKey, note: PartyNote, random: RandomBytes) -> bytes:
    """Return a note that the owner of the key `peer` alone can open, and knows to be from the owner of `pair`.

    `random` is the source of salts, `os.urandom`.
    """
    salt = random(SALT)
    return salt + sealed(_note_key(pair, peer, salt, sender=pair.public), b"", msgspec.msgpack.encode(note))


def opened_note(pair: KeyPair, peer: PublicKey, text: bytes) -> PartyNote:
    """Return a note for the owner of `pair` from the owner of the key `peer`. Raises `BadMessage`."""
    if not SALT + TAG < len(text) <= MOST_NOTE:
        raise BadMessage(f"{len(text)} bytes are no note between parties")
    salt = text[:SALT]
    try:
        return msgspec.msgpack.decode(
            opened(_note_key(pair, peer, salt, sender=peer), b"", text[SALT:]), type=PartyNote
        )
    except InvalidTag as error:
        raise BadMessage(f"a note that {peer.short} is said to have sealed cannot be opened") from error
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a note of {peer.short} has other contents: {error}") from error


def _note_key(pair: KeyPair, peer: PublicKey, salt: bytes, *, sender: PublicKey) -> bytes:
    receiver = peer if sender == pair.public else pair.public
    terms = ("stageline note", 1, sender.raw, receiver.raw)
    return key_of(root_of(pair.agreed(peer.raw), msgspec.msgpack.encode(terms)), salt)
