"""Entrance to a broker: who may connect, and what each may say.

address beyond this machine         keys, a register in the broker's store, a gate, an audit log
the same in a run with parties      their keys are admitted as the plan lists them, and no other gets a place
the same with broker.insecure       everything that reaches the broker is let in, with a warning
any other address                   likewise, without one
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from time import time

import msgspec
import structlog

from stageline.broker.control.store import Store
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.gate import KEYS, Gatekeeper, KeyEvent, KeyGate, OpenGate
from stageline.broker.keys.access import Access
from stageline.broker.keys.admission import NotReady, ServerKeys
from stageline.broker.keys.join_line import split_key
from stageline.broker.keys.pairs import KeyPair, PublicKey, invitation_secret, invite_pair, operator_pair
from stageline.broker.keys.parties import Parties
from stageline.broker.keys.register import Invitation, KeyRecord, KeyRegister, Right
from stageline.pipeline.addresses import masked, needs_keys
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.retry import reason_of
from stageline.workers.keys.keyring import own_address, own_join_line, own_pair

INVITED = 24 * 3600.0  # seconds for which the invitation is good that a broker makes at its start
LOADING = 2.0  # seconds that a peer waits for the register; one that is told to dial again does so after 5 s
LOG, FORMER_LOG = "keys.log", "keys.log.1"
MOST_LOGGED = 8 * 2**20  # bytes of keys.log, after which it becomes the former one, in the place of an older one

log = structlog.get_logger()


@dataclass(slots=True)
class Doorkeeper:
    """Admission of a broker, which may be asked before the register is loaded: then it waits for that.

    Attributes:
        operator: Key of the operator, which is admitted always.
        register: Keys that the broker knows; None before it knows them.
    """

    operator: PublicKey
    register: KeyRegister | None = None
    _loaded: Event = field(init=False, default_factory=Event)

    def admits(self, public: PublicKey) -> bool:
        """Return True if who has the secret of `public` may connect.

        Raises `NotReady` if the register is not loaded within `LOADING` seconds.
        """
        if public == self.operator:
            return True
        self._loaded.wait(LOADING)
        if self.register is None:
            raise NotReady
        return self.register.admits(public)

    def has_revoked(self, public: PublicKey) -> bool:
        """Return True if the register has the key as one that was revoked."""
        return self.register is not None and self.register.has_revoked(public)

    def begin(self, register: KeyRegister) -> None:
        """Admit by `register` from now on."""
        self.register = register
        self._loaded.set()


@dataclass(frozen=True, slots=True)
class Entrance:
    """Entrance to a broker, of which the run is not known yet.

    Attributes:
        own: Pair by which peers know the broker; None: it has no keys.
        door: Admission to its address.
        insecure: True if other machines reach the broker, and it has no keys because its plan says so.
    """

    own: KeyPair | None
    door: Doorkeeper | None
    insecure: bool = False

    @classmethod
    def of(cls, plan: Plan, url: str, environment: Mapping[str, str]) -> "Entrance":
        """Return the entrance to a broker that is going to listen at `url`.

        Args:
            plan: Plan of the run.
            url: Address to listen at.
            environment: Environment of the process, which tells where the user's key is.

        Raises:
            KeyUnusable: The user's key file cannot be made or read.
        """
        if needs_keys(url, insecure=plan.broker.insecure):
            own = own_pair(environment)
            return cls(own, Doorkeeper(operator_pair(own).public))
        if insecure := plan.broker.insecure and needs_keys(url):
            log.warning(
                "broker.insecure = true: every process that reaches the broker can read and change the run",
                address=masked(url),
            )
        return cls(None, None, insecure)

    @property
    def keys(self) -> ServerKeys | None:
        """Keys of the broker's channel."""
        return None if self.own is None or self.door is None else ServerKeys(self.own, self.door)

    def open(self, store: Store, run: str, *, supervised: bool, parties: Parties = ()) -> "OpenEntrance":
        """Begin to let in who is in the register, and invite others for a day; if supervised, as long as the run.

        In a run with parties these are let in, and none is invited to work.

        Args:
            store: Store of the run, which has the register.
            run: Id of the run.
            supervised: True if another process has started the broker, and starts it again.
            parties: Parties of the plan.
        """
        if self.own is None or self.door is None:
            return OpenEntrance(Access(insecure=self.insecure), store, run)
        found = store.load().facts.get(KEYS)
        register = KeyRegister(KeyRecord() if found is None else msgspec.convert(found, KeyRecord))
        own, serial = self.own, register.record.standing
        register.drop(lambda each: each.key != invitation_key(own, run, each.serial).text)  # of a former key
        register.list_parties(parties, STEADY.time())
        if parties:
            register.drop(lambda each: Right.WORK in each.rights)
        else:
            ends = None if supervised else STEADY.time() + INVITED
            register.invite(Invitation(invitation_key(own, run, serial).text, ends, serial=serial))
        store.put(KEYS, msgspec.to_builtins(register.record))
        self.door.begin(register)
        return OpenEntrance(Access(register, self.own.public.text), store, run, self.own)


