"""Enrolment of this machine's key with a broker, by a join line.

join line ──invitation's key──> broker: this machine's key, please ──> keyed address, dialled by that key
         └── has ended: the key may be admitted already
"""

import socket
from collections.abc import Mapping
from contextlib import closing
from time import monotonic

from stageline.broker.control.channel import ClientChannel
from stageline.broker.errors import AddressUnusable, ForeignMessage, NotEnrolled
from stageline.broker.keys.admission import KeyRefusal
from stageline.broker.keys.enrolment import Enrolment, encode_enrolment, read_answer
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KEY_SIGNS, VERSION, KeyPair, PublicKey, invite_pair
from stageline.broker.transports.base import open_client
from stageline.pipeline.addresses import masked, needs_keys, parted, transport_of
from stageline.workers.keys.keyring import own_pair, pair_towards

from .client import BrokerUnreachable, KeyMissing, KeyRefused
from .refusals import NEW_LINE, admitting, explained, shown

JOIN = "STAGELINE_JOIN"  # the variable with a join line or an address
REPEAT = 0.5  # seconds after which an enrolment without an answer is sent again
LOOK = 0.05  # seconds between two looks at the connection
SILENCE = 3.0  # seconds without an answer, after which that is said
KNOWN = 10.0  # seconds for a broker that has refused an invitation to say if it knows the key of this machine
_OLD = "is old: its invitation has ended, or it is of an earlier run"


def is_join_line(text: str) -> bool:
    """Return True if `text` is meant as a join line: it has more than an address and a key, or less than a key."""
    _, key = parted(text)
    version, _, signs = key.partition(".")
    if key:
        return version != VERSION or "." in signs or len(signs) < KEY_SIGNS
    return "#" in text and not transport_of(text).has_server  # at a server, a name may stand there


def address_of(text: str) -> str:
    """Return the address in an address or a sound join line, with the key of the broker."""
    if not is_join_line(text):
        return text
    line = JoinLine.parse(text)
    return keyed(line.address, line.broker)


def demand_key(text: str, *, insecure: bool) -> None:
    """Raise `KeyMissing` for an address beyond this machine without a key, unless the run is `insecure`."""
    if not (insecure or is_join_line(text) or parted(text)[1]) and needs_keys(text):
        raise KeyMissing(
            f"{masked(text)} has no key: paste the line that its broker printed, as in stageline worker --join "
            "'tcp://desk:7000#k1....', or set broker.insecure = true on all sides"
        )


def entered(text: str, environment: Mapping[str, str], name: str, patience: float) -> tuple[str, KeyPair | None]:
    """Return a broker's address, and the pair with which to dial it: enrol first if `text` is a join line.

    Args:
        text: Address, keyed or not, or join line.
        environment: Variables, which may say where the key file is.
        name: Name of this process, for people.
        patience: Seconds for the broker to be there.

    Raises:
        BadJoinLine, BadKey: The line or the key is wrong.
        KeyUnusable: This machine's key cannot be made or read.
        NotEnrolled, KeyRefused: The broker, or what is there in its place, does not admit the key.
        BrokerUnreachable: Nothing has answered in time.
    """
    if not is_join_line(text):
        return text, pair_towards(text, environment)
    line, address = JoinLine.parse(text), address_of(text)
    pair = pair_towards(address, environment)
    own = own_pair(environment)
    if pair == own:  # else this user may give the broker orders
        enrol(line, own, name, patience)
    return address, pair


def enrol(line: JoinLine, pair: KeyPair, name: str, patience: float) -> None:
    """Have the broker admit this machine's key, and return once it does. A key that is admitted already stays so.

    Args:
        line: Join line.
        pair: Key pair of this machine.
        name: Name of this process, for people.
        patience: Seconds for the broker to be there.

    Raises:
        NotEnrolled: The broker does not admit the key.
        KeyRefused: What is there in the broker's place does not have its key.
        BrokerUnreachable: Nothing has answered in time.
    """
    address, invitation = keyed(line.address, line.broker), invite_pair(line.secret)
    try:
        with closing(open_client(address, invitation)) as channel:
            asked = Enrolment(pair.public.text, name, socket.gethostname())
            _enrolled(channel, address, asked, invitation, monotonic() + patience)
    except AddressUnusable as error:
        raise BrokerUnreachable(str(error)) from error
    except KeyRefused as refused:
        if not refused.refusal.may_pass:
            raise
        own = _refusal_of(address, pair)
        if own is KeyRefusal.REVOKED:
            raise NotEnrolled(explained(own, address, pair)) from refused
        if own:
            why = "was revoked" if refused.refusal is KeyRefusal.REVOKED else _OLD
            raise NotEnrolled(f"{shown(address)}: the join line {why}; {NEW_LINE}. {admitting(pair)}") from refused


def succeed(url: str, pair: KeyPair, successor: PublicKey, name: str, patience: float) -> None:
    """Have the broker at a keyed address admit another key of this machine, and return once it does.

    Args:
        url: Address with the broker's key.
        pair: Key pair that the broker admits at present.
        successor: Key that is to take its place.
        name: Name of this process, for people.
        patience: Seconds for the broker to be there.

    Raises:
        NotEnrolled: The broker does not admit the successor.
        KeyRefused: The broker does not admit the key of `pair`, or what is there is another one.
        BrokerUnreachable: Nothing has answered in time.
    """
    try:
        with closing(open_client(url, pair)) as channel:
            asked = Enrolment(successor.text, name, socket.gethostname())
            _enrolled(channel, url, asked, pair, monotonic() + patience)
    except AddressUnusable as error:
        raise BrokerUnreachable(str(error)) from error


def _enrolled(channel: ClientChannel, address: str, asked: Enrolment, pair: KeyPair, deadline: float) -> None:
    """Send the enrolment until it is answered. `channel` was dialled with `pair`, an invitation's or a predecessor."""
    begun, due, told = monotonic(), 0.0, False
    while True:
        if channel.renewed() or monotonic() >= due:
            channel.send(encode_enrolment(asked))
            due = monotonic() + REPEAT
        if (frame := channel.receive(LOOK)) is not None:
            try:
                answer = read_answer(frame)
            except ForeignMessage as error:
                raise NotEnrolled(f"{shown(address)}: {error}; install the same stageline on both machines") from error
            if answer.refusal:
                raise NotEnrolled(f"{shown(address)}: {answer.refusal}")
            if answer.key == asked.key:
                return
        if refusal := KeyRefusal(channel.refusal):
            raise KeyRefused(refusal, address, pair)
        now = monotonic()
        if now > deadline or (not told and now - begun > SILENCE):
            lacking = channel.trouble or "nothing answers there: start the broker, or open its port"
            if now > deadline:
                raise BrokerUnreachable(f"{shown(address)}: {lacking}")
            _warn(f"{shown(address)}: {lacking}. It is tried again for {deadline - now:.0f} s")
            told = True


def _warn(text: str) -> None:
    import structlog  # imports rich, for which commands that only ask would wait

    structlog.get_logger().warning(text)


def _refusal_of(address: str, pair: KeyPair) -> KeyRefusal:
    """Return the broker's refusal of the key, `NONE` if it admits it. The broker is there."""
    deadline = monotonic() + KNOWN
    with closing(open_client(address, pair, keeps=True)) as channel:
        while not channel.refusal and monotonic() < deadline:
            if channel.renewed():
                return KeyRefusal.NONE
            channel.receive(LOOK)
        return KeyRefusal(channel.refusal) or KeyRefusal.NOT_ADMITTED
