"""The broker without its sockets: a message comes in, is decided on and stored, and messages go out.

    receive(message)  is it genuine? Then:
    handle(message)   Hello: registration; Report: reports; Exited, Failed, Goodbye: supervision;
                      StopRun, Finished: shutdown; Ask: queries
    tick(now)         restart, or supervision, shutdown, registration and trims

The table in `state.py` gives the run's states. There is no clock here: every `now` is passed in, in seconds since the
epoch, and never goes back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stageline.broker.control.channel import Envelope
from stageline.broker.control.messages import (
    Answer,
    Ask,
    Assigned,
    Declined,
    Exited,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Refused,
    Report,
    Standby,
    StopRun,
    ToBroker,
)
from stageline.broker.control.protocol import MessageSeal, RunKeys, SealedMessage, Serials, encode
from stageline.broker.control.store import Store
from stageline.broker.keys.orders import KeyOrder
from stageline.broker.ledger.registry import Registry
from stageline.pipeline.errors import ExitCode

from . import place_keys, queries, records, registration, reports, restart, shutdown, supervision
from .ordering import Ordering
from .queries import NO_KEYS
from .run import Resumption, RunConfig, RunPhase
from .state import Life, Outgoing, RunEvent

_REMEMBERED = 64  # newest serials of the control secret: those of two supervisors, one after the other, may mix
_KEPT = 10_000  # newest addresses of workers: a worker that connects again has another one
TRIM_EVERY = 0.05  # seconds between two announcements
QUESTIONS = 20  # of strangers that are answered in a turn: an answer can be long, and takes a while
AWAY = 0.5  # seconds between two ticks from which on the broker counts as having been away, however short the lease


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
        StopRun, Exited, KeyOrder                                       sealed with the run's control secret
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
            case StopRun() | Exited() | KeyOrder():
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


class Reception(NamedTuple):
    """The messages that follow from a received message, with True if its sender is to be trusted.

    A sender is `trusted` if it has proven who it is, was given a place, or stands by for one.
    """

    outgoing: list[Outgoing]
    trusted: bool


class Coordinator:
    """A maker of the broker's decisions for one run.

    Everything that must survive a crash is stored before it is sent. Raises `StoreUnusable` if storing fails.
    """

    def __init__(self, config: RunConfig, store: Store, run: str, now: float) -> None:
        """Restore the run from its records, and begin or resume it.

        Args:
            config: The broker's part of the plan.
            store: The run's records, from which the run goes on.
            run: The run's id.
            now: Seconds since the epoch.
        """
        stored = store.load()
        self.run = records.restored(run, config, store, stored, now)
        place_keys.catch_up(self.run, now)
        self.ordering = None if config.schedule_memory is None else Ordering()
        self.is_interrupted = False  # a person has stopped the run before its end
        self._authenticity = Authenticity(self.run.keys, self.run.registry, adopted=self.run.adopted)
        self.is_proven = self._authenticity.is_proven
        self._strangers: set[bytes] = set()  # who have said something in this turn, and proven nothing
        self._questions = 0  # theirs
        self._trimmed, self._trimmed_at = 0, now
        self._ticked = now
        if (outcome := self.run.outcome) is not None:
            finished = outcome.phase is RunPhase.FINISHED
            self.run.lifecycle.move(RunEvent.ALL_FINISHED if finished else RunEvent.FAILURE)
            records.recall_steps(self.run, stored.facts)
        else:
            restart.begin(self.run, Resumption.stored_in(stored.facts), now)
            self._start_if_all_present()

    @property
    def stop_requested(self) -> bool:
        """True if the run is to stop, or its broker to exit."""
        return self.run.stopping.request is not None or self.run.lifecycle.state is Life.DISMISSED

    def receive(self, sender: bytes, sealed: SealedMessage, now: float) -> Reception:
        """Decide on a received message if it is genuine.

        A sender that proves nothing is heard once in a turn.

        Args:
            sender: The sender's address on the channel.
            sealed: The message with its seal.
            now: Seconds since the epoch.
        """
        judged = self._authenticity.judge(sealed)
        if judged.refusal:
            self.run.events.count("forged", f"refused: {judged.refusal}")
        if not (judged.proven or self._hears(sender, sealed.message)):
            return Reception([], trusted=False)
        if judged.refusal:
            answer = refusal_to(sealed)
            return Reception([] if answer is None else [(sender, answer)], trusted=False)
        if judged.proven and isinstance(sealed.message, Report | Finished | Failed | Goodbye | Hello):
            self._authenticity.note_proven(sender, sealed.message.incarnation)
        outgoing = self.handle(sender, sealed.message, now)
        placed = any(to == sender and isinstance(message, Assigned | Standby) for to, message in outgoing)
        return Reception(outgoing, trusted=judged.proven or placed)

    def envelopes(self, outgoing: Iterable[Outgoing], now: float) -> list[Envelope]:
        """Return `outgoing` as bytes, sealed for recipients that can verify a seal."""
        return [self._authenticity.envelope(each, now) for each in outgoing]

    def handle(self, sender: bytes, message: ToBroker, now: float) -> list[Outgoing]:
        """Decide on a genuine message, and return the messages to send, with their recipients.

        Args:
            sender: The sender's address on the channel.
            message: The message.
            now: Seconds since the epoch.
        """
        run = self.run
        run.outgoing.clear()
        match message:
            case Report() | Finished() | Failed() | Goodbye():
                self._handle_member(sender, message, now)
            case Hello():
                registration.answer(run, message, sender, now)
                self._start_if_all_present()
            case Declined(host, pid, reason):
                run.events.count("declined", f"process {pid} on host {host} does not join: {reason}")
                run.note_declined(host, pid, reason)
                run.outgoing.append((sender, Answer("declined/1", {})))
            case Exited():
                supervision.note_exit(run, message, now)
            case StopRun():
                self.is_interrupted = self.is_interrupted or (run.outcome is None and not message.over)
                shutdown.stop(run, message, now)
            case Ask():
                run.outgoing.append(self.answer(sender, message, now))
            case KeyOrder():  # the gate of a broker with keys carries it out
                run.outgoing.append((sender, Refused(NO_KEYS, code=ExitCode.USAGE)))
        return list(run.outgoing)

    def answer(self, sender: bytes, ask: Ask, now: float) -> Outgoing:
        """Return the answer to a query of `sender`, with its recipient.

        A query may come in the middle of another message, while the store waits. `now` is in seconds since the epoch.
        """
        return sender, queries.answer(self.run, ask, now)

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due by time, and return the messages to send, with their recipients.

        Call it several times a second, after all messages that have arrived were handled.
        """
        run = self.run
        run.outgoing.clear()
        run.events.turn(now)
        self._strangers.clear()
        self._questions = 0
        away, self._ticked = now - self._ticked, now
        if away > max(run.config.lease / 2, AWAY):
            run.events.warnings.append(f"the broker itself was away for {away:.1f} s; every lease starts over")
            for member in run.registry.members.values():
                member.restart_lease(now)
            run.replacements.restart_deadlines(now)
        match run.lifecycle.state:
            case Life.RECONCILING:
                if restart.reconcile(run, now):
                    self._start_if_all_present()
                    registration.assign_again(run)
            case Life.RECONNECTING:
                self._reconnect(now)
            case Life.STOPPED | Life.FINISHED | Life.FAILED | Life.DISMISSED:
                supervision.mark_lost(run, now)
                self._order(now)  # workers that are to finish a step may wait for its order
            case _:
                self._supervise(now)
        return list(run.outgoing)

    def keep_observation(self, now: float) -> None:
        """Store what only this process knows, for queries after its end. Call it about once a second."""
        records.keep_observation(self.run, now)

    def _hears(self, sender: bytes, message: ToBroker) -> bool:
        """Return True if a message without proof is heard in this turn. Its sender repeats what matters."""
        if sender in self._strangers:
            return False
        self._strangers.add(sender)
        self._questions += isinstance(message, Ask)
        return self._questions <= QUESTIONS or not isinstance(message, Ask)

    def _start_if_all_present(self) -> None:
        if self.run.lifecycle.state is Life.WAITING and self.run.registry.begun:
            self.run.lifecycle.move(RunEvent.ALL_PRESENT)
            if self.stop_requested:  # before the records were lost
                self.run.lifecycle.move(RunEvent.STOP_REQUESTED)

    def _reconnect(self, now: float) -> None:
        run = self.run
        supervision.check_partings(run, now)
        if run.lifecycle.state is Life.RECONNECTING:  # a failure may have ended the run
            restart.reconnect(run, now)
            self._start_if_all_present()
        if run.lifecycle.state is Life.RECONNECTING:
            shutdown.stop_if_due(run, now)

    def _supervise(self, now: float) -> None:
        run = self.run
        shutdown.note_progress(run, now)
        supervision.check(run, now)
        shutdown.check_finished(run, now)
        if run.lifecycle.state is Life.CHOOSING_CHECKPOINT:
            restart.choose_checkpoint(run, now)
        shutdown.stop_if_due(run, now)
        if not run.lifecycle.over:
            registration.promote(run, now)
            supervision.check_empty_places(run, now)
            self._trim(now)
            self._order(now)

    def _order(self, now: float) -> None:
        if self.ordering is not None:
            self.ordering.tick(self.run, now)

    def _handle_member(self, sender: bytes, message: registration.FromMember, now: float) -> None:
        run = self.run
        member = run.registry.current(message.incarnation)
        if isinstance(message, Report) and member and (why := reports.newer_knowledge(run, message, member)):
            restart.lose_records(run, why, now)
        if member is None or run.lifecycle.state is Life.RECONCILING:
            registration.answer_unknown(run, message, sender)
            return
        member.note_contact(sender, now)
        if member.parting is not None and isinstance(message, Report | Finished):
            supervision.note_alive(run, member)
        match message:
            case Report():
                steps = reports.ingest(run, member, message, now)
                if self.ordering is not None and member.report is message:
                    self.ordering.note(run, member, message, steps, now)
            case Finished():
                shutdown.note_finished(run, member, message, now)
            case Failed() | Goodbye():
                supervision.note_parting(run, member, message, now)

    def _trim(self, now: float) -> None:
        floor = self.run.trimmable
        due = floor > self._trimmed and not self.run.lifecycle.over and now - self._trimmed_at >= TRIM_EVERY
        if due and (announcement := self.run.announcement(floor)) is not None:
            self._trimmed, self._trimmed_at = floor, now
            self.run.broadcast(announcement)
