"""What a message becomes whose content cannot be needed any more: its number, its place and its checksums remain.

    payload    {"stageline": "emptied", "was": checksums of the content, "rest": what is still wanted}

Put again with its content, a message agrees with what is left of it if the checksums do.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from stageline.pipeline.tree import Tree

from .structure import Structure

_MARK = "stageline", "emptied"
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class FormerFingerprint:
    """Of a message without content: a digest of the fingerprint that it had with it; None: it is not known."""

    digest: str | None


def emptied(was: Hashable = FormerFingerprint(None), rest: Tree = None) -> Tree:
    """The payload in place of one whose message had the fingerprint `was`; `rest` has no tensors."""
    return {_MARK[0]: _MARK[1], "was": digest_of(was), "rest": rest}


def is_emptied(payload: Tree) -> bool:
    """Whether this is what is left of a payload."""
    return type(payload) is dict and payload.get(_MARK[0]) == _MARK[1]


def rest_of(payload: Tree) -> Tree:
    """What an emptied payload still holds."""
    return payload.get("rest") if isinstance(payload, dict) else None


def former_fingerprint(structure: Structure) -> FormerFingerprint | None:
    """The fingerprint of a message with this structure, if its content is gone."""
    match structure:
        case [3, "stageline", "emptied", "was", was, *_]:
            return FormerFingerprint(was if isinstance(was, str) else None)
    return None


def agree(one: Hashable, other: Hashable) -> bool:
    """Whether two fingerprints may be of the same message."""
    if one == other:
        return True
    if not isinstance(one, FormerFingerprint) and not isinstance(other, FormerFingerprint):
        return False
    digests = digest_of(one), digest_of(other)
    return None in digests or digests[0] == digests[1]


def digest_of(fingerprint: Hashable) -> str | None:
    """Return the digest of a message's content, also of one that has none any more; None if it is not known."""
    if isinstance(fingerprint, FormerFingerprint):
        return fingerprint.digest
    return blake2b(_encode(fingerprint), digest_size=16).hexdigest()
