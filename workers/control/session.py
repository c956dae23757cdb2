"""The worker's side of the control protocol after it has a place, without I/O.

    Session     Hello (whenever the broker may be another one), Report (every BEAT seconds), Finished, until Stop
    Reporter    makes the reports from the `Progress` that the compute loop writes

Times are monotonic, in seconds.
"""

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from stageline.broker.control.leaves import Leaving
from stageline.broker.control.messages import (
    MOST_DIGESTS,
    MOST_ROUNDS,
    Assigned,
    Confirmed,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Hello,
    Refused,
    Report,
    StepDigest,
)
from stageline.broker.control.protocol import is_full
from stageline.broker.control.records import EvaluationRecord, Event, StepRecord
from stageline.broker.ledger.ledger import MicrobatchState
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.program import Instruction, Per
from stageline.pipeline.schedule import Kind
from stageline.workers.runtime.progress import Progress

from .joining import WorkerIdentity
from .vitals import BrokerClock

WorkerMessage = Hello | Report | Failed | Finished | Goodbye

BEAT = 0.1  # seconds between two reports
AGAIN = 0.25  # seconds after which an unanswered Hello is sent again
UNANSWERED = 2.0  # seconds without a message from the broker, which confirms every report, until Hello is sent again
MOST_REPEATED = 20_000  # newest confirmed digests of queues, which are sent again to another broker
REPEATED = 1.0  # seconds without confirmation after which finished steps and snapshots are sent again
_STATES: dict[str, tuple[MicrobatchState, ...]] = {  # of a microbatch, from an action's start and from its end on
    Kind.FORWARD: (MicrobatchState.FORWARD, MicrobatchState.STASHED),
    Kind.BACKWARD: (MicrobatchState.BACKWARD, MicrobatchState.DONE),
    Kind.INPUT: (MicrobatchState.INPUT, MicrobatchState.HALFWAY),
    Kind.WEIGHT: (MicrobatchState.WEIGHT, MicrobatchState.DONE),
}


