"""All that the broker knows of its run, and which of it is stored when.

A worker's incarnation and the complete checkpoint are decided together and stored in one write: a broker killed at any
moment cannot leave an incarnation that begins at another step than its worker was told.
"""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from stageline.broker.control.messages import Declined, FromBroker, Report, Trim
from stageline.broker.control.protocol import RunKeys
from stageline.broker.control.records import LONGEST_NAME, EvaluationRecord
from stageline.broker.ledger.evaluations import Evaluations, fact_name, fact_of, stored_in
from stageline.broker.ledger.ledger import Ledger, QueueDigests
from stageline.broker.ledger.member import Member, MemberStatus
from stageline.broker.ledger.orders import OrderBook
from stageline.broker.ledger.recovery import KEPT_LOSSES, CheckpointTracker, LostAttempt, lost_attempts
from stageline.broker.ledger.registry import Registry, Replacement, Replacements, StandbyWorkers
from stageline.broker.stores.base import Fact, Store, StoredRun
from stageline.pipeline.evaluation import Rounds, Standing

from .lifecycle import RunEvent, RunLifecycle
from .run import RunConfig, RunIdentity, RunOutcome, RunPhase

_FACT = "registry"
_LOGGED = 20  # anomalies of one kind that become warnings, in so many seconds; all are counted
_PERIOD = 10.0
_DECLINED = 8  # newest processes that did not join

Outgoing = tuple[bytes, FromBroker]  # recipient, message


class EventLog:
    """Log lines since the reader last cleared them, and how often each kind of anomaly happened."""

    def __init__(self) -> None:
        self.infos: list[str] = []
        self.warnings: list[str] = []
        self.anomalies: Counter[str] = Counter()
        self._lately: Counter[str] = Counter()
        self._once: set[str] = set()
        self._since = 0.0

    def count(self, kind: str, line: str) -> None:
        """Something unexpected and harmless happened: counted, and logged the first times of a while."""
        self.anomalies[kind] += 1
        self._lately[kind] += 1
        if self._lately[kind] <= _LOGGED:
            self.warnings.append(line)

    def count_once(self, kind: str, line: str) -> None:
        """Count an anomaly that an attacker may repeat: each line is logged once."""
        self.anomalies[kind] += 1
        if line not in self._once:
            self._once.add(line)
            self.warnings.append(line)

    def turn(self, now: float) -> None:
        """Call it several times a second: says how many anomalies were only counted, and begins to log again."""
        if now - self._since < _PERIOD:
            return
        withheld = ((kind, count - _LOGGED) for kind, count in self._lately.items() if count > _LOGGED)
        self.warnings += [f"{kind}: {count} more in the last {now - self._since:.0f} s" for kind, count in withheld]
        self._lately.clear()
        self._since = now


class _Replacing(msgspec.Struct):
    gaps: list[Replacement]
    in_a_row: list[tuple[int, int]]
    ever: list[tuple[int, int]]


class _Progress(msgspec.Struct):
    """What is stored beside the registry's own part."""

    checkpoints: CheckpointTracker
    replacing: _Replacing
    attempts: list[LostAttempt] = []


