"""Facts that the commands `stageline keys` print with --json."""

import msgspec

from stageline.broker.keys.parties import Party
from stageline.broker.keys.register import EnrolledKey, Invitation, Right


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """A key file: its public key, and whether a passphrase encrypts the secret one."""

    key: str
    file: str
    encrypted: bool


class ListedInvitation(Invitation, frozen=True, kw_only=True):
    """An invitation that a broker knows.

    Attributes:
        key: Text of the public key.
        ends: Time from which on it is refused; None: with the run.
        once: True if one key alone may enrol with it.
        worker: Place that its holder may have; None for any.
        serial: Number of the invitation in the run.
        rights: Permissions of the keys that enrol with it.
        standing: True for the invitation of the line that the broker printed at its start.
    """

    standing: bool


class KnownKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that a run's broker knows.

    Attributes:
        broker: Public key of the broker.
        invitations: Keys with which others may enrol.
        keys: Keys that have enrolled, or were admitted.
        knocks: Keys that were refused lately, the newest last.
        parties: Parties of the plan.
    """

    run: str
    broker: str
    invitations: list[ListedInvitation]
    keys: list[EnrolledKey]
    knocks: list[str]
    parties: list[Party]


class AdmittedKey(EnrolledKey, frozen=True, kw_only=True):
    """A key that was admitted.

    Attributes:
        key: Text of the public key.
        since: Time at which it was admitted.
        worker: Place that it may have; None for any.
        rights: Its permissions.
        revoked_with: Other keys and invitations that this revoked: none.
        enrolled: Keys that have enrolled with it, and stay.
    """

    run: str
    revoked_with: list[str]
    enrolled: list[str]


class MadeInvitation(Invitation, frozen=True, kw_only=True):
    """An invitation that was made.

    Attributes:
        line: Line with which another machine joins the run.
        key: Text of the public key.
        ends: Time from which on it is refused; None: with the run.
        once: True if one key alone may enrol with it.
        worker: Place that its holder may have; None for any.
        serial: Number of the invitation in the run.
        rights: Permissions of the keys that enrol with it.
        revoked_with: Keys and invitations that this revoked: none.
        enrolled: Keys that have enrolled with it: none.
    """

    line: str
    run: str
    revoked_with: list[str]
    enrolled: list[str]


class PrintedLine(msgspec.Struct, frozen=True, kw_only=True):
    """The join line of a broker; beside it the invitation in it, unless the broker has parties or is yet to start.

    Attributes:
        line: Line with which another machine joins the run.
        key: Text of the public key.
        ends: Time from which on it is refused; None: with the run.
        once: True if one key alone may enrol with it.
        name: Name for people.
        worker: Place that its holder may have; None for any.
        serial: Number of the invitation in the run.
        rights: Permissions of the keys that enrol with it.
        standing: True for the invitation of the line that the broker printed at its start.
    """

    line: str
    run: str
    key: str | msgspec.UnsetType = msgspec.UNSET
    ends: float | msgspec.UnsetType | None = msgspec.UNSET
    once: bool | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    worker: int | msgspec.UnsetType | None = msgspec.UNSET
    serial: int | msgspec.UnsetType = msgspec.UNSET
    rights: list[Right] | msgspec.UnsetType = msgspec.UNSET
    standing: bool | msgspec.UnsetType = msgspec.UNSET


class RevokedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that had enrolled, or an invitation, that was revoked; `since` or `ends` tells which.

    Attributes:
        key: Text of the public key.
        name: Name for people.
        worker: Place that it could have; None for any.
        rights: The permissions that it had.
        revoked_with: Other keys and invitations that this revoked.
        enrolled: Keys that have enrolled with it, and stay.
        since: Time at which a key enrolled.
        invitation: Key that a key enrolled with; "" if a person has admitted it.
        host: Host of a key's process.
        revoked: Time at which a key was revoked before; None if it was not.
        party: Party whose key it was; "" for none.
        places: Places of that party.
        unlisted: True if the plan did not list the key any more.
        ends: Time at which an invitation would have ended; None: with the run.
        once: True for an invitation with which one key alone could enrol.
        serial: Number of an invitation.
    """

    run: str
    key: str
    name: str
    worker: int | None
    rights: list[Right]
    revoked_with: list[str]
    enrolled: list[str]
    since: float | msgspec.UnsetType = msgspec.UNSET
    invitation: str | msgspec.UnsetType = msgspec.UNSET
    host: str | msgspec.UnsetType = msgspec.UNSET
    revoked: float | msgspec.UnsetType | None = msgspec.UNSET
    party: str | msgspec.UnsetType = msgspec.UNSET
    places: list[int] | msgspec.UnsetType = msgspec.UNSET
    unlisted: bool | msgspec.UnsetType = msgspec.UNSET
    ends: float | msgspec.UnsetType | None = msgspec.UNSET
    once: bool | msgspec.UnsetType = msgspec.UNSET
    serial: int | msgspec.UnsetType = msgspec.UNSET


class ReloadedParties(msgspec.Struct, frozen=True, kw_only=True):
    """The parties that a broker has read again from its plan.

    Attributes:
        changes: Texts of what has changed.
        revoked: Keys that are refused from now on.
    """

    run: str
    parties: list[Party]
    changes: list[str]
    revoked: list[str]


class RotatedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was put in the place of another.

    Attributes:
        key: Public key of now.
        former: Public key of before.
        file: Key file.
        kept: File with the key of before.
        confirmed: Addresses of the brokers that have admitted the key.
        next: What is left to do, in words.
    """

    key: str
    former: str
    file: str
    kept: str
    confirmed: list[str]
    next: list[str]