class Reporter:
    """Source of a worker's reports, which repeats finished steps and snapshots until the broker confirms them.

    A report carries new steps and snapshots only after the earlier ones are confirmed. A confirmed report therefore
    means that all reports before it were confirmed.
    """

    def __init__(
        self,
        progress: Progress,
        incarnation: int,
        steps: int | None,
        clock: Callable[[], float] = STEADY.time,
        where: Callable[[int], str] = lambda stage: "",
        memory: Callable[[], int] = int,
        leaving: Callable[[], Leaving | None] = lambda: None,
    ) -> None:
        """Start with nothing sent.

        Args:
            progress: The progress to report on.
            incarnation: The incarnation under which reports are sent.
            steps: The number of steps to train; None if a script decides as it goes.
            clock: Returns the seconds since the epoch.
            where: Returns a stage's place in the model, such as "layer 3" or "the loss".
            memory: Returns the bytes of memory that the process takes; 0 if it does not know.
            leaving: Returns the worker's notice that it leaves; None if it stays.
        """
        self.progress = progress
        self._memory = memory
        self._leaving = leaving
        self._broker_clock = BrokerClock()
        self._where = where
        self.incarnation = incarnation
        self._steps = steps
        self._clock = clock
        self._number = 0
        self._records: list[StepRecord] = []  # sent, not confirmed
        self._snapshots: list[tuple[int, int]] = []  # likewise
        self._rounds: list[EvaluationRecord] = []  # likewise
        self._digests: list[StepDigest] = []  # likewise
        self._confirmed_digests: deque[StepDigest] = deque(maxlen=MOST_REPEATED)
        self._resent_digests: deque[StepDigest] = deque()  # another broker must compare them first
        self._confirmed_rounds = 0
        self._holds_snapshots = False  # until the rounds of evaluation and the digests before them are confirmed
        self._resent: deque[StepRecord] = deque()  # what only a former broker may have received; sent after the news
        self._sent = float("-inf")
        self._busy, self._at = progress.busy, clock()

    def report(self, now: float) -> Report:
        """Return a report of everything new at `now`, in monotonic seconds.

        While sent records are unconfirmed and younger than REPEATED seconds, returns a heartbeat instead.
        """
        progress = self.progress
        unconfirmed = self._records or self._snapshots or self._rounds or self._digests
        if unconfirmed and now - self._sent < REPEATED:
            return self.heartbeat(now)
        while progress.reportable:  # first: the steps, rounds and digests that they come after are there by now
            self._snapshots.append(progress.snapshots.popleft())
        first = self._confirmed_rounds
        self._rounds = progress.evaluations[first : first + MOST_ROUNDS]
        for digests in (self._resent_digests, progress.digests):
            while digests and len(self._digests) < MOST_DIGESTS:
                self._digests.append(digests.popleft())
        more = first + len(self._rounds) < len(progress.evaluations)
        self._holds_snapshots = more or len(self._digests) >= MOST_DIGESTS
        times = sum(len(record.times) for record in self._records)
        for source in (progress.steps, self._resent):
            while source and not is_full(len(self._records), times):
                self._records.append(source.popleft())
                times += len(self._records[-1].times)
        self._number += 1
        self._sent = now
        return self._report(now, self._number)

    def heartbeat(self, now: float) -> Report:
        """Return a report without steps, snapshots, evaluations or digests.

        Its number is 0: it needs no confirmation.
        """
        return self._report(now, 0)

    def confirmed(self, number: int, at: float = 0.0) -> None:
        """Drop what report `number` carried: the broker has stored it. Any number but the newest is ignored.

        `at` is the time by the broker's clock, in seconds since the epoch; 0.0 if the broker did not say.
        """
        self._broker_clock.answered(number, at, self._clock())
        if number == self._number:
            self._records.clear()
            self._confirmed_digests.extend(self._digests)
            self._digests.clear()
            self._confirmed_rounds += len(self._rounds)
            self._rounds = []
            if not self._holds_snapshots:
                self._snapshots.clear()

    def resend_all(self, incarnation: int) -> None:
        """Queue all that a new broker must know of this worker again, to be sent under `incarnation`.

        Called when another broker may be there, whose records are old or lost.
        """
        self.incarnation = incarnation
        self._resent = deque(self.progress.records(self._steps))
        written = {each for each in self.progress.written if self.progress.may_report(each[1])}
        self._snapshots = sorted({*self._snapshots, *written})
        self._rounds, self._confirmed_rounds = [], 0
        self._resent_digests.extend(filter(self._is_needed, self._confirmed_digests))
        self._confirmed_digests.clear()
        self._sent = float("-inf")

    @property
    def all_confirmed(self) -> bool:
        """True if nothing is left to send."""
        progress = self.progress
        moved = progress.digests or self._digests or self._resent_digests
        new = progress.steps or progress.reportable or self._confirmed_rounds < len(progress.evaluations)
        return not (self._records or self._resent or self._snapshots or moved or new)

    def _report(self, now: float, number: int) -> Report:
        progress, must_arrive, activity = self.progress, number > 0, self.progress.activity()
        counts, trouble, fault = progress.take_counts(), progress.trouble, progress.fault
        orders, closed = progress.orders.known
        if must_arrive:
            self._broker_clock.sent(number, self._clock())
        return Report(
            incarnation=self.incarnation,
            number=number,
            actions=progress.actions,
            now=activity.said,
            since=progress.since,
            idle=self._idle(activity.computing),
            steps=list(self._records) if must_arrive else [],
            events=self._events(),
            retained_bytes=sum(depth.bytes for depth in counts.depths.values()),
            puts=dict(counts.depths),
            takes=dict(counts.intakes),
            counted=max(0.0, self._clock() - counts.at) if counts.at else 0.0,
            training_steps=self._steps if progress.called is None else progress.called,
            snapshots=list(self._snapshots) if must_arrive and not self._holds_snapshots else [],
            evaluations=list(self._rounds) if must_arrive else [],
            complete=progress.complete,
            waits=list(activity.waits),
            layer="" if activity.stage is None else self._where(activity.stage),
            trouble=trouble.reason if trouble else "",
            troubled=max(0.0, now - trouble.since) if trouble else 0.0,
            fault=fault.told(now) if fault else "",
            orders=len(orders),
            closed=closed,
            held=progress.held.known,
            leaving=self._leaving(),
            stage_bytes=[(stage, *taken) for stage, taken in list(progress.stage_bytes.items())],
            digests=list(self._digests) if must_arrive else [],
            memory=self._memory(),
            timed=must_arrive,
            clock=self._broker_clock.offset,
            copies=progress.copies.report,
        )

    def _idle(self, computing: tuple[float, float | None] | None) -> float:
        now, progress = self._clock(), self.progress
        since, until = computing or (now, now)
        busy = progress.busy - self._busy + max(0.0, (now if until is None else until) - max(since, self._at))
        idle = 1 - busy / max(now - self._at, 1e-9)
        self._busy, self._at = progress.busy, now
        return min(1.0, max(0.0, idle))

    def _events(self) -> list[Event]:
        """Return the states that the open steps' microbatches entered by finished actions and by the current one."""
        progress = self.progress
        stages = [list(stage) for stage in list(progress.open.values())]  # the loop goes on meanwhile
        actions: list[tuple[Instruction, tuple[float, ...]]] = [
            (done.instruction, (done.start, done.end)) for stage in stages for done in stage
        ]
        if progress.instruction is not None and progress.instruction.counted and not progress.waits:
            actions.append((progress.instruction, (progress.since,)))
        return [
            Event(instruction.action.stage, instruction.step, instruction.action.microbatch, state, at)
            for instruction, times in actions
            for state, at in zip(self._states(instruction), times, strict=False)
        ]

    def _states(self, instruction: Instruction) -> tuple[MicrobatchState, ...]:
        if instruction.action.stage in self.progress.forward_only and instruction.action.kind is Kind.FORWARD:
            return MicrobatchState.FORWARD, MicrobatchState.DONE
        return _STATES.get(instruction.action.kind, ())

    def _is_needed(self, digest: StepDigest) -> bool:
        """Return True if a worker that begins at the newest checkpoint puts or takes the messages of this digest."""
        name, step, _ = digest
        progress = self.progress
        per = next((queue.per for queue in progress.ends if queue.name == name), Per.STEP)
        return step >= progress.position(progress.complete).of(per)