class RunRecords:
    """The state of the run with the id `run`. The coordinator's parts share it, and change it.

    Times are seconds since the epoch.
    """

    def __init__(self, run: str, config: RunConfig, store: Store) -> None:
        schedule = config.schedule
        self.id = run
        self.keys = RunKeys(run)  # none without a stored key
        self.adopted = False  # see `RunIdentity`
        self.config = config
        self.store = store
        self.lifecycle = RunLifecycle()
        self.outcome: RunOutcome | None = None
        self.ledger = Ledger(schedule.copies, schedule.microbatches, config.log_every, last=schedule.stages - 1)
        self.registry = Registry(config.placement, config.leases, labels=config.labels)
        self.digests = QueueDigests()  # of messages that lie at a server
        self.checkpoints = CheckpointTracker(complete=0, newer=[set() for _ in range(schedule.copies)])
        self.replacements = Replacements()
        self.lost_work: deque[LostAttempt] = deque(maxlen=KEPT_LOSSES)
        self.standby = StandbyWorkers()
        self.training_steps: int | None = None  # of the run, once a worker has loaded the data
        self.length = config.length  # of the run, once it is known; for workers that have no data
        self.evaluations = Evaluations(config.criterion)
        self.orders = OrderBook()  # of a run that chooses its schedule
        self.metrics: dict[str, float] = {}  # of the newest round of evaluation
        self.declined: deque[Declined] = deque(maxlen=_DECLINED)
        self.events = EventLog()
        self.fault = ""  # what the broker itself cannot do for now, continuing "the broker"
        self.outgoing: list[Outgoing] = []  # messages that the present decision sends

    @property
    def phase(self) -> RunPhase:
        """How far the run is, as users see it."""
        if self.outcome is not None:
            return self.outcome.phase
        return RunPhase.RUNNING if self.registry.begun else RunPhase.WAITING

    @property
    def all_left(self) -> bool:
        """Whether no worker has anything left to report."""
        return all(member.status is not MemberStatus.PRESENT for member in self.registry.members.values())

    @property
    def all_heard(self) -> bool:
        """Whether every worker has contacted this broker: of a finished run that a former broker served, one that was
        not told of the end may do so yet."""
        return all(member.sender for member in self.registry.members.values())

    @property
    def saving(self) -> bool:
        """Whether workers of a stopped run may still finish a step, and write its snapshot."""
        workers = (member for member in self.registry.members.values() if not member.is_script)
        stops = self.outcome is not None and self.outcome.at_step_end
        return stops and any(member.status is MemberStatus.PRESENT for member in workers)

    @property
    def trimmable(self) -> int:
        """The step before which no worker, and no replacement, needs a message."""
        return self.checkpoints.complete if self.config.snapshots else self.ledger.finished_floor

    @property
    def rounds(self) -> Rounds | None:
        """When the run evaluates; None before it is known how long it is."""
        every, length = self.config.evaluates_every, self.length
        if length is None:
            return None
        return Rounds(length.training, length.evaluation, length.epoch if every == "epoch" else every)

    @property
    def early_end(self) -> Standing | None:
        """How the run stood when it ended early; None if it has not."""
        standing = self.evaluations.standing()
        early = standing is not None and (self.length is None or standing.step < self.length.training)
        return standing if standing is not None and standing.stops and early else None

    @property
    def steps_to_train(self) -> int:
        """After how many steps the run has finished; 0 as long as no worker that has the data has come."""
        return self.steps_to_train_of(self.training_steps)

    def steps_to_train_of(self, told: int | None) -> int:
        """Return after how many steps the run has finished, if its workers have `told` a number, or none yet.

        The number is not used if the run's length is known, or the run has ended early.
        """
        early = self.early_end
        known = told if self.length is None else self.length.training
        return known or 0 if early is None else early.step

    def announcement(self, step: int) -> Trim | None:
        """What lets go of all that comes before the complete checkpoint of `step`, but for the snapshots of the best
        round of evaluation before it. None as long as one of those rounds is not known: a broker that has lost its
        records is told them again.

        The round after `step` steps does not count, though it may be known: so what is kept follows from the last
        stage's snapshot of `step`, in which all rounds before it are.
        """
        if not self.config.keeps_best:
            return Trim(step)
        if self.rounds is None or self.evaluations.count_before(step) < self.rounds.before(step):
            return None
        standing = self.evaluations.standing(step - 1)
        return Trim(step, None if standing is None or standing.best is None else standing.best.step)

    def broadcast(self, message: FromBroker) -> None:
        """Sends `message` to every reachable worker with a place."""
        self.outgoing += [(member.sender, message) for member in self.registry.reachable() if member.sender]

    def lack_checkpoint(self, complete: int, member: Member | None) -> bool:
        """Whether the records must be stale, since `member` was told that a newer checkpoint is `complete`."""
        return self.config.restarts > 0 and member is not None and complete > self.checkpoints.complete

    def lack_order(self, report: Report) -> bool:
        """Whether the records must be stale, since a worker was given more orders than they have."""
        return self.config.restarts > 0 and report.orders > len(self.orders.orders)

    def fail(self, reason: str, code: int) -> None:
        """The first failure ends the run; what follows from it does not replace it."""
        if not self.lifecycle.over:
            self.end(RunEvent.FAILURE, RunOutcome(RunPhase.FAILED, reason, code))

    def end(self, event: RunEvent, outcome: RunOutcome) -> None:
        """Ends the run, and stops all workers."""
        self.lifecycle.move(event)
        self.set_outcome(outcome)
        self.events.infos.append(f"run {self.id} has {outcome.phase}: {outcome.reason}")
        self.stop_workers(outcome)

    def set_outcome(self, outcome: RunOutcome) -> None:
        self.outcome = outcome
        self.store.put("outcome", msgspec.to_builtins(outcome))

    def stop_workers(self, outcome: RunOutcome) -> None:
        self.broadcast(outcome.stop_message)
        self.outgoing += [(contact.sender, outcome.stop_message) for contact in self.standby.values()]

    def note_declined(self, host: str, pid: int, reason: str) -> None:
        """A process does not become a worker."""
        declined = Declined(host, pid, reason[:LONGEST_NAME])
        if declined not in self.declined:
            self.declined.append(declined)

    def add_lost_work(self, members: Iterable[Member], why: str, now: float) -> None:
        """The work of lost `members` after the complete checkpoint; call it while the ledger still has it."""
        for member in members:
            self.lost_work += lost_attempts(member, self.ledger, self.checkpoints.complete, why, now)

    def add_evaluation(self, record: EvaluationRecord) -> bool:
        """Stores what a round of evaluation found, once; False if it is known. Raises as `Evaluations.add` does."""
        new = self.note_evaluation(record)
        if new:
            self.store.put(fact_name(record), fact_of(record))
        return new

    def note_evaluation(self, record: EvaluationRecord) -> bool:
        """The same of a round that is stored."""
        new = self.evaluations.add(record)
        if (newest := self.evaluations.newest) is not None:
            self.metrics = newest.metrics
        return new

    def go_back(self, stages: Iterable[int]) -> None:
        """The stages, which have lost their workers, will begin at the complete checkpoint again."""
        lost = list(stages)
        self.checkpoints.forget(lost)
        self.ledger.go_back(lost, self.checkpoints.complete)
        self.store.go_back(lost, self.checkpoints.complete)
        self.save()

    def save(self) -> None:
        """Stores which worker has which place, the checkpoints and the replacements, in one write."""
        self.store.put(_FACT, self.facts())

    def facts(self) -> Fact:
        """What `save` stores."""
        counts = self.replacements
        replacing = _Replacing(list(counts.pending.values()), list(counts.in_a_row.items()), list(counts.ever.items()))
        progress = _Progress(self.checkpoints, replacing, list(self.lost_work))
        return {**self.registry.facts(), **msgspec.to_builtins(progress, order="deterministic")}

    def restore(self, stored: StoredRun, now: float) -> None:
        """Continues from what a former broker has stored."""
        identity = RunIdentity.stored_in(stored.facts)
        if identity is not None:
            self.keys, self.adopted = identity.keys, identity.adopted
        self.ledger.restore(stored.finished, stored.losses)
        self.orders = OrderBook.stored_in(stored.facts)
        for record in stored_in(stored.facts):
            self.note_evaluation(record)
        self.registry.floor = self.unused_incarnation(now) if self.config.restarts else 0
        if _FACT in stored.facts:
            self.registry.restore(stored.facts[_FACT], now)
            kept = msgspec.convert(stored.facts[_FACT], _Progress)
            self.checkpoints = kept.checkpoints
            self.ledger.reach(self.checkpoints.complete)  # a checkpoint found on the disks may be ahead of the records
            self.replacements.pending = {each.index: each for each in kept.replacing.gaps}
            self.replacements.in_a_row.update(dict(kept.replacing.in_a_row))
            self.replacements.ever.update(dict(kept.replacing.ever))
            self.replacements.restart_deadlines(now)
            self.lost_work += kept.attempts
        if stored.facts.get("outcome"):
            self.outcome = msgspec.convert(stored.facts["outcome"], RunOutcome)
            if self.outcome.phase is RunPhase.FINISHED:
                self.registry.recall_finished()

    @staticmethod
    def unused_incarnation(now: float) -> int:
        """An incarnation above all given out before `now`: no broker gives out one a millisecond."""
        return int(now * 1000)
