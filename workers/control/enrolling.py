"""Enrolment of this machine's key with a broker, by a join line."""

import socket
from contextlib import closing
from time import monotonic

from stageline.broker.control.channel import ClientChannel
from stageline.broker.errors import AddressUnusable, ForeignMessage, NotEnrolled
from stageline.broker.keys.enrolment import Enrolment, encode_enrolment, read_answer
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KeyPair, invite_pair
from stageline.broker.keys.refusal import KeyRefusal
from stageline.broker.transports.base import open_client
from stageline.pipeline.addresses import masked

REPEAT = 0.5  # seconds after which an enrolment without an answer is sent again

_NEW_LINE = "ask for a new line, which `stageline keys invite` prints on the broker's machine"
_REFUSED = {
    KeyRefusal.NOT_ADMITTED: (
        f"the join line is old: its invitation has ended or was revoked, or the broker has forgotten it; {_NEW_LINE}"
    ),
    KeyRefusal.ANOTHER_KEY: (
        "the broker there has another key than the join line says: the line is of another broker, or another "
        f"process answers at that address; {_NEW_LINE}"
    ),
    KeyRefusal.NO_KEYS: (
        "the process there uses no keys: it is no broker, or one that was started without them; look at what listens "
        "there"
    ),
}


def enrol(line: JoinLine, pair: KeyPair, name: str, patience: float) -> None:
    """Have the broker admit this machine's key, and return once it does. A key that is admitted already stays so.

    Args:
        line: Join line.
        pair: Key pair of this machine.
        name: Name of this process, for people.
        patience: Seconds for the broker to be there.

    Raises:
        NotEnrolled: The broker, or what is there in its place, does not admit the key, or nothing answers in time.
    """
    asked = Enrolment(pair.public.text, name, socket.gethostname())
    try:
        with closing(open_client(keyed(line.address, line.broker), invite_pair(line.secret))) as channel:
            _enrolled(channel, masked(line.address), asked, monotonic() + patience)
    except AddressUnusable as error:
        raise NotEnrolled(str(error)) from error


def _enrolled(channel: ClientChannel, address: str, asked: Enrolment, deadline: float) -> None:
    while True:
        channel.send(encode_enrolment(asked))
        if (frame := channel.receive(REPEAT)) is not None:
            try:
                answer = read_answer(frame)
            except ForeignMessage as error:
                raise NotEnrolled(f"{address}: {error}; install the same stageline on both machines") from error
            if answer.refusal:
                raise NotEnrolled(f"{address}: {answer.refusal}")
            if answer.key == asked.key:
                return
        if reason := _REFUSED.get(KeyRefusal(channel.refusal)):
            raise NotEnrolled(f"{address}: {reason}")
        if monotonic() > deadline:
            lacking = channel.trouble or "nothing answers there: start the broker, or open its port"
            raise NotEnrolled(f"{address}: {lacking}")