@dataclass(frozen=True, slots=True)
class OpenEntrance:
    """Entrance to the broker of a run.

    Attributes:
        access: Who may speak.
        store: Store of the run.
        run: Id of the run.
        own: Pair by which peers know the broker; None: it has no keys.
    """

    access: Access
    store: Store
    run: str
    own: KeyPair | None = None

    def gate(self, core: Coordinator, listed: Callable[[], Parties] = tuple) -> Gatekeeper:
        """Return the gate before the coordinator.

        Args:
            core: The coordinator.
            listed: Reads the parties of the plan again. Raises `KeyChangeFailed`.
        """
        register = self.access.register
        if self.own is None or register is None:
            return OpenGate()
        invited = partial(invitation_key, self.own, self.run)
        operator = operator_pair(self.own).public
        keys, events = core.run.keys, core.run.events
        return KeyGate(register, self.store, keys, operator, invited, events, self.access, listed)

    def join_line(self, endpoint: str) -> str:
        """Return the line with which other machines join the broker at `endpoint`; "" if they need none.

        In a run with parties it has no secret: it is the broker's address, with its key.
        """
        if self.own is None or self.access.register is None:
            return ""
        if self.access.register.record.parties:
            return own_address(endpoint, os.environ)
        return own_join_line(split_key(endpoint)[0], self.run, os.environ, self.access.register.record.standing)


def invitation_key(own: KeyPair, run: str, serial: int) -> PublicKey:
    """Return the public key of an invitation.

    Args:
        own: Pair of the broker.
        run: Id of the run.
        serial: Number of the invitation.
    """
    return invite_pair(invitation_secret(own, run, serial)).public


class KeyLog:
    """Audit log of a broker: a line of JSON for each key that enrolled, was admitted, invited, revoked or refused."""

    def __init__(self, folder: Path) -> None:
        """Append to the log in the folder of a run, which this user alone may read."""
        self._path, self._former = folder / LOG, folder / FORMER_LOG
        self._told = False

    def note(self, events: Sequence[KeyEvent]) -> None:
        """Append lines, and log them for people. Says once if they cannot be written."""
        for event in events:
            if event.what == "reloaded":
                log.info(f"{event.detail} (here: the plan now, there: before)")
            elif event.what != "refused":
                whose = {"name": event.name, "host": event.host}
                log.info(f"key {event.what}", key=event.key, **{what: text for what, text in whose.items() if text})
        try:
            if events:
                with open(self._path, "ab", opener=partial(os.open, mode=0o600)) as file:
                    file.write(b"".join(_line(event) for event in events))
                    is_full = file.tell() >= MOST_LOGGED
                if is_full:
                    self._path.replace(self._former)
        except OSError as error:
            if not self._told:
                log.error("the log of keys is not written", reason=f"{self._path}: {reason_of(error)}")
            self._told = True


def _line(event: KeyEvent) -> bytes:
    return msgspec.json.encode({"at": time(), **{name: getattr(event, name) for name in event.__slots__}}) + b"\n"
