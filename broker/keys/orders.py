"""Orders of a broker's operator about its keys: another invitation, a key to admit, a key to revoke, other parties.

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


class KeyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="key-order", tag_field="is"):
    """Order to a broker about its keys. An order that comes twice has the effect of one, but for an invitation.

    Attributes:
        what: Kind of the order.
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


class KeyOrderFailed(Exception):
    """Error that an order cannot be carried out; its text is for the operator."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Effect of an order.

    Attributes:
        about: Invitation, key or parties that the order is about.
        revoked: Texts of the keys and invitations that were revoked.
    """

    about: "Invitation | EnrolledKey | Reloaded"
    revoked: tuple[str, ...] = ()


def carry_out(
    order: KeyOrder,
    register: KeyRegister,
    invitation_key: Callable[[int], PublicKey],
    now: float,
    listed: Callable[[], Parties] = tuple,
) -> Changed:
    """Change the register as `order` says.

    Args:
        order: Order of the operator.
        register: Keys of the broker. Store its record before the order is answered.
        invitation_key: Returns the public key of the invitation with a serial.
        now: Present time, in seconds since the epoch.
        listed: Reads the parties of the plan again. Raises `KeyOrderFailed`.

    Raises:
        KeyOrderFailed: There is no such key, or the plan's parties do not allow it.
    """
    match order.what:
        case "invite":
            _demand_no_place(order, register)
            return Changed(_invite(order, register, invitation_key, now))
        case "admit":
            try:
                key = PublicKey.parse(order.key)
            except BadKey as error:
                raise KeyOrderFailed(str(error)) from error
            _demand_no_party(order, register)
            return Changed(register.admit(key, now, name=order.name, worker=order.worker, rights=order.rights))
        case "revoke":
            found = register.enrolled(order.key) or register.invitation(order.key)
            if found is None:
                raise KeyOrderFailed(
                    f"{order.key} is neither a key that has enrolled nor an invitation; `stageline keys ls` lists them"
                )
            return Changed(found, _revoke(found, order, register, invitation_key, now))
        case "reload":
            return _reload(register, listed, now)


def _reload(register: KeyRegister, listed: Callable[[], Parties], now: float) -> Changed:
    """Take over the parties that the plan lists now. Raises `KeyOrderFailed`."""
    before, parties = register.record.parties, listed()
    if bool(before) != bool(parties):
        raise KeyOrderFailed(
            f"the plan has {'' if parties else 'no '}parties now, and the run began {'with' if before else 'without'}: "
            "whose keys protect its queues changes with a new run alone"
        )
    changes = tuple(differences(parties, before))
    return Changed(Reloaded(parties, changes), register.list_parties(parties, now) if changes else ())


def _demand_no_place(order: KeyOrder, register: KeyRegister) -> None:
    """Raise `KeyOrderFailed` if the order gives a place in a run in which the plan's parties alone have places."""
    works = Right.WORK in (order.rights or (Right.WORK,)) or order.worker is not None
    if register.record.parties and works:
        names = ", ".join(each.name for each in register.record.parties)
        raise KeyOrderFailed(
            f"the places of this run are its parties' ({names}), by the keys that the plan lists: write another key "
            "into [parties.NAME] on every side, then `stageline keys reload`. Who is to watch gets --right look"
        )


def _demand_no_party(order: KeyOrder, register: KeyRegister) -> None:
    """Raise `KeyOrderFailed` if an order to admit a key says what the plan has to say."""
    known = register.enrolled(order.key)
    if known is None or not known.party:
        _demand_no_place(order, register)
    elif not register.is_listed(known.key):
        raise KeyOrderFailed(
            f"{order.key} was a key of party {known.party}, which the plan does not list any more: write it into "
            f"[parties.{known.party}] on every side, then `stageline keys reload`"
        )
    elif order.rights or order.worker is not None or order.name:
        raise KeyOrderFailed(
            f"{order.key} is a key of party {known.party}, whose workers and rights the plan tells: change "
            f"[parties.{known.party}] on every side, then `stageline keys reload`"
        )


def _revoke(
    found: Invitation | EnrolledKey,
    order: KeyOrder,
    register: KeyRegister,
    invitation_key: Callable[[int], PublicKey],
    now: float,
) -> tuple[str, ...]:
    """Revoke; return the texts of what was. A standing invitation that ends with a key has another in its place."""
    standing = register.standing
    texts = register.revoke(found.key, now, successors=order.successors)
    if standing is not None and standing is not found and standing.key in texts:
        serial = register.record.standing
        register.invite(msgspec.structs.replace(standing, key=invitation_key(serial).text, serial=serial))
    return texts


def _invite(
    order: KeyOrder, register: KeyRegister, invitation_key: Callable[[int], PublicKey], now: float
) -> Invitation:
    serial = register.record.serials
    made = Invitation(
        invitation_key(serial).text,
        None if order.seconds is None else now + order.seconds,
        order.once,
        order.name,
        order.worker,
        serial,
        order.rights or (Right.WORK,),
    )
    register.invite(made)
    return made
