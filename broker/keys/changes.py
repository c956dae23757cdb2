"""Changes of a broker's keys, as its operator wants: an invitation, a key to admit, a key to revoke, other parties.

In a run with parties, their keys alone have places, and are as the plan lists them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from stageline.broker.errors import BadKey

from .pairs import PublicKey
from .parties import Parties, differences
from .register import EnrolledKey, Invitation, KeyRegister, Right

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="key-change", tag_field="is"):
    """Change of its keys that a broker is to make. One that comes twice has the effect of one, but for an invitation.

    Attributes:
        what: Kind of the change.
        key: Text of the key to admit or revoke; of an invitation's, to revoke.
        name: Name for people.
        worker: Place that the key, or those that enrol, may have; None: any, or as before.
        rights: Permissions; none: to work, or as before.
        once: True for an invitation for one key.
        seconds: Time for which an invitation is good; None: as long as the run.
        successors: True to revoke what has enrolled with the key as well, and with that.
    """

    what: Literal["invite", "admit", "revoke", "reload"]
    key: _Name = ""
    name: _Name = ""
    worker: _Index | None = None
    rights: tuple[Right, ...] = ()
    once: bool = False
    seconds: float | None = None
    successors: bool = False


class Reloaded(msgspec.Struct, frozen=True):
    """Parties as the plan lists them now.

    Attributes:
        parties: The parties.
        changes: Texts of what has changed.
    """

    parties: Parties
    changes: tuple[str, ...]


class KeyChangeFailed(Exception):
    """Error that a change cannot be made; its text is for the operator."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Effect of a change.

    Attributes:
        about: Invitation, key or parties that the change is about.
        revoked: Texts of the keys and invitations that were revoked.
    """

    about: "Invitation | EnrolledKey | Reloaded"
    revoked: tuple[str, ...] = ()


def carry_out(
    wanted: KeyChange,
    register: KeyRegister,
    invitation_key: Callable[[int], PublicKey],
    now: float,
    listed: Callable[[], Parties] = tuple,
) -> Changed:
    """Change the register as `wanted` says.

    Args:
        wanted: Change that the operator wants.
        register: Keys of the broker. Store its record before the change is answered.
        invitation_key: Returns the public key of the invitation with a serial.
        now: Present time, in seconds since the epoch.
        listed: Reads the parties of the plan again. Raises `KeyChangeFailed`.

    Raises:
        KeyChangeFailed: There is no such key, or the plan's parties do not allow it.
    """
    match wanted.what:
        case "invite":
            _demand_no_place(wanted, register)
            return Changed(_invite(wanted, register, invitation_key, now))
        case "admit":
            try:
                key = PublicKey.parse(wanted.key)
            except BadKey as error:
                raise KeyChangeFailed(str(error)) from error
            _demand_no_party(wanted, register)
            return Changed(register.admit(key, now, name=wanted.name, worker=wanted.worker, rights=wanted.rights))
        case "revoke":
            found = register.enrolled(wanted.key) or register.invitation(wanted.key)
            if found is None:
                raise KeyChangeFailed(
                    f"{wanted.key} is neither a key that has enrolled nor an invitation; `stageline keys ls` lists them"
                )
            return Changed(found, _revoke(found, wanted, register, invitation_key, now))
        case "reload":
            return _reload(register, listed, now)


def _reload(register: KeyRegister, listed: Callable[[], Parties], now: float) -> Changed:
    """Take over the parties that the plan lists now. Raises `KeyChangeFailed`."""
    before, parties = register.record.parties, listed()
    if bool(before) != bool(parties):
        raise KeyChangeFailed(
            f"the plan has {'' if parties else 'no '}parties now, and the run began {'with' if before else 'without'}: "
            "whose keys protect its queues changes with a new run alone"
        )
    changes = tuple(differences(parties, before))
    return Changed(Reloaded(parties, changes), register.list_parties(parties, now) if changes else ())


def _demand_no_place(wanted: KeyChange, register: KeyRegister) -> None:
    """Raise `KeyChangeFailed` if the change gives a place in a run in which the plan's parties alone have places."""
    works = Right.WORK in (wanted.rights or (Right.WORK,)) or wanted.worker is not None
    if register.record.parties and works:
        names = ", ".join(each.name for each in register.record.parties)
        raise KeyChangeFailed(
            f"the places of this run are its parties' ({names}), by the keys that the plan lists: write another key "
            "into [parties.NAME] on every side, then `stageline keys reload`. Who is to watch gets --right look"
        )


def _demand_no_party(wanted: KeyChange, register: KeyRegister) -> None:
    """Raise `KeyChangeFailed` if a change that admits a key says what the plan has to say."""
    known = register.enrolled(wanted.key)
    if known is None or not known.party:
        _demand_no_place(wanted, register)
    elif not register.is_listed(known.key):
        raise KeyChangeFailed(
            f"{wanted.key} was a key of party {known.party}, which the plan does not list any more: write it into "
            f"[parties.{known.party}] on every side, then `stageline keys reload`"
        )
    elif wanted.rights or wanted.worker is not None or wanted.name:
        raise KeyChangeFailed(
            f"{wanted.key} is a key of party {known.party}, whose workers and rights the plan tells: change "
            f"[parties.{known.party}] on every side, then `stageline keys reload`"
        )


def _revoke(
    found: Invitation | EnrolledKey,
    wanted: KeyChange,
    register: KeyRegister,
    invitation_key: Callable[[int], PublicKey],
    now: float,
) -> tuple[str, ...]:
    """Revoke; return the texts of what was. A standing invitation that ends with a key has another in its place."""
    standing = register.standing
    texts = register.revoke(found.key, now, successors=wanted.successors)
    if standing is not None and standing is not found and standing.key in texts:
        serial = register.record.standing
        register.invite(msgspec.structs.replace(standing, key=invitation_key(serial).text, serial=serial))
    return texts


def _invite(
    wanted: KeyChange, register: KeyRegister, invitation_key: Callable[[int], PublicKey], now: float
) -> Invitation:
    serial = register.record.serials
    made = Invitation(
        invitation_key(serial).text,
        None if wanted.seconds is None else now + wanted.seconds,
        wanted.once,
        wanted.name,
        wanted.worker,
        serial,
        wanted.rights or (Right.WORK,),
    )
    register.invite(made)
    return made
