"""Register of a broker's keys: invitations, the keys that enrolled with them, and keys that knocked in vain.

    invitation ──enrol──> key ──revoke──> refused
    knock ─────admit───────^

A process enrols with the key of an invitation, and from then on connects with a key of its own. Nothing that has
enrolled expires; an invitation does. Times are in seconds since the epoch, and are given: the register has no clock.

An invitation has a serial, from which its secret is derived: a serial is used once, also after a revocation.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from stageline.broker.errors import NotEnrolled

from .pairs import PublicKey

MOST_KNOCKS = 16  # keys that were refused lately, and are shown
_KNOCKS = 256  # that are remembered: one key knocks again and again
MOST_KEYS = 10_000  # that may enrol with one invitation

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
        invitation: Key of the invitation that it enrolled with; "" for one that a person has admitted.
        name: Name of the process.
        host: Host of the process.
        worker: Place that it may have; None for any.
        revoked: Time from which on it is refused; None if it is not.
        rights: Its permissions.
    """

    key: str
    since: float
    invitation: str = ""
    name: str = ""
    host: str = ""
    worker: int | None = None
    revoked: float | None = None
    rights: tuple[Right, ...] = (Right.WORK,)


class KeyRecord(msgspec.Struct, frozen=True):
    """Contents of a register, as the broker stores them.

    Attributes:
        serials: Number of serials that were used, which is the next one.
        standing: Serial of the invitation that a broker makes at its start; another one once that was revoked.
    """

    invitations: tuple[Invitation, ...] = ()
    keys: tuple[EnrolledKey, ...] = ()
    serials: int = 1
    standing: int = 0


@dataclass(slots=True)
class KeyRegister:
    """Keys that one broker knows.

    `admits` is for any thread, all else for the broker's own. The broker stores `record` after each change, before it
    answers, and makes the register of its successor from it.
    """

    record: KeyRecord = field(default_factory=KeyRecord)
    _admitted: frozenset[str] = field(init=False, default=frozenset())
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
            invitation: Text of the key over whose connection it enrols.
            key: Key that enrols.
            now: Present time.
            name: Name of the process.
            host: Host of the process.

        Raises:
            NotEnrolled: The invitation has ended, was for another key, or the key was revoked.
        """
        found = self.invitation(invitation)
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
        used = [each for each in self.record.keys if each.invitation == invitation]
        if used and found.once:
            raise NotEnrolled(
                f"this invitation was for one machine, and {used[0].name} on host {used[0].host} has used it: "
                f"{_ANOTHER}"
            )
        if len(used) >= MOST_KEYS:
            raise NotEnrolled(f"{MOST_KEYS} keys have enrolled with this invitation, and no more may: {_ANOTHER}")
        made = EnrolledKey(key.text, now, invitation, name, host, found.worker, rights=found.rights)
        self._change(self.record.invitations, (*self.record.keys, made))
        return made

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

    def revoke(self, text: str, now: float) -> bool:
        """Refuse the key or invitation with this text from now on. Returns False if there is none.

        A connection that it has is not closed by this.
        """
        known, invitation = self.enrolled(text), self.invitation(text)
        if known is None and invitation is None:
            return False
        revoked = () if known is None else (msgspec.structs.replace(known, revoked=now),)
        others = (each for each in self.record.invitations if each.key != text)
        self._change(others, (*self._without(text), *revoked))
        if invitation is not None and invitation.serial == self.record.standing:
            serials = self.record.serials
            self.record = msgspec.structs.replace(self.record, standing=serials, serials=serials + 1)
        return True

    @property
    def newest_revocation(self) -> float:
        """Time from which on the key that was revoked last is refused; 0 if none was."""
        return max((each.revoked or 0.0 for each in self.record.keys), default=0.0)

    def enrolled(self, text: str) -> EnrolledKey | None:
        """Return the key with this text, also one that was revoked; None if it has not enrolled."""
        return self._keys.get(text)

    def invitation(self, text: str) -> Invitation | None:
        """Return the invitation whose key has this text, None if there is none. It may have ended."""
        return next((each for each in self.record.invitations if each.key == text), None)

    def invites(self, text: str) -> bool:
        """Return True if this text is that of an invitation's key."""
        return self.invitation(text) is not None

    def _without(self, text: str) -> Iterable[EnrolledKey]:
        return (each for each in self.record.keys if each.key != text)

    def _change(
        self, invitations: Iterable[Invitation], keys: Iterable[EnrolledKey], serials: int | None = None
    ) -> None:
        """Replace the record, and then who is admitted, in one instant for the thread that asks."""
        serials = self.record.serials if serials is None else serials
        self.record = KeyRecord(tuple(invitations), tuple(keys), serials, self.record.standing)
        self._keys = {each.key: each for each in self.record.keys}  # each message looks up its sender's
        working = (each.key for each in self.record.keys if each.revoked is None)
        self._admitted = frozenset((*(each.key for each in self.record.invitations), *working))
