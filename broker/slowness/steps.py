"""Steps as they were measured: each worker's actions in order, what each of them waited for, and its message's way.

    stage 0   [F0]      end ──── lag ────┐
    stage 1        waited for a message  └──> [F0] start

The lag of a message that was waited for is known: from the end of the action that sent it to the end of the wait. Of a
message that lay in its queue until it was taken, only a limit of it is known.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from operator import attrgetter
from statistics import median

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import NO_STAGE, WaitCause, plain_entries
from stageline.pipeline.schedule import Action, Kind, Schedule

WAITED = 2e-4  # seconds: a shorter wait is the time to take a message that is there
_HELD_UP = 1.25  # times as far apart as they were sent, from which on messages held each other up
_NARROW = 5e-3  # seconds longer than that, too: below, it is the switching between processes
_CLOSE = 0.75  # of the time on the way, in which two messages are sent that may hold each other up
_SPIKE = 4.0  # times the usual: what takes longer, once, is a hiccup of the machine
# From the stage that takes to the one that gives.
_HOP: dict[str, int] = {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.INPUT: 1}
WITHIN = (WaitCause.DATA, WaitCause.OFFLOAD)  # causes of waits that lie within an action
PAUSES = (WaitCause.DISK, WaitCause.SCRIPT, WaitCause.EVALUATION, WaitCause.SWITCHING, WaitCause.ROOM, WaitCause.CREDIT)

Key = tuple[int, Action]  # a step and an action of it


@dataclass(slots=True)
class Ran:
    """An action that `worker` ran in a step. Times are in seconds; `start` and `end` since the epoch.

    Attributes:
        worker: Index of the worker.
        step: Step of the action.
        action: The action.
        start: Its start, by the broker's clock as far as offsets are known.
        end: Its end.
        data: Seconds of it in which rows were drawn.
        offload: Seconds of it in which activations came from files, or waited for room on their way there.
        pauses: Seconds before it that were waited, by cause, without those for messages.
        message: Seconds before it in which a message was waited for.
        other: Copy of a stage whose message was waited for; None without such a wait.
        source: The action whose message it takes, None if it takes none.
        lag: Seconds that the message was on its way, as far as it was waited for; None if it was not.
        over: Seconds before it for which there is no cause but the loop itself.
    """

    worker: int
    step: int
    action: Action
    start: float
    end: float
    data: float = 0.0
    offload: float = 0.0
    pauses: dict[WaitCause, float] = field(default_factory=dict)
    message: float = 0.0
    other: int | None = None
    source: "Ran | None" = None
    lag: float | None = None
    over: float = 0.0

    @property
    def computed(self) -> float:
        """Seconds in which it computed."""
        return max(0.0, self.end - self.start - self.data - self.offload)

    def paused_for(self, cause: WaitCause) -> float:
        """Return the seconds before it, or in it, that were waited for `cause`, which is not MESSAGE."""
        match cause:
            case WaitCause.DATA:
                return self.data
            case WaitCause.OFFLOAD:
                return self.offload
            case _:
                return self.pauses.get(cause, 0.0)

    def waited(self, cause: WaitCause, other: int, seconds: float) -> None:
        """Add a wait before it, or in it, to the others of the same cause.

        Args:
            cause: Cause of the wait.
            other: Copy of a stage at the other end of the queue that was waited for, or `NO_STAGE`.
            seconds: Length of the wait.
        """
        match cause:
            case WaitCause.DATA:
                self.data += seconds
            case WaitCause.OFFLOAD:
                self.offload += seconds
            case WaitCause.MESSAGE:
                self.message += seconds
                self.other = None if other == NO_STAGE else other
            case _:
                self.pauses[cause] = self.pauses.get(cause, 0.0) + seconds

    def follows(self, before: "Ran") -> None:
        """Note the action before it on its worker: the rest of the time between both is the loop's own."""
        paused = sum(self.pauses.values()) if self.pauses else 0.0
        self.over = max(0.0, self.start - before.end - self.message - paused)

    def takes_from(self, source: "Ran | None") -> None:
        """Note the action whose message it takes; None if it takes none."""
        self.source = source

    def shift(self, seconds: float) -> None:
        """Move its times by `seconds`."""
        self.start += seconds
        self.end += seconds

    def is_over_at(self, time: float) -> None:
        """Note that it had ended at `time`: its result was taken then. Its worker may have noted that later."""
        self.end = max(self.start, min(self.end, time))

    def measure_lag(self) -> None:
        """Take the lag of its message, if it was waited for and came from another worker."""
        if self.source is not None and self.source.worker != self.worker and self.message > WAITED:
            self.lag = max(0.0, self.start - self.source.end)


