"""Access to a broker: the keys of those who may speak to it, as `status` and `stageline keys ls` show them."""

from dataclasses import dataclass

import msgspec

from .register import KeyRegister

Fact = dict[str, object]  # of JSON's own types


@dataclass(frozen=True, slots=True)
class Access:
    """Rule of one broker about who may speak to it.

    Without a register, every process that reaches the broker may.

    Attributes:
        register: Keys that the broker knows; None: it has no keys.
        broker: Text of the broker's own public key.
        insecure: True if other machines reach the broker, and it has no keys because its plan says so.
    """

    register: KeyRegister | None = None
    broker: str = ""
    insecure: bool = False

    @property
    def summary(self) -> Fact | None:
        """Short form for the status of a run; None for a broker that needs no keys."""
        if self.register is None:
            return {"insecure": True} if self.insecure else None
        admitted = [each for each in self.register.record.keys if each.revoked is None]
        parties = [{"name": each.name, "workers": list(each.places)} for each in self.register.record.parties]
        level = {"level": 2 if parties else 1, "parties": parties}
        return {"insecure": False, "admitted": len(admitted), "knocks": list(self.register.knocks), **level}

    def facts(self) -> Fact | None:
        """Return the invitations, the keys that have enrolled, and those that knocked in vain; None without keys."""
        if self.register is None:
            return None
        record = self.register.record
        return {
            "broker": self.broker,
            "invitations": [
                {**msgspec.to_builtins(each), "standing": each.serial == record.standing} for each in record.invitations
            ],
            "keys": [msgspec.to_builtins(each) for each in record.keys],
            "knocks": list(self.register.knocks),
            "parties": [msgspec.to_builtins(each) for each in self.register.record.parties],
        }


OPEN = Access()
"""Access to a broker that needs no keys."""
