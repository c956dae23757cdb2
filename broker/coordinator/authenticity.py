"""Authenticity of what comes to a broker: who has sealed it, and whether it has come before."""

from dataclasses import dataclass

from stageline.broker.control.channel import Envelope
from stageline.broker.control.leaves import LeaveWorker
from stageline.broker.control.messages import (
    Ask,
    Assigned,
    Declined,
    Exited,
    Hello,
    Refused,
    StopRun,
)
from stageline.broker.control.pauses import PauseRun
from stageline.broker.control.protocol import MessageSeal, RunKeys, SealedMessage, Serials, encode
from stageline.broker.keys.changes import KeyChange
from stageline.broker.ledger.registry import Registry
from stageline.pipeline.errors import ExitCode

from .state import Outgoing

_REMEMBERED = 64  # newest serials of the control secret: those of two supervisors, one after the other, may mix
_KEPT = 10_000  # newest addresses of workers: a worker that connects again has another one


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict on a message's seal.

    Attributes:
        refusal: The reason why the message must not be handled; "" if it may be.
        proven: True if the sender has the secret.
    """

    refusal: str = ""
    proven: bool = False


_OPEN, _PROVEN = Judgement(), Judgement(proven=True)


class Authenticity:
    """The seals of one broker of a run: it judges the seals of received messages, and seals what the broker sends.

        Report, Failed, Finished, Goodbye, Hello with an incarnation    sealed with the incarnation's secret
        StopRun, PauseRun, LeaveWorker, Exited, KeyChange               sealed with the run's control secret
        Hello without an incarnation, Declined, Ask                     from anyone; an Ask may be sealed

    A sealed message counts once: one that is sent again has an old serial. Serials begin at the time, above those of a
    broker before this one.

    A broker whose records are lost has another key, and cannot check the secrets that its predecessor gave. It believes
    the Hellos of workers that remember the run until the run has begun under it, if the run's id was given to it. A
    broker that has its records does not, nor does a broker of a new run.

    A message of the broker is sealed with the secret of the incarnation that its recipient has proven. A process
    without a place has no secret yet, and a command needs none: messages to them are not sealed.
    """

    def __init__(self, keys: RunKeys, registry: Registry, *, adopted: bool) -> None:
        """Start with no message judged.

        Args:
            keys: The run's secrets.
            registry: The members of the run.
            adopted: True if the run's id was given to this broker: its records may be lost.
        """
        self._keys = keys
        self._registry = registry
        self._adopted = adopted
        self._of_incarnations: dict[int, Serials] = {}  # of genuine messages only: as many as there were workers
        self._of_control = Serials(_REMEMBERED)
        self._serial = 0
        self._addresses: dict[bytes, int] = {}  # the incarnation that has proven to speak from each

    def judge(self, sealed: SealedMessage) -> Judgement:
        """Return the verdict on a message. Call it once for each: a second call takes it for a repeated message."""
        match sealed.message:
            case Ask():
                return Judgement(proven=not self._control(sealed).refusal)
            case StopRun() | PauseRun() | LeaveWorker() | Exited() | KeyChange():
                return self._control(sealed)
            case Hello(incarnation=0) | Declined():
                return _OPEN
            case Hello() as hello if self._is_vouched(hello):
                return _OPEN
            case message:
                return self._member(sealed, message.incarnation)

    def is_proven(self, incarnation: int, seal: MessageSeal) -> bool:
        """Return True if the worker of `incarnation` made the seal, now or before."""
        return seal.is_of(self._keys.of_incarnation(incarnation))

    def note_proven(self, sender: bytes, incarnation: int) -> None:
        """Note that the worker of `incarnation` has proven that it speaks from the address `sender`."""
        self._addresses[sender] = incarnation
        if len(self._addresses) > _KEPT:
            del self._addresses[next(iter(self._addresses))]

    def envelope(self, outgoing: Outgoing, now: float) -> Envelope:
        """Return the message as bytes, with its recipient. `now` is in seconds since the epoch."""
        recipient, message = outgoing
        if isinstance(message, Assigned):  # it brings the secret, which its recipient has from now on
            self.note_proven(recipient, message.incarnation)
        incarnation = self._addresses.get(recipient)
        if incarnation is None:
            return recipient, encode(message)
        self._serial = max(self._serial + 1, int(now * 1e9))
        return recipient, encode(message, self._keys.of_incarnation(incarnation), self._serial)

    def _control(self, sealed: SealedMessage) -> Judgement:
        name = type(sealed.message).__name__
        if not sealed.seal.is_of(self._keys.of_control):
            return Judgement(f"{name} from an unknown peer without the run's secret")
        if not self._of_control.is_new(sealed.seal.serial):
            return Judgement(f"{name} that has come before")
        return _PROVEN

    def _member(self, sealed: SealedMessage, incarnation: int) -> Judgement:
        name = type(sealed.message).__name__
        if not self.is_proven(incarnation, sealed.seal):
            return Judgement(f"{name} of incarnation {incarnation} from an unknown peer without its secret")
        if not self._of_incarnations.setdefault(incarnation, Serials()).is_new(sealed.seal.serial):
            return Judgement(f"{name} of incarnation {incarnation} that has come before")
        return _PROVEN

    def _is_vouched(self, hello: Hello) -> bool:
        """Return True if the records that could prove the worker are lost, and it may be believed.

        Once places are given again, it may ask for its new incarnation until it has used that.
        """
        registry = self._registry
        if not self._adopted or hello.memory is None or registry.current(hello.incarnation) is not None:
            return False
        renewed = registry.renewed(hello.incarnation)
        lost = not (registry.begun or registry.since)  # a run that was restarted as a whole has records, and their key
        return lost or (renewed is not None and not renewed.aware and renewed.token == hello.token)


def refusal_to(sealed: SealedMessage) -> Refused | None:
    """Return the answer to the sender of a refused message, or None for no answer.

    Only a Hello is answered: its worker learns that it must be restarted.
    """
    match sealed.message:
        case Hello(incarnation=incarnation, name=name):
            return Refused(
                f"this broker did not give incarnation {incarnation} to {name}, or not to this process: it cannot be "
                "proven. Start the worker again",
                code=ExitCode.FAILED,
            )
        case _:
            return None