# Seconds by which two clocks of one machine's name differ at least, if it is not one machine, or if its clock was set
# between the starts of two processes: each reads it once. NTP sets it if it is off by more than 0.128 s.
APART = 0.1


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of the workers, which those of one machine share.

    Attributes:
        ahead: By worker, the seconds by which the broker's clock is ahead.
        hosts: By worker, the name of its machine.
        apart: Workers whose clocks differ from those of others on a machine of the same name.
    """

    ahead: Mapping[int, float] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()

    @classmethod
    def of(cls, offsets: Mapping[int, tuple[float, float]], hosts: Mapping[int, str]) -> "Clocks":
        """Return the clocks as workers have reported them; of the workers of a machine, the surest report counts.

        Args:
            offsets: By worker, the seconds by which the broker's clock is ahead, and how far that may be wrong.
            hosts: By worker, the name of its machine.
        """
        ahead, apart = dict[int, float](), set[int]()
        for host in set(hosts.values()):
            known = {worker: offsets[worker] for worker, each in hosts.items() if each == host and worker in offsets}
            surest = min(known.values(), key=lambda offset: offset[1], default=(0.0, 0.0))
            for worker, (seconds, uncertain) in known.items():
                differs = abs(seconds - surest[0]) > APART + 4 * (uncertain + surest[1])
                ahead[worker] = seconds if differs else surest[0]
                apart |= {worker} if differs else set()
        return cls(ahead, hosts, frozenset(apart))

    def of_worker(self, worker: int) -> float:
        """Return the seconds to add to a time of `worker`; 0 if all workers have one clock."""
        return 0.0 if self.one else self.ahead.get(worker, 0.0)

    def shared(self, one: int, other: int) -> bool:
        """Return True if two workers have the same clock."""
        return self.hosts.get(one) == self.hosts.get(other) and not {one, other} & self.apart

    @property
    def one(self) -> bool:
        """True if all workers have the same clock."""
        return len(set(self.hosts.values())) <= 1 and not self.apart


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps that were measured whole, in order, by one schedule.

    Attributes:
        schedule: Schedule of these steps.
        steps: Their numbers.
        workers: By worker, its actions in the order in which it ran them.
        stage_of: Stage of each copy.
        usual: Median time of each kind of action, by copy and kind.
    """

    schedule: Schedule
    steps: tuple[int, ...]
    workers: tuple[tuple[Ran, ...], ...]
    stage_of: tuple[int, ...]
    usual: Mapping[tuple[int, str], float]

    @classmethod
    def of(cls, schedule: Schedule, records: Iterable[StepRecord], clocks: Clocks | None = None) -> "MeasuredSteps":
        """Return the steps of `records` that all copies of all stages have run."""
        clocks = clocks or Clocks()
        found: dict[int, dict[int, StepRecord]] = defaultdict(dict)
        for record in records:
            if record.times:
                found[record.step][record.stage] = record
        whole = [step for step, of in sorted(found.items()) if len(of) == schedule.copies]
        workers = tuple(
            tuple(_in_order(worker, copies, [found[step] for step in whole], clocks.of_worker(worker)))
            for worker, copies in enumerate(schedule.placement)
        )
        stage_of = tuple(map(schedule.replicas.stage, range(schedule.copies)))
        made = cls(schedule, tuple(whole), workers, stage_of, {})
        _link(made, clocks)
        return replace(made, usual=_usual(workers))

    @property
    def all(self) -> list[Ran]:
        """All actions, by worker."""
        return [each for actions in self.workers for each in actions]

    @property
    def seconds(self) -> float:
        """Seconds from the end of a step to the end of the next, on average."""
        if len(self.steps) < 2:
            return 0.0
        first, last = (max(each.end for each in self.all if each.step == self.steps[at]) for at in (0, -1))
        return (last - first) / (len(self.steps) - 1)

    def busy(self) -> tuple[float, ...]:
        """Return by worker the seconds of a step in which it computes, on average, without hiccups of its machine."""
        count = max(1, len(self.steps))
        return tuple(sum(map(self.computing, actions)) / count for actions in self.workers)

    def computing(self, ran: Ran) -> float:
        """Return the seconds in which an action computed; of a hiccup, a few times the usual."""
        return min(ran.computed, _SPIKE * self.usual[ran.action.stage, ran.action.kind])

    def narrow(self) -> set[tuple[int, int]]:
        """Return the hops, by the stages from and to which messages go, whose messages hold each other up.

        Of two messages that are sent in a shorter time than one is on its way, the second comes as much later where
        the link is only far, and later than that where it is narrow: there, fewer bytes help.
        """
        stage, found = self.stage_of, defaultdict(list)
        for actions in self.workers:
            waited = [each for each in actions if each.source is not None and each.lag is not None]
            for one, other in pairwise(waited):
                same = one.step == other.step and one.action[:2] == other.action[:2]
                if not (same and one.source and other.source and one.lag):
                    continue
                apart, sent = other.start - one.start, other.source.end - one.source.end
                if sent < _CLOSE * one.lag:
                    hop = stage[other.source.action.stage], stage[other.action.stage]
                    found[hop].append(apart > _HELD_UP * sent + _NARROW)
        return {hop for hop, held in found.items() if sum(held) > len(held) / 2}

    def lags(self) -> dict[tuple[int, int], float]:
        """Return the median lag of messages that were waited for, by the stages from and to which they went."""
        stage, found = self.stage_of, defaultdict(list)
        for each in self.all:
            if each.source is not None and each.lag is not None and each.action.kind in _HOP:
                found[stage[each.source.action.stage], stage[each.action.stage]].append(each.lag)
        return {hop: median(lags) for hop, lags in found.items()}


