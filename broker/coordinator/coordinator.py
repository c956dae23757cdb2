"""The broker without its sockets: a message comes in, is decided on and stored, and messages go out.

    receive(message)  is it genuine? Then:
    handle(message)   Hello: registration; Report: reports; Exited, Failed, Goodbye: supervision;
                      StopRun, Finished: shutdown; PauseRun: pausing; LeaveWorker: leaving; Ask: queries
    tick(now)         restart, or supervision, shutdown, registration and trims

The table in `state.py` gives the run's states. There is no clock here: every `now` is passed in, in seconds since the
epoch, and never goes back.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from stageline.broker.control.channel import Envelope
from stageline.broker.control.leaves import LeaveWorker
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
from stageline.broker.control.pauses import PauseRun
from stageline.broker.control.peek import Peeked
from stageline.broker.control.protocol import SealedMessage
from stageline.broker.control.store import Store
from stageline.broker.keys.changes import KeyChange
from stageline.pipeline.errors import ExitCode

from . import (
    copying,
    leaving,
    pausing,
    peeks,
    place_keys,
    queries,
    records,
    registration,
    reports,
    restart,
    shutdown,
    supervision,
)
from .authenticity import Authenticity, refusal_to
from .kept_answer import KeptAnswer, unmeasured
from .ordering import Ordering
from .queries import NO_KEYS
from .run import Resumption, RunConfig, RunPhase
from .state import Life, Outgoing, RunEvent

TRIM_EVERY = 0.05  # seconds between two announcements
QUESTIONS = 20  # of strangers that are answered in a turn: an answer can be long, and takes a while
AWAY = 0.5  # seconds between two ticks from which on the broker counts as having been away, however short the lease


class Reception(NamedTuple):
    """The messages that follow from a received message, with True if its sender is to be trusted.

    A sender is `trusted` if it has proven who it is, was given a place, or stands by for one. `refusal` is the reason
    for which its message does not count, "" if it does.
    """

    outgoing: list[Outgoing]
    trusted: bool
    refusal: str = ""


class Coordinator:
    """A maker of the broker's decisions for one run.

    Everything that must survive a crash is stored before it is sent. Raises `StoreUnusable` if storing fails.
    """

    def __init__(
        self, config: RunConfig, store: Store, run: str, now: float, spent: Callable[[], float] = unmeasured
    ) -> None:
        """Restore the run from its records, and begin or resume it.

        Args:
            config: The broker's part of the plan.
            store: The run's records, from which the run goes on.
            run: The run's id.
            now: Seconds since the epoch.
            spent: Returns the processor's time that this thread has used so far, in seconds: an answer that takes long
                is given again for a while. Without it, no answer is.
        """
        stored = store.load()
        self.run = replace(records.restored(run, config, store, stored, now), slowness=KeptAnswer(spent))
        place_keys.catch_up(self.run, now)
        self.ordering = None if config.schedule_memory is None else Ordering()
        self.is_interrupted = False  # a person has stopped the run before its end
        self._authenticity = Authenticity(self.run.keys, self.run.registry, adopted=self.run.adopted)
        self.is_proven = self._authenticity.is_proven
        self._strangers: set[bytes] = set()  # who have said something in this turn, and proven nothing
        self._questions = 0  # theirs
        self._trimmed, self._trimmed_at = 0, now
        self._ticked = self._told_pause = now
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
            return Reception([], trusted=False, refusal=judged.refusal)
        if judged.refusal:
            answer = refusal_to(sealed)
            return Reception([] if answer is None else [(sender, answer)], trusted=False, refusal=judged.refusal)
        if judged.proven and isinstance(sealed.message, Report | Finished | Failed | Goodbye | Peeked | Hello):
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
            case Report() | Finished() | Failed() | Goodbye() | Peeked():
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
            case PauseRun():
                pausing.request(run, sender, message, now)
            case LeaveWorker():
                leaving.request(run, sender, message, now)
            case Ask(what) if what in peeks.KINDS:
                peeks.pass_on(run, sender, message, now)
            case Ask():
                run.outgoing.append(self.answer(sender, message, now))
            case KeyChange():  # the gate of a broker with keys carries it out
                run.outgoing.append((sender, Refused(NO_KEYS, code=ExitCode.USAGE)))
        pausing.tell_before_peers(run)
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
        peeks.expire(run, now)
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
                self._pause(now)
        pausing.tell_before_peers(run)
        return list(run.outgoing)

    def keep_observation(self, now: float, behind: float = 0.0) -> None:
        """Store what only this process knows, for queries after its end. Call it about once a second.

        Args:
            now: Seconds since the epoch.
            behind: Seconds by which that is behind the system's clock, which was set since the broker began.
        """
        records.keep_observation(self.run, now, behind)

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
            copying.tick(run, now)
            self._order(now)

    def _pause(self, now: float) -> None:
        leaving.tick(self.run, now)
        pausing.tick(self.run, now)
        if now - self._told_pause >= pausing.AGAIN:
            self._told_pause = now
            pausing.tell_again(self.run)
            leaving.tell_again(self.run, now)

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
                if member.report is message:  # else it was not plausible
                    pausing.note(run, message, now)
                if self.ordering is not None and member.report is message:
                    self.ordering.note(run, member, message, steps, now)
            case Finished():
                shutdown.note_finished(run, member, message, now)
            case Peeked():
                peeks.note_answer(run, member, message)
            case Failed() | Goodbye():
                supervision.note_parting(run, member, message, now)

    def _trim(self, now: float) -> None:
        floor = self.run.trimmable
        due = floor > self._trimmed and not self.run.lifecycle.over and now - self._trimmed_at >= TRIM_EVERY
        if due and (announcement := self.run.announcement(floor)) is not None:
            self._trimmed, self._trimmed_at = floor, now
            self.run.broadcast(announcement)
