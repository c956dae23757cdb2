"""Gate between a broker's channel and its coordinator: a message passes if the key that it came with may say it.

    invitation's key    Enrolment alone, which the gate answers
    operator's key      everything; KeyOrder, which the gate answers, if it is sealed with the run's secret as well
    enrolled key        messages that one of its rights covers, by the table in `rights.py`
    any other           nothing: it was revoked, or its invitation has ended, while it was connected

What is changed in the register is stored before an answer to it leaves. While the store cannot be written, enrolments
and orders are not answered: their senders repeat them. A broker without keys has an `OpenGate`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from stageline.broker.control.channel import Envelope, Received
from stageline.broker.control.messages import Answer, Refused
from stageline.broker.control.protocol import RunKeys, decode_to_broker, encode
from stageline.broker.control.store import Store
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.keys.access import Access
from stageline.broker.keys.enrolment import answer_enrolment, encode_enrolment, enrolment_in
from stageline.broker.keys.orders import KeyOrder, KeyOrderFailed, carry_out
from stageline.broker.keys.pairs import PublicKey, short
from stageline.broker.keys.register import EnrolledKey, Invitation, KeyRegister
from stageline.broker.rate_limit import RateLimit
from stageline.pipeline.errors import ExitCode

from .rights import NotAllowed, demand_place, demand_right, outline_of
from .state import EventLog

KEYS = "keys"  # name of the fact that has a broker's register
ANSWERED = 20  # refusals that are answered in a second
KNOCKS_TOLD = 1  # keys that knocked in vain, of which the audit log gets a line in a second
_SAME_VERSION = "install the same stageline on both sides"
MOST_SPEAKERS = 10_000  # that are remembered, so that the places of a revoked key are taken at once
_MOST_TOLD = 1000  # refusals that are remembered, so that each is told once

KeyOf = Callable[[bytes], str]
"""Function that returns the text of the key of a sender, `ServerChannel.key_of`."""


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """Line for the audit log: `what` became of a key, "enrolled", "admitted", "invited", "revoked" or "refused"."""

    what: str
    key: str
    name: str = ""
    host: str = ""
    detail: str = ""


@dataclass(slots=True)
class Sorted:
    """Messages of one turn as a gate has sorted them.

    Attributes:
        passed: Messages for the coordinator.
        answers: Answers of the gate.
        events: Lines for the audit log.
        readmit: True if a key was revoked, so that connections must be closed.
        revoked: Senders that have spoken with a key that was revoked.
    """

    passed: Sequence[Received]
    answers: list[Envelope] = field(default_factory=list)
    events: list[KeyEvent] = field(default_factory=list)
    readmit: bool = False
    revoked: set[bytes] = field(default_factory=set)


class Gatekeeper(Protocol):
    """Judge of what each key may say, in front of the coordinator."""

    def sort(self, received: Sequence[Received], key_of: KeyOf, now: float) -> Sorted:
        """Sort the messages of a turn, and carry out what the gate itself answers. `now` is seconds since the epoch."""

    def passed(self, received: Sequence[Received], key_of: KeyOf) -> Sequence[Received]:
        """Return the messages that pass, and change nothing: for a wait of the store. All others are lost."""


class OpenGate:
    """Gate of a broker without keys: everything passes."""

    def sort(self, received: Sequence[Received], key_of: KeyOf, now: float) -> Sorted:
        """Return all messages as passed."""
        return Sorted(received)

    def passed(self, received: Sequence[Received], key_of: KeyOf) -> Sequence[Received]:
        """Return all messages."""
        return received


class KeyGate:
    """Gate of a broker with keys."""

    def __init__(
        self,
        register: KeyRegister,
        store: Store,
        keys: RunKeys,
        operator: PublicKey,
        invitation_key: Callable[[int], PublicKey],
        events: EventLog,
        access: Access | None = None,
    ) -> None:
        """Stand before a coordinator.

        Args:
            register: Keys that the broker knows.
            store: Where the register's record is kept.
            keys: The run's secrets.
            operator: Key of the broker's operator.
            invitation_key: Returns the public key of the invitation with a serial.
            events: Where refusals are counted.
            access: What is told about keys.
        """
        self._register = register
        self._store = store
        self._keys = keys
        self._operator = operator.text
        self._invitation_key = invitation_key
        self._events = events
        self._access = access or Access(register)
        self._stored = register.record
        self._answers = RateLimit(ANSWERED)
        self._knocks = RateLimit(KNOCKS_TOLD)
        self._knocked = 0
        self._told: dict[tuple[str, str], None] = {}
        self._speakers: dict[bytes, str] = {}  # the newest senders of messages that passed, with their keys

    def sort(self, received: Sequence[Received], key_of: KeyOf, now: float) -> Sorted:
        """Sort the messages of a turn; answer enrolments and orders, once the register is stored.

        Args:
            received: Messages of one turn, in order.
            key_of: Returns the key of a sender.
            now: Present time, in seconds since the epoch.

        Raises:
            StoreUnusable: The register cannot be stored.
        """
        passed: list[Received] = []
        found = Sorted(passed)
        for sender, frame in received:
            key = key_of(sender)
            try:
                if self._admits(key, frame):
                    self._note_speaker(sender, key)
                    passed.append((sender, frame))
                else:
                    found.answers.append((sender, self._carry_out(key, frame or b"", found, now)))
            except NotAllowed as refusal:
                found.answers += self._refuse(sender, key, str(refusal), found, now)
        self._register.expire(now)
        found.events += self._new_knocks(now)
        if self._register.record is not self._stored:
            self._store.put(KEYS, msgspec.to_builtins(self._register.record))
            self._stored = self._register.record
        return found

    def _note_speaker(self, sender: bytes, key: str) -> None:
        self._speakers.pop(sender, None)  # who speaks again is the newest
        self._speakers[sender] = key
        if len(self._speakers) > MOST_SPEAKERS:
            del self._speakers[next(iter(self._speakers))]

    def passed(self, received: Sequence[Received], key_of: KeyOf) -> Sequence[Received]:
        """Return the messages that pass, and change nothing."""
        return list(self._passing(received, key_of))

    def _passing(self, received: Iterable[Received], key_of: KeyOf) -> Iterator[Received]:
        for sender, frame in received:
            try:
                if self._admits(key_of(sender), frame):
                    yield sender, frame
            except NotAllowed:
                continue

    def _admits(self, key: str, frame: bytes | None) -> bool:
        """Return True if the message passes, False if the gate answers it. Raises `NotAllowed`."""
        outline = outline_of(frame)
        if key == self._operator:
            return outline is None or outline.is_ != "key-order"
        known = self._register.enrolled(key)
        if known is None:
            return False
        if known.revoked is not None:
            raise NotAllowed(f"the key {short(key)} was revoked: `stageline keys admit {key}` admits it again")
        if outline is None:  # judged here: what cannot be read here must not be read elsewhere
            raise NotAllowed(f"what came from the key {short(key)} is not a control message; {_SAME_VERSION}")
        demand_right(known, outline)
        demand_place(known, outline)
        return True

    def _carry_out(self, key: str, frame: bytes, found: Sorted, now: float) -> bytes:
        """Return the answer to what the gate answers. Raises `NotAllowed`."""
        return self._obey(frame, found, now) if key == self._operator else self._enrol(key, frame, found, now)

    def _enrol(self, invitation: str, frame: bytes, found: Sorted, now: float) -> bytes:
        """Return the answer to an enrolment over the connection of an invitation. Raises `NotAllowed`."""
        try:
            asked = enrolment_in(frame)
        except ForeignMessage as error:
            raise NotAllowed(
                f"the key {short(invitation)} is that of an invitation, which may enrol another and say nothing else: "
                "start the worker with --join and the whole line"
            ) from error
        before = self._register.enrolled(asked.key)
        answer = answer_enrolment(self._register, invitation, asked, now)
        made = self._register.enrolled(asked.key)
        if made is not None and made is not before:
            found.events.append(_event("enrolled", made))
        elif answer.refusal:
            self._tell(found, KeyEvent("refused", asked.key, asked.name, asked.host, answer.refusal))
        return encode_enrolment(answer)

    def _obey(self, frame: bytes, found: Sorted, now: float) -> bytes:
        """Return the answer to an order of the operator. Raises `NotAllowed`."""
        try:
            order, seal = decode_to_broker(frame)
        except BadMessage as error:
            raise NotAllowed(str(error)) from error
        if not isinstance(order, KeyOrder) or not seal.is_of(self._keys.of_control):
            raise NotAllowed("an order about keys without the run's secret, which is in broker.secret of its folder")
        try:
            changed = carry_out(order, self._register, self._invitation_key, now)
        except KeyOrderFailed as error:
            return encode(Refused(str(error), code=ExitCode.USAGE))
        if order.what == "revoke":
            found.readmit = True
            found.revoked |= {sender for sender, key in self._speakers.items() if key == changed.key}
        found.events.append(_event({"invite": "invited", "admit": "admitted"}.get(order.what, "revoked"), changed))
        facts = {"run": self._keys.run, **(self._access.facts() or {}), "changed": msgspec.to_builtins(changed)}
        return encode(Answer("keys/1", facts))

    def _refuse(self, sender: bytes, key: str, reason: str, found: Sorted, now: float) -> list[Envelope]:
        """Count a refusal, and return its answer, unless there were too many."""
        self._events.count("refused by key", f"refused: {reason}")
        known = self._register.enrolled(key)
        self._tell(found, KeyEvent("refused", key, known.name if known else "", known.host if known else "", reason))
        if not self._answers.allows(now):
            return []
        return [(sender, encode(Refused(reason, code=ExitCode.NOT_ADMITTED)))]

    def _tell(self, found: Sorted, event: KeyEvent) -> None:
        """Add a line to the audit log, if it is new."""
        known = event.key, event.detail
        if known not in self._told:
            self._told[known] = None
            found.events.append(event)
            if len(self._told) > _MOST_TOLD:
                del self._told[next(iter(self._told))]

    def _new_knocks(self, now: float) -> list[KeyEvent]:
        """Return lines about keys that were refused by the channel since the last turn."""
        if self._register.knocked == self._knocked:
            return []
        self._knocked = self._register.knocked
        found = Sorted(())
        for key in self._register.knocks:
            knock = KeyEvent("refused", key, detail="not admitted")
            if (key, knock.detail) not in self._told and self._knocks.allows(now):
                self._tell(found, knock)
                self._events.count(
                    "knocked",
                    f"a process with the key {short(key)} knocks, which is not admitted: `stageline keys admit {key}` "
                    "admits it",
                )
        return found.events


def _event(what: str, about: EnrolledKey | Invitation) -> KeyEvent:
    host = about.host if isinstance(about, EnrolledKey) else ""
    return KeyEvent(what, about.key, about.name, host)
