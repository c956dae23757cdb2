"""Orders of a broker's operator about its keys: another invitation, a key to admit, a key to revoke."""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from stageline.broker.errors import BadKey

from .pairs import PublicKey
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
    """

    what: Literal["invite", "admit", "revoke"]
    key: _Name = ""
    name: _Name = ""
    worker: _Index | None = None
    rights: tuple[Right, ...] = ()
    once: bool = False
    seconds: float | None = None


class KeyOrderFailed(Exception):
    """Error that an order cannot be carried out; its text is for the operator."""


def carry_out(
    order: KeyOrder, register: KeyRegister, invitation_key: Callable[[int], PublicKey], now: float
) -> Invitation | EnrolledKey:
    """Change the register as `order` says, and return the invitation or key that it is about.

    Args:
        order: Order of the operator.
        register: Keys of the broker. Store its record before the order is answered.
        invitation_key: Returns the public key of the invitation with a serial.
        now: Present time, in seconds since the epoch.

    Raises:
        KeyOrderFailed: There is no such key.
    """
    match order.what:
        case "invite":
            return _invite(order, register, invitation_key, now)
        case "admit":
            try:
                key = PublicKey.parse(order.key)
            except BadKey as error:
                raise KeyOrderFailed(str(error)) from error
            return register.admit(key, now, name=order.name, worker=order.worker, rights=order.rights)
        case "revoke":
            found = register.enrolled(order.key) or register.invitation(order.key)
            if found is None or not register.revoke(order.key, now):
                raise KeyOrderFailed(
                    f"{order.key} is neither a key that has enrolled nor an invitation; `stageline keys ls` lists them"
                )
            return found


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