def _usual(workers: Iterable[Iterable[Ran]]) -> dict[tuple[int, str], float]:
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for each in chain.from_iterable(workers):
        times[each.action.stage, each.action.kind].append(each.computed)
    return {key: median(found) for key, found in times.items()}


def _in_order(worker: int, copies: Sequence[int], steps: Sequence[Mapping[int, StepRecord]], ahead: float) -> list[Ran]:
    ran = [each for records in steps for copy in copies for each in _ran(worker, records[copy], ahead)]
    ran.sort(key=attrgetter("start"))
    for before, each in pairwise(ran):
        each.follows(before)
    return ran


def _ran(worker: int, record: StepRecord, ahead: float) -> Iterator[Ran]:
    """Yield the actions of a record, each with the waits before it."""
    waits: list[tuple[WaitCause, int, float]] = []
    for named, number, start, end in plain_entries(record.times):
        if isinstance(named, WaitCause):
            waits.append((named, number, max(0.0, end - start)))
            continue
        made = Ran(worker, record.step, Action(named, record.stage, number), start + ahead, end + ahead)
        for wait in waits:
            made.waited(*wait)
        waits.clear()
        yield made


def _link(steps: MeasuredSteps, clocks: Clocks) -> None:
    """Find the action whose message each action takes, and how long the message was on its way."""
    stage_of, sent = steps.stage_of, dict[tuple[int, int, int, int], Ran]()
    for each in steps.all:
        kind, copy, microbatch = each.action
        if (hop := _HOP.get(kind)) is not None:
            sent[each.step, stage_of[copy], hop, microbatch] = each
    for each in steps.all:
        kind, copy, microbatch = each.action
        if (hop := _HOP.get(kind)) is not None:
            each.takes_from(sent.get((each.step, stage_of[copy] + hop, hop, microbatch)))
    if not clocks.one:
        _align(steps, clocks)
    _link_others(steps)
    for each in steps.all:
        each.measure_lag()


def _link_others(steps: MeasuredSteps) -> None:
    """Find the sources of what goes neither forward nor backward: the last action before it at the other end."""
    by_copy: dict[tuple[int, int], list[Ran]] = defaultdict(list)
    for each in steps.all:
        by_copy[each.step, each.action.stage].append(each)
    for each in steps.all:
        if each.action.kind not in _HOP and each.other is not None and each.message > WAITED:
            before = [one for one in by_copy[each.step, each.other] if one.end <= each.start]
            each.takes_from(before[-1] if before else None)


def _align(steps: MeasuredSteps, clocks: Clocks) -> None:
    """Move the times of workers so that no message is taken before it was sent, and both ways take equally long.

    An offset is known to half a round trip of the control channel, which may be longer than a message's way. An action
    whose result is taken has ended: its worker may have noted that later, since it did not run after it had sent.
    """
    shortest: dict[tuple[int, int], float] = {}
    for each in steps.all:
        if each.source is not None and not clocks.shared(each.source.worker, each.worker):
            way = each.source.worker, each.worker
            shortest[way] = min(shortest.get(way, float("inf")), each.start - each.source.end)
    moved = {0: 0.0}
    for worker in range(1, len(steps.workers)):
        there = [shortest[one, worker] - moved[one] for one in moved if (one, worker) in shortest]
        back = [shortest[worker, one] + moved[one] for one in moved if (worker, one) in shortest]
        moved[worker] = (min(back) - min(there)) / 2 if there and back else max(0.0, -min(there, default=0.0))
    for each in steps.all:
        each.shift(moved[each.worker])
    for each in steps.all:
        if each.source is not None:
            each.source.is_over_at(each.start)
