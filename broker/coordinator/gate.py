"""Gate in front of a coordinator: a message passes if its key may say it.

    invitation's key    Enrolment alone, which the gate answers
    operator's key      everything; KeyChange, which the gate answers, if it is sealed with the run's secret as well
    enrolled key        messages that one of its rights covers, by the table in `rights.py`; Enrolment of one key that
                        takes its place, which the gate answers; requests are sealed on their way
    any other           nothing: it was revoked, or its invitation has ended, while it was connected

What is changed in the register is stored before an answer to it leaves. While the store cannot be written, enrolments
and changes of keys are not answered: their senders repeat them. A broker without keys has an `OpenGate`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from stageline.broker.control.channel import Envelope, Received
from stageline.broker.control.leaves import LeaveWorker
from stageline.broker.control.messages import LONGEST_TEXT, Answer, Refused, Request, StopRun
from stageline.broker.control.pauses import PauseRun
from stageline.broker.control.protocol import RunKeys, Sealer, decode_to_broker, encode
from stageline.broker.control.store import Store
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.keys.access import Access
from stageline.broker.keys.changes import Changed, KeyChange, KeyChangeFailed, Reloaded, carry_out
from stageline.broker.keys.enrolment import answer_enrolment, encode_enrolment, enrolment_in, is_enrolment
from stageline.broker.keys.pairs import PublicKey, short
from stageline.broker.keys.parties import Parties, way_in
from stageline.broker.keys.register import EnrolledKey, Invitation, KeyRegister
from stageline.broker.rate_limit import RateLimit
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.printable import bounded

from .rights import NotAllowed, demand_place, demand_right, outline_of
from .state import EventLog

KEYS = "keys"  # name of the fact that has a broker's register
ANSWERED = 20  # refusals that are answered in a second
KNOCKS_TOLD = 1  # keys that knocked in vain, of which the audit log gets a line in a second
_SAME_VERSION = "install the same stageline on both sides"
MOST_SPEAKERS = 10_000  # that are remembered, so that the places of a revoked key are taken at once
_REQUESTS = b"stop-run", b"pause-run", b"leave-worker"  # the tags of requests that the gate seals
_MOST_TOLD = 1000  # lines that are remembered, so that each is told once
_LONGEST_DETAIL = 2_000  # characters of a line's detail: a stop's reason, and an unknown field's name, are its sender's

KeyOf = Callable[[bytes], str]
"""Function that returns the text of the key of a sender, `ServerChannel.key_of`."""


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """Line for the audit log: `what` became of a key.

    It was "invited", "enrolled", "admitted", "revoked" or "refused", it "succeeded" another, or it "stopped", "paused"
    or "resumed" the run.
    What has changed about parties is "reloaded", without a key, with its `detail`.
    """

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

    def revoke(self, senders: Iterable[bytes]) -> None:
        """Note that keys were revoked, with which these senders have spoken."""
        self.readmit = True
        self.revoked.update(senders)


class Gatekeeper(Protocol):
    """Judge of what each key may say, in front of the coordinator."""

    def sort(self, received: Sequence[Received], key_of: KeyOf, now: float) -> Sorted:
        """Sort the messages of a turn, and carry out what the gate itself answers. `now` is seconds since the epoch."""

    def passed(self, received: Sequence[Received], key_of: KeyOf) -> Sequence[Received]:
        """Return the messages that pass, and change nothing: for a wait of the store. All others are lost."""

    def told(self, refusals: Sequence[tuple[bytes, str]], key_of: KeyOf, now: float) -> Sequence[KeyEvent]:
        """Return the lines for the audit log about senders of what passed and was then refused, with the reasons."""


class OpenGate:
    """Gate of a broker without keys: everything passes."""

    def sort(self, received: Sequence[Received], key_of: KeyOf, now: float) -> Sorted:
        """Return all messages as passed."""
        return Sorted(received)

    def passed(self, received: Sequence[Received], key_of: KeyOf) -> Sequence[Received]:
        """Return all messages."""
        return received

    def told(self, refusals: Sequence[tuple[bytes, str]], key_of: KeyOf, now: float) -> Sequence[KeyEvent]:
        """Return no lines: senders have no keys."""
        return ()


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
        listed: Callable[[], Parties] = tuple,
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
            listed: Reads the parties of the plan again. Raises `KeyChangeFailed`.
        """
        self._register = register
        self._store = store
        self._keys = keys
        self._operator = operator.text
        self._invitation_key = invitation_key
        self._events = events
        self._access = access or Access(register)
        self._listed = listed
        self._stored = register.record
        self._answers = RateLimit(ANSWERED)
        self._knocks = RateLimit(KNOCKS_TOLD)
        self._refusals = RateLimit(ANSWERED)
        self._pauses = RateLimit(ANSWERED)
        self._knocked = 0
        self._told: dict[tuple[str, str], None] = {}
        self._waited = Sorted(())  # with lines for the audit log about what passed during a wait of the store
        self._speakers: dict[bytes, str] = {}  # the newest senders of messages that passed, with their keys
        self._now = 0.0  # of the newest turn
        self._sealer = Sealer(lambda: self._now)

    def sort(self, received: Sequence[Received], key_of: KeyOf, now: float) -> Sorted:
        """Sort the messages of a turn; answer enrolments and changes of keys, once the register is stored.

        Args:
            received: Messages of one turn, in order.
            key_of: Returns the key of a sender.
            now: Present time, in seconds since the epoch.

        Raises:
            StoreUnusable: The register cannot be stored.
        """
        passed: list[Received] = []
        found, self._now = Sorted(passed), now
        for sender, frame in received:
            key = key_of(sender)
            try:
                if self._admits(key, frame):
                    self._note_speaker(sender, key)
                    passed.append((sender, self._vouched(key, frame, found)))
                else:
                    found.answers.append((sender, self._carry_out(key, frame or b"", found, now)))
            except NotAllowed as refusal:
                found.answers.extend(self._refuse(sender, key, str(refusal), found, now))
        self._register.expire(now)
        found.events.extend(self._new_knocks())
        if self._register.record is not self._stored:
            self._store.put(KEYS, msgspec.to_builtins(self._register.record))
            self._stored = self._register.record
        found.events.extend(self._waited.events)
        self._waited.events.clear()
        return found

    def _note_speaker(self, sender: bytes, key: str) -> None:
        self._speakers.pop(sender, None)  # who speaks again is the newest
        self._speakers[sender] = key
        if len(self._speakers) > MOST_SPEAKERS:
            del self._speakers[next(iter(self._speakers))]

    def passed(self, received: Sequence[Received], key_of: KeyOf) -> Sequence[Received]:
        """Return the messages that pass, and change nothing. Lines about them come with the next turn."""
        return list(self._passing(received, key_of))

    def told(self, refusals: Sequence[tuple[bytes, str]], key_of: KeyOf, now: float) -> Sequence[KeyEvent]:
        """Return a line for each refusal of a key that was not told before, and few in a second."""
        found, self._now = Sorted(()), now
        for sender, reason in refusals:
            key = key_of(sender)
            known = self._register.enrolled(key)
            if known is not None:
                self._tell(found, KeyEvent("refused", key, known.name, known.host, reason), self._refusals)
        return found.events

    def _passing(self, received: Iterable[Received], key_of: KeyOf) -> Iterator[Received]:
        for sender, frame in received:
            try:
                if self._admits(key := key_of(sender), frame):
                    yield sender, self._vouched(key, frame, self._waited)
            except NotAllowed:
                continue
        del self._waited.events[_MOST_TOLD:]

    def _admits(self, key: str, frame: bytes | None) -> bool:
        """Return True if the message passes, False if the gate answers it. Raises `NotAllowed`."""
        if not key:
            raise NotAllowed("a message that no key has sealed for this broker, or that has come before")
        outline, parties = outline_of(frame), self._register.record.parties
        if key == self._operator:
            if parties and outline is not None and outline.is_ == "hello":
                raise NotAllowed(
                    "the broker's own user has no place in a run with parties: start the worker with the plan, whose "
                    "[parties] say which key it needs"
                )
            return outline is None or outline.is_ != "key-change"
        known = self._register.enrolled(key)
        if known is None:
            return False
        if known.revoked is not None and known.party and not self._register.is_listed(key):
            raise NotAllowed(f"the key {short(key)} was one of party {known.party}, which does not have it any more")
        if known.revoked is not None:
            raise NotAllowed(f"the key {short(key)} was revoked: `stageline keys admit {key}` admits it again")
        if outline is None and is_enrolment(frame or b""):
            return False
        if outline is None:  # judged here: what cannot be read here must not be read elsewhere
            raise NotAllowed(f"what came from the key {short(key)} is not a control message; {_SAME_VERSION}")
        demand_right(known, outline)
        demand_place(known, outline, parties)
        return True

    def _vouched(self, key: str, frame: bytes | None, found: Sorted) -> bytes | None:
        """Return the frame for the coordinator, which obeys requests to stop or pause that the run's secret has sealed.

        A key that may stop the run does not have that secret: the gate, which knows its right, seals the request.
        """
        if frame is None or not any(tag in frame for tag in _REQUESTS):  # each message passes here
            return frame
        try:
            message, seal = decode_to_broker(frame)
        except BadMessage:
            return frame
        if not isinstance(message, Request) or seal.is_of(self._keys.of_control):
            return frame
        known = self._register.enrolled(key)
        name = known.name if known is not None and known.name else short(key)
        if (request := _in_the_name_of(name, message)) is None:
            return frame
        event = KeyEvent(_done(message), key, name, known.host if known else "", message.reason)
        if isinstance(message, StopRun):
            self._tell(found, event)
        elif self._pauses.allows(self._now):  # each counts: a run may pause again
            found.events.append(event)
        return self._sealer.sealed(request, self._keys.of_control)

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
            succeeds = self._register.enrolled(invitation) is not None
            detail = f"in the place of {invitation}" if succeeds else ""
            what = "succeeded" if succeeds else "enrolled"
            found.events.append(KeyEvent(what, made.key, made.name, made.host, detail))
        elif answer.refusal:
            refused = KeyEvent("refused", asked.key, asked.name, asked.host, answer.refusal)
            self._tell(found, refused, self._refusals)
        return encode_enrolment(answer)

    def _obey(self, frame: bytes, found: Sorted, now: float) -> bytes:
        """Return the answer to a change of keys that the operator wants. Raises `NotAllowed`."""
        try:
            wanted, seal = decode_to_broker(frame)
        except BadMessage as error:
            raise NotAllowed(str(error)) from error
        if not isinstance(wanted, KeyChange) or not seal.is_of(self._keys.of_control):
            raise NotAllowed("a change of keys without the run's secret, which is in broker.secret of its folder")
        try:
            changed = carry_out(wanted, self._register, self._invitation_key, now, self._listed)
        except KeyChangeFailed as error:
            return encode(Refused(str(error), code=ExitCode.USAGE))
        if changed.revoked or (isinstance(changed.about, Reloaded) and changed.about.changes):
            found.revoke(sender for sender, key in self._speakers.items() if key in changed.revoked)
        found.events.extend(_events(wanted.what, changed))
        others = changed.revoked if isinstance(changed.about, Reloaded) else changed.revoked[1:]
        facts = {"changed": msgspec.to_builtins(changed.about), "revoked_with": others}
        return encode(Answer("keys/1", {"run": self._keys.run, **(self._access.facts() or {}), **facts}))

    def _refuse(self, sender: bytes, key: str, reason: str, found: Sorted, now: float) -> list[Envelope]:
        """Count a refusal, and return its answer, unless there were too many."""
        self._events.count("refused by key", f"refused: {reason}")
        known = self._register.enrolled(key)
        refused = KeyEvent("refused", key, known.name if known else "", known.host if known else "", reason)
        self._tell(found, refused, self._refusals)
        if not self._answers.allows(now):
            return []
        return [(sender, encode(Refused(reason, code=ExitCode.NOT_ADMITTED)))]

    def _tell(self, found: Sorted, event: KeyEvent, rate: RateLimit | None = None) -> bool:
        """Add a line to the audit log, if it is new and the `rate` allows one. Returns True if it was added."""
        event = replace(event, detail=bounded(event.detail, _LONGEST_DETAIL))
        known = event.key, event.detail
        if known in self._told or not (rate is None or rate.allows(self._now)):
            return False
        self._told[known] = None
        found.events.append(event)
        if len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]
        return True

    def _new_knocks(self) -> list[KeyEvent]:
        """Return lines about keys that were refused by the channel since the last turn."""
        if self._register.knocked == self._knocked:
            return []
        self._knocked = self._register.knocked
        found = Sorted(())
        for key in self._register.knocks:
            if self._tell(found, KeyEvent("refused", key, detail="not admitted"), self._knocks):
                way_out = way_in(key, self._register.record.parties)
                self._events.count(
                    "knocked", f"a process with the key {short(key)} knocks, which is not admitted: {way_out}"
                )
        return found.events


