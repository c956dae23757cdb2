"""Register of a broker's keys: invitations, the keys that enrolled with them, and keys that knocked in vain.

    invitation ──enrol──> key ──revoke──> refused
    knock ─────admit───────^

A process enrols with the key of an invitation, and from then on connects with a key of its own. Nothing that has
enrolled expires; an invitation does. A key that has enrolled invites one other: its successor, with the same rights.
A successor has one of its own once its predecessor is revoked: two at most are admitted by an invitation for one key.
Times are in seconds since the epoch, and are given: the register has no clock.

In a run with parties, their keys are in the register as the broker's plan lists them, and they alone have places.

An invitation has a serial, from which its secret is derived: a serial is used once, also after a revocation.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from stageline.broker.errors import NotEnrolled

from .pairs import PublicKey, short
from .parties import Parties

MOST_KNOCKS = 16  # keys that were refused lately, and are shown
_KNOCKS = 256  # that are remembered: one key knocks again and again
MOST_KEYS = 10_000  # that may enrol; a person may admit more
_REVOKED_LINES = 256  # invitations that were revoked, of which that is remembered: who has one is told

_ANOTHER = "ask for another, which `stageline keys invite` prints on the broker's machine"


class Right(StrEnum):
    """Permission of a key to speak to the broker in one of the ways that the broker distinguishes."""

    WORK = "work"  # have a place of the plan, and report
    LOOK = "look"  # ask about the run
    STOP = "stop"  # end the run
    INSPECT = "inspect"  # ask about the contents of queues


class Invitation(msgspec.Struct, frozen=True):
    """Key with which a process may enrol a key of its own, and do nothing else.

    Attributes:
        key: Text of the public key.
        ends: Time from which on it is refused; None: with the run.
        once: True if one key alone may enrol with it: the first.
        name: Name for people.
        worker: Place that its holder may have; None for any.
        serial: Number of the invitation in the run.
        rights: Permissions of the keys that enrol with it.
    """

    key: str
    ends: float | None
    once: bool = False
    name: str = ""
    worker: int | None = None
    serial: int = 0
    rights: tuple[Right, ...] = (Right.WORK,)

    def has_ended(self, now: float) -> bool:
        """Return True if it is refused at the time `now`."""
        return self.ends is not None and self.ends <= now


class EnrolledKey(msgspec.Struct, frozen=True):
    """Key that may speak to the broker.

    Attributes:
        key: Text of the public key.
        since: Time at which it enrolled, or was admitted.
        invitation: Key that it enrolled with, that of an invitation or its predecessor's; "" for one that a person has
            admitted.
        name: Name of the process.
        host: Host of the process.
        worker: Place that it may have; None for any.
        revoked: Time from which on it is refused; None if it is not.
        rights: Its permissions.
        party: Name of the party whose key the plan lists it as; "" for any other key.
        places: Places of that party.
        unlisted: True if it is refused since the plan does not list it any more, and not by a person.
    """

    key: str
    since: float
    invitation: str = ""
    name: str = ""
    host: str = ""
    worker: int | None = None
    revoked: float | None = None
    rights: tuple[Right, ...] = (Right.WORK,)
    party: str = ""
    places: tuple[int, ...] = ()
    unlisted: bool = False


class KeyRecord(msgspec.Struct, frozen=True):
    """Contents of a register, as the broker stores them.

    Attributes:
        serials: Number of serials that were used, which is the next one.
        standing: Serial of the invitation that a broker makes at its start; another one once that was revoked.
        parties: Parties of the plan.
        revoked: Keys of the invitations that were revoked last, the newest last.
    """

    invitations: tuple[Invitation, ...] = ()
    keys: tuple[EnrolledKey, ...] = ()
    serials: int = 1
    standing: int = 0
    parties: Parties = ()
    revoked: tuple[str, ...] = ()


@dataclass(slots=True)
class KeyRegister:
    """Keys that one broker knows.

    `admits` and `has_revoked` are for any thread, all else for the broker's own. The broker stores `record` after each
    change, before it answers, and makes the register of its successor from it.
    """

    record: KeyRecord = field(default_factory=KeyRecord)
    _admitted: frozenset[str] = field(init=False, default=frozenset())
    _revoked: frozenset[str] = field(init=False, default=frozenset())
    _keys: dict[str, EnrolledKey] = field(init=False, default_factory=dict)
    knocked: int = field(init=False, default=0)  # how often a key was refused
    _knocks: deque[str] = field(init=False, default_factory=lambda: deque(maxlen=_KNOCKS))  # the newest last

    def __post_init__(self) -> None:
        """Admit who was admitted when the record was stored."""
        self._change(self.record.invitations, self.record.keys)

    def admits(self, public: PublicKey) -> bool:
        """Return True if who has the secret of `public` may connect; note a key that may not as one that knocked."""
        if public.text in self._admitted:
            return True
        self._knocks.append(public.text)
        self.knocked += 1
        return False

    def has_revoked(self, public: PublicKey) -> bool:
        """Return True if a person has revoked this key, or the invitation whose key it is."""
        return public.text in self._revoked

    @property
    def knocks(self) -> tuple[str, ...]:
        """Texts of the keys that were refused last, the newest last; those that were admitted since are left out."""
        newest = dict.fromkeys(reversed(self._knocks.copy()))  # in one instant: another thread appends
        refused = [each for each in newest if each not in self._admitted]
        return tuple(reversed(refused[:MOST_KNOCKS]))

    def invite(self, invitation: Invitation) -> None:
        """Admit the key of an invitation, in place of an older one with that key."""
        others = (each for each in self.record.invitations if each.key != invitation.key)
        self._change((*others, invitation), self.record.keys, max(self.record.serials, invitation.serial + 1))

    def expire(self, now: float) -> None:
        """Refuse invitations that have ended."""
        self.drop(lambda each: each.has_ended(now))

    def drop(self, is_over: Callable[[Invitation], bool]) -> None:
        """Refuse the invitations of which `is_over` is true from now on."""
        if any(map(is_over, self.record.invitations)):
            self._change((each for each in self.record.invitations if not is_over(each)), self.record.keys)

    def enrol(self, invitation: str, key: PublicKey, now: float, *, name: str = "", host: str = "") -> EnrolledKey:
        """Return the key that enrols, which is admitted from now on. A key that has enrolled before stays as it is.

        Args:
            invitation: Text of the key over whose connection it enrols: an invitation's, or one that it succeeds.
            key: Key that enrols.
            now: Present time.
            name: Name of the process.
            host: Host of the process.

        Raises:
            NotEnrolled: The invitation has ended, was for another key, or the key was revoked; or the key that it
                succeeds is itself the successor of one that is admitted.
        """
        if (former := self.enrolled(invitation)) is not None and former.party:
            raise NotEnrolled(
                f"{short(invitation)} is a key of party {former.party}: write the other as next_key into "
                f"[parties.{former.party}] on every side, then `stageline keys reload` on the broker's machine"
            )
        found = self._successor_of(invitation) or self.invitation(invitation)
        if found is None or found.has_ended(now):
            raise NotEnrolled(f"this invitation has ended: {_ANOTHER}")
        known = self.enrolled(key.text)
        if known is not None and known.revoked is None:
            return known
        if known is not None:
            raise NotEnrolled(
                f"the key {key.short} of this machine was revoked: `stageline keys admit {key.text}` on the broker's "
                "machine admits it again"
            )
        self._demand_room(found, key, former)
        made = EnrolledKey(key.text, now, invitation, name, host, found.worker, rights=found.rights)
        self._change(self.record.invitations, (*self.record.keys, made))
        return made

    def _demand_room(self, found: Invitation, key: PublicKey, former: EnrolledKey | None) -> None:
        """Raise `NotEnrolled` if no further key may enrol with what was found, in the place of `former` if given."""
        used = [each for each in self.record.keys if each.invitation == found.key]
        if used and found.once:
            raise NotEnrolled(_used(found, used[0], succeeds=former is not None))
        if len(self.record.keys) >= MOST_KEYS:
            raise NotEnrolled(
                f"{len(self.record.keys)} keys have enrolled with this broker, and no more may: `stageline keys admit "
                f"{key.text}` on its machine admits this one"
            )
        before = former and self.enrolled(former.invitation)
        if former and before and before.revoked is None:
            raise NotEnrolled(
                f"the key {short(former.key)} has taken the place of {before.key}, which is still admitted: "
                f"`stageline keys revoke {before.key}` on the broker's machine first, then rotate again"
            )

    def admit(
        self,
        key: PublicKey,
        now: float,
        *,
        name: str = "",
        worker: int | None = None,
        rights: tuple[Right, ...] = (),
    ) -> EnrolledKey:
        """Return `key`, which a person admits: one that has knocked, was revoked, or comes later.

        Args:
            key: Key to admit.
            now: Present time.
            name: Name for people; "": as before.
            worker: Place that it may have; None: as before, or any.
            rights: Its permissions; none given: as before, or to work.
        """
        before = self.enrolled(key.text) or EnrolledKey(key.text, now)
        given = {"name": name, "rights": rights} | ({} if worker is None else {"worker": worker})
        changed = {field: value for field, value in given.items() if value not in ("", ())}
        made = msgspec.structs.replace(before, revoked=None, **changed)
        self._change(self.record.invitations, (*self._without(key.text), made))
        return made

    def list_parties(self, parties: Parties, now: float) -> tuple[str, ...]:
        """Admit the keys of these parties, in place of those listed before; return the keys that are refused since.

        A key that a person has revoked stays so, until a person admits it.
        """
        listed = {key: each for each in parties for key in each.keys}
        made = []
        for key, party in listed.items():
            before = self.enrolled(key) or EnrolledKey(key, now)
            terms = {"name": party.name, "party": party.name, "places": party.places, "worker": None}
            revoked = None if before.unlisted else before.revoked
            rights = tuple(map(Right, party.rights))
            made.append(msgspec.structs.replace(before, **terms, rights=rights, revoked=revoked, unlisted=False))
        others = [each for each in self.record.keys if each.key not in listed]
        gone = tuple(each.key for each in others if each.party and each.revoked is None)
        left = [
            msgspec.structs.replace(each, revoked=now, unlisted=True) if each.key in gone else each for each in others
        ]
        self.record = msgspec.structs.replace(self.record, parties=parties)
        self._change(self.record.invitations, (*left, *made))
        return gone

    def revoke(self, text: str, now: float, *, successors: bool = False) -> tuple[str, ...]:
        """Refuse the key or invitation with this text from now on, and all with which its owner could come back.

        That is each key that it has succeeded, and, unless another has succeeded it, the invitation that the first of
        them has enrolled with. With `successors` it is each key that came by it, too, one after another: who has the
        key could name them faster than a person revokes. Return the texts of what is refused; nothing if there is none
        with this text.

        A connection that it has is not closed by this.
        """
        texts = (*self._of_owner(text, successors=successors), *(self._came_by(text) if successors else ()))
        keys = (
            msgspec.structs.replace(each, revoked=now if each.revoked is None else each.revoked, unlisted=False)
            if each.key in texts
            else each
            for each in self.record.keys
        )
        ends = [each for each in self.record.invitations if each.key in texts]
        revoked = (*self.record.revoked, *(each.key for each in ends))[-_REVOKED_LINES:]
        self.record = msgspec.structs.replace(self.record, revoked=revoked)
        self._change((each for each in self.record.invitations if each not in ends), keys)
        if any(each.serial == self.record.standing for each in ends):
            serials = self.record.serials
            self.record = msgspec.structs.replace(self.record, standing=serials, serials=serials + 1)
        return texts

    def _of_owner(self, text: str, *, successors: bool) -> Iterator[str]:
        if self.enrolled(text) is not None or self.invitation(text) is not None:
            yield text
        is_succeeded = not successors and any(
            each.invitation == text and each.revoked is None for each in self.record.keys
        )
        known = self.enrolled(text)
        while known is not None and known.invitation:
            before = self.enrolled(known.invitation)
            if before is not None or (self.invitation(known.invitation) is not None and not is_succeeded):
                yield known.invitation
            known = before

    def _came_by(self, text: str) -> Iterator[str]:
        """Yield the keys that are admitted by way of this one or this invitation."""
        named = [text]
        for former in named:
            found = [each for each in self.record.keys if each.invitation == former]
            named += [each.key for each in found]
            yield from (each.key for each in found if each.revoked is None)

    @property
    def standing(self) -> Invitation | None:
        """Invitation that a broker makes at its start; None once it has ended, or was revoked by itself."""
        return next((each for each in self.record.invitations if each.serial == self.record.standing), None)

    @property
    def newest_revocation(self) -> float:
        """Time from which on the key that was revoked last is refused; 0 if none was."""
        return max((each.revoked or 0.0 for each in self.record.keys), default=0.0)

    def enrolled(self, text: str) -> EnrolledKey | None:
        """Return the key with this text, also one that was revoked; None if it has not enrolled."""
        return self._keys.get(text)

    def is_listed(self, text: str) -> bool:
        """Return True if the plan lists this text as that of a party's key."""
        return any(text in each.keys for each in self.record.parties)

    def invitation(self, text: str) -> Invitation | None:
        """Return the invitation whose key has this text, None if there is none. It may have ended."""
        return next((each for each in self.record.invitations if each.key == text), None)

    def invites(self, text: str) -> bool:
        """Return True if this text is that of an invitation's key."""
        return self.invitation(text) is not None

    def _successor_of(self, text: str) -> Invitation | None:
        """Return what a key that may speak invites: one other key, in its place; None if it may not."""
        known = self.enrolled(text)
        if known is None or known.revoked is not None:
            return None
        return Invitation(text, None, True, known.name, known.worker, rights=known.rights)

    def _without(self, text: str) -> Iterable[EnrolledKey]:
        return (each for each in self.record.keys if each.key != text)

    def _change(
        self, invitations: Iterable[Invitation], keys: Iterable[EnrolledKey], serials: int | None = None
    ) -> None:
        """Replace the record, and then who is admitted, in one instant for the thread that asks."""
        serials = self.record.serials if serials is None else serials
        kept = self.record.standing, self.record.parties, self.record.revoked
        self.record = KeyRecord(tuple(invitations), tuple(keys), serials, *kept)
        self._keys = {each.key: each for each in self.record.keys}  # each message looks up its sender's
        working = (each.key for each in self.record.keys if each.revoked is None)
        self._admitted = frozenset((*(each.key for each in self.record.invitations), *working))
        refused = (each.key for each in self.record.keys if each.revoked is not None and not each.unlisted)
        self._revoked = frozenset((*refused, *self.record.revoked)) - self._admitted


def _used(found: Invitation, by: EnrolledKey, *, succeeds: bool) -> str:
    """Return why an invitation for one key takes no other."""
    if succeeds:
        return (
            f"the key {short(found.key)} was rotated before: {short(by.key)} of host {by.host} has taken its place. If "
            f"that was not you, `stageline keys revoke {found.key} --successors` on the broker's machine ends both"
        )
    return f"this invitation was for one machine, and {by.name} on host {by.host} has used it: {_ANOTHER}"
