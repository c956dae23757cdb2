"""Enrolment: the only thing that the holder of an invitation may say to a broker, and what the broker answers.

The owner of a key that has enrolled says it, too, for another key that is to take its place.

    worker, connected with the key of an invitation  -- Enrolment -->        broker
    worker                                           <-- EnrolmentAnswer --  broker

Both are msgpack, over a connection that proves both ends' keys and encrypts what they send. A worker repeats its
Enrolment until an answer comes: the same key enrols once.
"""

from typing import Annotated

import msgspec

from stageline.broker.errors import BadKey, ForeignMessage, NotEnrolled

from .pairs import PublicKey
from .register import KeyRegister

ENROLMENT_VERSION = 1
LARGEST_ENROLMENT = 2**12  # bytes

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Text = Annotated[str, msgspec.Meta(max_length=2_000)]


class Enrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="enrol", tag_field="is"):
    """Request of a process to be known by a key of its own from now on.

    Attributes:
        key: Text of its public key.
        name: Name of the process, for people.
        host: Name of its host.
        version: Version of this message.
    """

    key: _Name
    name: _Name
    host: _Name
    version: int = ENROLMENT_VERSION


class EnrolmentAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="enrolled", tag_field="is"):
    """Answer of the broker: the key is admitted, or `refusal` says for people why not, and what would work."""

    key: _Name
    refusal: _Text = ""


_encode = msgspec.msgpack.Encoder().encode
_enrolment = msgspec.msgpack.Decoder(Enrolment)
_answer = msgspec.msgpack.Decoder(EnrolmentAnswer)


def encode_enrolment(message: Enrolment | EnrolmentAnswer) -> bytes:
    """Return the frame of an enrolment, or of the answer to one."""
    return _encode(message)


def read_answer(frame: bytes) -> EnrolmentAnswer:
    """Return the answer in a frame. Raises `ForeignMessage` for any other content."""
    try:
        return _answer.decode(frame)
    except (ValueError, RecursionError) as error:
        raise ForeignMessage(f"this is no answer to an enrolment of version {ENROLMENT_VERSION}: {error}") from error


def enrolment_in(frame: bytes) -> Enrolment:
    """Return the enrolment in a frame. Raises `ForeignMessage` for any other content."""
    try:
        return _enrolment.decode(frame[:LARGEST_ENROLMENT])
    except (ValueError, RecursionError) as error:
        raise ForeignMessage(f"this is no enrolment of version {ENROLMENT_VERSION}: {error}") from error


def is_enrolment(frame: bytes) -> bool:
    """Return True if the frame has an enrolment."""
    try:
        enrolment_in(frame)
    except ForeignMessage:
        return False
    return True


def answer_enrolment(register: KeyRegister, invitation: str, asked: Enrolment, now: float) -> EnrolmentAnswer:
    """Enrol a key, and return the answer.

    Args:
        register: Keys of the broker. Store its record before the answer is sent.
        invitation: Text of the key over whose connection the enrolment came.
        asked: Enrolment.
        now: Present time, in seconds since the epoch.
    """
    if asked.version != ENROLMENT_VERSION:
        refusal = (
            f"{asked.name} enrols by version {asked.version}, the broker by version {ENROLMENT_VERSION}; install the "
            "same stageline on both machines"
        )
        return EnrolmentAnswer(asked.key, refusal)
    try:
        register.enrol(invitation, PublicKey.parse(asked.key), now, name=asked.name, host=asked.host)
    except (NotEnrolled, BadKey) as error:
        return EnrolmentAnswer(asked.key, str(error))
    return EnrolmentAnswer(asked.key)
