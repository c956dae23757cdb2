"""Times of actions and messages, computed from the starts and ends of a few steps' actions on all stages.

Workers read their own clocks, which need not agree. A message from one worker to another appears to take its latency
plus the difference of the clocks; a message back appears to take its latency minus that difference. Half of the sum of
both is the one-way latency.

    stage 0  F0 ends 10.0                        B0 starts 10.9        forward  0.5 = latency + difference
    stage 1             F0 starts 10.5 ... B0 ends 10.8                backward 0.1 = latency - difference
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Self

from stageline.pipeline.program import Costs
from stageline.pipeline.schedule import Action, Kind, Placement

_QUEUED = 1.25  # times the interval between two that were sent, from which on those that arrive held each other up
_SEEN = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.UPDATE)
_LEAST = 1e-3  # seconds by which it has to be longer, too: below, it is the switching between processes


class ActionTimes(NamedTuple):
    """Start and end of one `action`, in seconds of its worker's clock."""

    action: Action
    start: float
    end: float


StepActions = Mapping[int, Sequence[ActionTimes]]  # of a step, by stage


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times of each stage's actions for one microbatch, and of the messages between stages, in seconds.

    A time is None if no such action was ever seen, for example the halves of a backward that always ran whole.

    Attributes:
        forward: By stage, the time of a forward.
        backward: By stage, the time of a whole backward.
        input: By stage, the time of the first half of a backward.
        weight: By stage, the time of the second half of a backward.
        update: By stage, the time of an update.
        latency: `latency[h]` is the one-way latency of a message between stages h and h+1.
        transfer: `transfer[h]` is how long a message keeps the link between stages h and h+1 busy; 0 if messages were
            not seen to hold each other up.
        step: Time of a step.
        unsplit: Stages that send gradients of shared parameters after each backward. Their backwards therefore run
            whole in every schedule.
    """

    forward: tuple[float, ...]
    backward: tuple[float | None, ...]
    input: tuple[float | None, ...]
    weight: tuple[float | None, ...]
    update: tuple[float, ...]
    latency: tuple[float, ...]
    transfer: tuple[float, ...]
    step: float
    unsplit: frozenset[int] = frozenset()

    @classmethod
    def of(cls, steps: Sequence[StepActions], placement: Placement, before: Self | None = None) -> Self:
        """Return the times measured in some steps.

        An action that was not seen in these steps gets its time from `before`, scaled by the change of the stage's
        forward time since then.

        Args:
            steps: Actions of each step by stage. The steps are in order, and every stage has run its actions in them.
            placement: The stages of each worker.
            before: Times measured earlier. None for the first measurement.
        """
        stages = range(sum(map(len, placement)))
        seen = {kind: [_typical(steps, stage, kind) for stage in stages] for kind in _SEEN}
        forward, update = (tuple(each or 0.0 for each in seen[kind]) for kind in (Kind.FORWARD, Kind.UPDATE))
        drifts = [1.0] * len(stages) if before is None else list(map(_drift, before.forward, forward))
        whole = _or_before(seen[Kind.BACKWARD], None if before is None else before.backward, drifts)
        sending = (stage for stage in stages if _typical(steps, stage, Kind.TIED) is not None)
        owners = {stage: worker for worker, owned in enumerate(placement) for stage in owned}
        hops = [(stage, owners[stage] != owners[stage + 1]) for stage in stages[:-1]]
        return cls(
            forward,
            whole,
            _or_before(seen[Kind.INPUT], None if before is None else before.input, drifts),
            _or_before(seen[Kind.WEIGHT], None if before is None else before.weight, drifts),
            update,
            tuple(_latency(steps, stage) if apart else 0.0 for stage, apart in hops),
            tuple(_transfer(steps, stage) if apart else 0.0 for stage, apart in hops),
            _step_time(steps),
            frozenset(stage for stage in sending if whole[stage] is not None),
        )

    @property
    def halving(self) -> float | None:
        """Ratio of the time of all backwards run in halves to their time run whole; None until both are measured."""
        both = [
            (half + other, whole)
            for half, other, whole in zip(self.input, self.weight, self.backward, strict=True)
            if half is not None and other is not None and whole
        ]
        return sum(halves for halves, _ in both) / sum(whole for _, whole in both) if both else None

    @property
    def first_trainable(self) -> int:
        """Index of the first stage that runs backwards; the number of stages if none does."""
        ran = (whole is not None or half is not None for whole, half in zip(self.backward, self.input, strict=True))
        return next((stage for stage, each in enumerate(ran) if each), len(self.forward))

    def costs(self, *, halved: bool) -> Costs:
        """Return the costs with which to simulate a schedule.

        Args:
            halved: True for a schedule that runs backwards in two halves. It is given the halves as measured. Until
                they are measured, the halves are taken to be equal, and together as long as the whole backward. The
                first trainable stage has no gradient to send, so its second half is the whole backward.
        """
        pairs = [self._halves(stage, halved=halved) for stage in range(len(self.forward))]
        return Costs(
            self.forward, tuple(one for one, _ in pairs), tuple(two for _, two in pairs), self.update, self.latency
        )

    def _halves(self, stage: int, *, halved: bool) -> tuple[float, float]:
        whole, one, two = self.backward[stage], self.input[stage], self.weight[stage]
        if stage in self.unsplit:
            return whole or 0.0, 0.0
        if (halved or whole is None) and one is not None:
            return one, two or 0.0
        first = 0.0 if stage == self.first_trainable else (whole or 0.0) / 2
        return first, (whole or 0.0) - first


def _typical(steps: Iterable[StepActions], stage: int, kind: Kind) -> float | None:
    times = [each.end - each.start for step in steps for each in step[stage] if each.action.kind is kind]
    return median(times) if times else None


def _drift(then: float, now: float) -> float:
    return now / then if then else 1.0


def _or_before(
    seen: Sequence[float | None], before: Sequence[float | None] | None, drifts: Sequence[float]
) -> tuple[float | None, ...]:
    """Return, by stage, the time seen now; without one, the time known before multiplied by the stage's drift."""
    known = [None] * len(seen) if before is None else before
    carried = (None if then is None else then * drift for then, drift in zip(known, drifts, strict=True))
    return tuple(then if now is None else now for now, then in zip(seen, carried, strict=True))