def _in_the_name_of(name: str, asked: Request) -> Request | None:
    """Return a request with the name of the key that makes it; None for a dismissal, which no key may make."""
    if isinstance(asked, PauseRun | LeaveWorker):
        return msgspec.structs.replace(asked, by=name)
    return None if asked.over else StopRun(f"{asked.reason} ({name})"[:LONGEST_TEXT], asked.at_step_end)


def _done(asked: Request) -> str:
    """Return what a request has done, for the audit log."""
    match asked:
        case StopRun():
            return "stopped"
        case LeaveWorker():
            return "drained"
        case PauseRun():
            return "resumed" if asked.resumes else "paused"


def _events(what: str, changed: Changed) -> list[KeyEvent]:
    about = changed.about
    if isinstance(about, Reloaded):
        found = [KeyEvent("reloaded", "", detail=each) for each in about.changes]
        return [*found, *(KeyEvent("revoked", each, detail="the plan lists it no more") for each in changed.revoked)]
    found = [_event({"invite": "invited", "admit": "admitted"}.get(what, "revoked"), about)]
    others = (each for each in changed.revoked if each != about.key)
    return [*found, *(KeyEvent("revoked", each, detail=f"with {about.key}") for each in others)]


def _event(what: str, about: EnrolledKey | Invitation) -> KeyEvent:
    host = about.host if isinstance(about, EnrolledKey) else ""
    return KeyEvent(what, about.key, about.name, host)