class Session:
    """A worker's exchange with the broker from its assignment to the run's end."""

    def __init__(
        self,
        identity: WorkerIdentity,
        assigned: Assigned,
        endpoint: str,
        reporter: Reporter,
        outbox: deque[Failed | Finished | Goodbye],
        *,
        now: float,
    ) -> None:
        """Start at `now`, before the first Hello.

        Args:
            identity: The worker's identity, for its Hellos.
            assigned: The place that the broker assigned.
            endpoint: The address of the worker's queues.
            reporter: The source of its reports.
            outbox: Messages to send before the next report, in order. `Finished` is sent after all reports, and
                repeated until the broker stops the run.
            now: Monotonic time in seconds, kept as `last_received`, the time of the broker's last message.
        """
        self.last_received = now
        self._identity = identity
        self._assigned = assigned
        self._keys = assigned.keys
        self._endpoint = endpoint
        self._progress = reporter.progress
        self.reporter = reporter
        self._known = False  # whether the broker has answered the Hello that was sent over this connection
        self._hello_sent = float("-inf")
        self._outbox = outbox
        self._finished: Finished | None = None
        self._parting: Failed | Goodbye | None = None  # of a worker: it says nothing else any more

    def reconnected(self) -> None:
        """Begin again with Hello: the connection is new, and perhaps the broker too.

        Another broker knows neither this worker nor its endpoint, and the last messages to the former one may be lost,
        so they are sent again. The broker answers the new Hello with the endpoints of the peers.
        """
        self._known = False
        self.reporter.resend_all(self.reporter.incarnation)

    def may_hear(self, message: FromBroker) -> bool:
        """Return True if `message` counts although it is not sealed for this worker.

        Two kinds count: a new incarnation from a broker that has lost its records, and with them the secrets, and a
        refusal by another broker. Neither counts once a broker has proven over this connection that it is the former
        one.
        """
        renews = isinstance(message, Assigned) and message.keep and message.incarnation > self.reporter.incarnation
        return not self._known and (renews or isinstance(message, Refused))

    def due(self, now: float) -> Iterator[WorkerMessage]:
        """Yield the messages to send in this beat, at `now` in monotonic seconds.

        A worker that has said that it ends repeats only that: after any other message the broker would count it as
        alive.
        """
        if self._parting is not None:
            yield self._parting
            return
        if now - self.last_received > UNANSWERED:
            self._known = False
        if not self._known and now - self._hello_sent >= AGAIN:
            self._hello_sent = now
            yield self._hello()
        yield from self.unsent()
        yield from self._reports(now)

    def _reports(self, now: float) -> Iterator[WorkerMessage]:
        if self._parting is not None:
            return
        # Finished steps can be many bytes, and the broker limits what comes before it knows from whom.
        yield self.reporter.report(now) if self._known else self.reporter.heartbeat(now)
        if self._finished is not None and self.reporter.all_confirmed:
            yield msgspec.structs.replace(self._finished, incarnation=self.reporter.incarnation)

    def unsent(self) -> Iterator[WorkerMessage]:
        """Take all messages out of the outbox, and yield those to send now, under the present incarnation.

        `Finished` is only noted: `due` yields it after the last report.
        """
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Finished):
                self._finished = message
            else:
                message = msgspec.structs.replace(message, incarnation=self.reporter.incarnation)
                if not self._progress.leaves_before_its_end:
                    self._parting = message
                yield message

    def receive(self, message: FromBroker, now: float) -> FromBroker | None:
        """Return the broker's message, or the part of it that is a command for the compute loop.

        Its place, told again, is one if it brings other keys, or comes from a broker that had lost its records. Such a
        broker may have learned from others of orders that this worker does not know. They come with the place that the
        worker keeps, before its peers do: until then it may not have begun a step.
        """
        self.last_received = now
        match message:
            case Confirmed(number, at):
                self.reporter.confirmed(number, at)
            case Assigned():
                self._known = True
                renewed = message.keep and message.incarnation > self.reporter.incarnation
                if renewed:  # the broker had lost its records
                    self.reporter.resend_all(message.incarnation)
                before, self._keys = self._keys, message.keys
                return message if renewed or message.keys != before else None
            case _:
                return message
        return None

    def _hello(self) -> Hello:
        run, index = self._assigned.run, self._assigned.index
        # First the disk, then the memory: the loop goes on meanwhile, and must not seem to be behind its snapshots.
        incarnation = self.reporter.incarnation
        here = {"endpoint": self._endpoint, "queues": self._progress.ends}
        hello = self._identity.hello(run, incarnation=incarnation, spare=False, **here)
        if self._identity.disk is None:
            return hello
        disk, memory = self._identity.disk.disk(run), self._progress.memory(run, index)
        return msgspec.structs.replace(hello, disk=disk, memory=memory)