def _latency(steps: Sequence[StepActions], stage: int) -> float:
    """Return the one-way latency between `stage` and the next, in seconds.

    The latency of a step is computed from its fastest message in each direction; the result is the median over the
    steps. The fastest message is one that was waited for: others lie in the queue until they are taken. Returns 0 if no
    gradient comes back: latency then only delays the beginning of a run.
    """
    there = [_fastest(step[stage], step[stage + 1], _is_forward) for step in steps]
    back = [_fastest(step[stage + 1], step[stage], _is_backward) for step in steps]
    pairs = [(one, other) for one, other in zip(there, back, strict=True) if one is not None and other is not None]
    if not pairs:  # no gradient comes back: how long messages are on their way only delays the beginning of a run
        return 0.0
    return max(0.0, median((one + other) / 2 for one, other in pairs))


def _fastest(
    sending: Sequence[ActionTimes], taking: Sequence[ActionTimes], counts: Callable[[Action], bool]
) -> float | None:
    sent, taken = _by_microbatch(sending, counts), _by_microbatch(taking, counts)
    return min((taken[number].start - sent[number].end for number in sent if number in taken), default=None)


def _transfer(steps: Sequence[StepActions], stage: int) -> float:
    """Return how long a message keeps the link between `stage` and the next busy, in seconds.

    The result is the median interval between arriving messages, counting only those that were sent in a shorter
    interval and for each of which the next stage waited. Returns 0.0 if fewer than two such intervals a step were
    found.
    """
    found = [
        *(each for step in steps for each in _held_up(step[stage], step[stage + 1], _is_forward)),
        *(each for step in steps for each in _held_up(step[stage + 1], step[stage], _is_backward)),
    ]
    return median(found) if len(found) >= 2 * len(steps) else 0.0


def _held_up(
    sending: Sequence[ActionTimes], taking: Sequence[ActionTimes], counts: Callable[[Action], bool]
) -> Iterator[float]:
    sent, taken = _by_microbatch(sending, counts), _by_microbatch(taking, counts)
    ends = sorted(each.end for each in taking)
    for number in sent:
        if {number, number + 1} <= taken.keys() and number + 1 in sent:
            interval = sent[number + 1].end - sent[number].end
            start = taken[number + 1].start
            last = max((end for end in ends if end <= start), default=start)
            arrived = start - taken[number].start
            if start - last > _LEAST and arrived > _QUEUED * interval + _LEAST and last <= taken[number].end:
                yield arrived


def _by_microbatch(actions: Sequence[ActionTimes], counts: Callable[[Action], bool]) -> dict[int, ActionTimes]:
    return {each.action.microbatch: each for each in actions if counts(each.action)}


def _is_forward(action: Action) -> bool:
    return action.kind is Kind.FORWARD


def _is_backward(action: Action) -> bool:
    return action.kind in (Kind.BACKWARD, Kind.INPUT)


def _step_time(steps: Sequence[StepActions]) -> float:
    """Return the time of a step in seconds, as seen on the last stage.

    The result is the median time from the end of a step to the end of the next. For a single step, it is the time from
    the first start to the last end.
    """
    ends = [max(each.end for each in step[max(step)]) for step in steps]
    if len(ends) == 1:
        return ends[0] - min(each.start for each in steps[0][max(steps[0])])
    return median(later - earlier for earlier, later in pairwise(ends))
