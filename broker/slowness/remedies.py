"""Remedies for a finding: other settings of the plan, each with the time of a step that a simulation gives it.

A simulation of the schedule has the measured times, changed as the remedy would. What the plan has set already is not
suggested.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from stageline.pipeline.program import Costs
from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule, window_for

from .findings import Cause, Examined, Finding, median_times
from .planned import planned_steps

_MOST = 256  # forwards of a step that is simulated whole; a longer one is simulated in part
_WORTH = 0.03  # share of a step that a remedy saves at least
_HALF = {"lossless": ("bf16", 0.5), "bf16": ("int8", 0.5)}

Settings = Mapping[str, Any]  # the plan as nested tables


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes steps shorter: `do` says what to do, `seconds` how long a step then takes."""

    do: str
    seconds: float | None
    gain: float


def _costs_of(found: Examined) -> Costs:
    """Return the measured costs of the stages' actions and of messages, to simulate with."""
    times = median_times(found.steps)
    whole, first = times["B"], times["I"]
    halves = [
        (one, two) if one else (each / 2, each / 2) for each, one, two in zip(whole, first, times["W"], strict=True)
    ]
    lags = found.retimed.lags
    latency = [
        max((lags[hop] for hop in ((stage, stage + 1), (stage + 1, stage)) if hop in lags), default=0.0)
        for stage in range(found.steps.schedule.stages - 1)
    ]
    return Costs(
        times["F"], tuple(one for one, _ in halves), tuple(two for _, two in halves), times["U"], tuple(latency)
    )


class Trials:
    """Other settings tried on some steps, by simulation.

    Attributes:
        found: The steps, and what limits them.
        schedule: Their schedule.
        costs: Measured costs of actions and messages.
        settings: The run's plan.
    """

    def __init__(self, found: Examined, settings: Settings) -> None:
        """Simulate nothing yet."""
        self.found, self.settings = found, settings
        self.schedule, self.costs = found.steps.schedule, _costs_of(found)

    def table(self, name: str) -> Settings:
        """Return a table of the plan; an empty one if the plan has none."""
        found: Settings = self.settings.get(name, {})
        return found

    def gain(self, costs: Costs | None = None, schedule: Schedule | None = None) -> float:
        """Return the share of a step by which it is shorter with other costs, or by another schedule."""
        if not self._now:
            return 0.0
        course = self._present if schedule is None else _Course(schedule)
        return 1 - course.seconds(costs or self.costs) / self._now

    @cached_property
    def better_window(self) -> tuple[float, str]:
        """The share of a step that the plan's window takes, and the better window; 0 and "" if it takes none."""
        schedule, given, best = self.schedule, self.table("schedule").get("window"), (0.0, "")
        if schedule.name not in ("window", "zb-h1") or given is None or schedule.shares:
            return best
        for window in dict.fromkeys((_default_window(schedule), _sized_window(schedule, self.costs))):
            if any(new > old for new, old in zip(window, given, strict=False)):
                gain = self.gain(schedule=_windowed(schedule, window))
                best = max(best, (gain, f"[{', '.join(map(str, window))}]"))
        return best

    @cached_property
    def _present(self) -> "_Course":
        return _Course(self.schedule)

    @cached_property
    def _now(self) -> float:
        """Simulated seconds of a step as it is."""
        return self._present.seconds(self.costs)


class _Course:
    """Two steps of a schedule, in the middle of a run; of very long ones, only a part of the microbatches."""

    def __init__(self, schedule: Schedule) -> None:
        fewer = max(2 * schedule.stages, _MOST // schedule.copies)
        simulated = _shorter(schedule, fewer) or schedule
        self._schedule, self._left_out = schedule, schedule.microbatches - simulated.microbatches
        self._planned = planned_steps(simulated)

    def seconds(self, costs: Costs) -> float:
        """Return the seconds of a step."""
        each = max(sum(_whole(costs, stage) for stage in stages) for stages in self._schedule.placement)
        return self._planned.seconds(costs) + (self._left_out * each if self._left_out else 0.0)


def _whole(costs: Costs, stage: int) -> float:
    return costs.forward[stage] + costs.input[stage] + costs.weight[stage]


def _shorter(schedule: Schedule, microbatches: int) -> Schedule | None:
    if schedule.shares or microbatches >= schedule.microbatches:
        return None
    try:
        return make_schedule(schedule.name, schedule.placement, microbatches, first_trainable=schedule.first_trainable)
    except ScheduleRefused:
        return None


def _windowed(schedule: Schedule, window: Sequence[int]) -> Schedule:
    name = "window" if schedule.name not in ("window", "zb-h1") else schedule.name
    return make_schedule(
        name, schedule.placement, schedule.microbatches, window=window, first_trainable=schedule.first_trainable
    )


def _default_window(schedule: Schedule) -> tuple[int, ...]:
    return tuple(min(schedule.microbatches, schedule.stages - stage) for stage in range(schedule.stages))


def _sized_window(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """Return the smallest window that hides the measured latencies behind the slowest worker."""
    forward = max(sum(costs.forward[stage] for stage in stages) for stages in schedule.placement)
    whole = max(sum(_whole(costs, stage) for stage in stages) for stages in schedule.placement)
    sized = window_for(costs.latency, forward, max(whole - forward, 1e-9))
    return tuple(min(schedule.microbatches, each) for each in sized)


def remedies(finding: Finding, trials: Trials) -> list[Remedy]:
    """Return what to do about a finding, the most useful first."""
    made = sorted(_BY_CAUSE[finding.cause](finding, trials), key=lambda each: -each.gain)
    return [each for each in made if each.gain >= _WORTH]


def _saving(do: str, trials: Trials, gain: float) -> Remedy:
    return Remedy(do, trials.found.seconds * (1 - gain), gain)


def _of_compute(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    schedule, worker = trials.schedule, finding.worker or 0
    stages = sorted({schedule.replicas.stage(copy) for copy in schedule.placement[worker]})
    if finding.since is not None:
        yield _saving("see what else runs on its machine: it was faster before", trials, finding.gain)
    if not schedule.shares:
        yield from _moved_cut(trials)
        if trials.table("schedule").get("mode", "sync") == "sync" and len(stages) == 1:
            yield _two_replicas(trials, stages[0])


def _moved_cut(trials: Trials) -> Iterator[Remedy]:
    """Yield another cut, if the present one is known as numbers of layers, or a cut by time, if it is made."""
    model, costs = trials.table("model"), trials.costs
    cut = model.get("cut")
    if isinstance(cut, list | tuple) and cut and all(isinstance(each, int) for each in cut):
        better = _better_cut(list(cut), costs)
        if better != list(cut):
            do = f"move a cut: model.cut = {better} in place of {list(cut)}"
            yield _saving(do, trials, trials.gain(_costs_by(better, list(cut), costs)))
        return
    if model.get("balance") != "time":
        parts = (costs.forward, costs.input, costs.weight)
        forward, first, second = map(_evened, parts)
        even = replace(costs, forward=forward, input=first, weight=second)
        do = f'cut by time: model.stages = {costs.stages} and model.balance = "time"'
        yield _saving(do, trials, trials.gain(even))


def _evened(times: Sequence[float]) -> tuple[float, ...]:
    return (sum(times) / len(times),) * len(times)


def _layers(cut: Sequence[int]) -> list[int]:
    """Return how many layers each stage but the last has."""
    return [end - begin for begin, end in zip([0, *cut], cut, strict=False)]


def _costs_by(cut: Sequence[int], before: Sequence[int], costs: Costs) -> Costs:
    """Return the costs by another cut: each layer takes as long as the mean of its stage; those of the last stay."""
    owner = [stage for stage, count in enumerate(_layers(before)) for _ in range(count)]
    sizes = _layers(before)

    def moved(times: Sequence[float]) -> tuple[float, ...]:
        layer = [times[stage] / sizes[stage] for stage in owner]
        edges = [0, *cut]
        sums = [sum(layer[begin:end]) for begin, end in zip(edges, [*cut, len(layer)], strict=True)]
        return (*sums[:-1], sums[-1] + times[-1])

    return replace(costs, forward=moved(costs.forward), input=moved(costs.input), weight=moved(costs.weight))


def _better_cut(cut: list[int], costs: Costs) -> list[int]:
    """Return a cut whose longest stage is shorter, by moving one edge at a time.

    Only layers whose time is known move: the last stage may become longer, and not shorter.
    """
    best, present = cut, _longest(costs)
    for _ in range(64):
        moved = (
            [each + by * (place == edge) for place, each in enumerate(best)]
            for edge in range(len(best))
            for by in (-1, 1)
        )
        valid = (
            each for each in moved if each[0] > 0 and each[-1] <= cut[-1] and all(a < b for a, b in pairwise(each))
        )
        tried = [(_longest(_costs_by(each, cut, costs)), each) for each in valid]
        if not tried or min(tried)[0] >= 0.98 * present:
            return best
        present, best = min(tried)
    return best


def _longest(costs: Costs) -> float:
    return max(_whole(costs, stage) for stage in range(costs.stages))


def _two_replicas(trials: Trials, stage: int) -> Remedy:
    costs = trials.costs

    def halved(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(each / 2 if place == stage else each for place, each in enumerate(times))

    half = replace(costs, forward=halved(costs.forward), input=halved(costs.input), weight=halved(costs.weight))
    do = f"let two workers compute it: stages.{stage}.replicas = 2, with one more worker"
    return _saving(do, trials, trials.gain(half))


def _of_wire(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    schedule = trials.schedule
    codec = trials.table("queues").get("codec") or "lossless"
    hop = finding.hop or (0, 1)
    is_narrow = bool(trials.found.steps.narrow() & {hop, (hop[1], hop[0])})
    if isinstance(codec, str) and codec in _HALF and is_narrow:
        name, part = _HALF[codec]
        do = f'send fewer bytes, since the link is narrow: queues.codec = "{name}"'
        yield _saving(do, trials, part * finding.gain)
    windowed = schedule.name in ("1f1b", "gpipe", "eager-1f1b", "window") and not schedule.shares
    if windowed and schedule.mode == "sync" and not is_narrow:
        window = _sized_window(schedule, trials.costs)
        text = f"[{', '.join(map(str, window))}]"
        if trials.table("schedule").get("window") != list(window):
            do = f'hide the way behind computing: schedule.name = "window" and schedule.window = {text}'
            other = _windowed(replace(schedule, name="window"), window)
            yield _saving(do, trials, trials.gain(schedule=other))


def _of_data(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    data = trials.table("data")
    readers = data.get("num_workers") or 0
    if data.get("dataset") is not None:
        do = f"draw ahead: data.num_workers = {max(2, 2 * readers)}"
        yield _saving(do, trials, finding.gain * (0.5 if readers else 1.0))
    else:
        do = "make the source faster, or give a data.dataset, which data.num_workers draws ahead"
        yield _saving(do, trials, finding.gain)


def _of_disk(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    every = trials.table("recovery").get("snapshot_every", 20)
    do = f"write fewer snapshots: recovery.snapshot_every = {5 * every} in place of {every}"
    yield _saving(do, trials, 0.8 * finding.gain)
    yield _saving("keep run.dir on a faster disk", trials, 0.5 * finding.gain)


def _of_window(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    gain, window = trials.better_window
    yield _saving(f"let more microbatches be in flight: schedule.window = {window}", trials, gain)


def _of_credit(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    count = trials.table("schedule").get("microbatches", trials.schedule.microbatches)
    do = f"let the first stages run further ahead: schedule.microbatches = {2 * int(count)}"
    yield _saving(do, trials, finding.gain)


def _of_room(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    every = trials.table("recovery").get("snapshot_every", 20)
    yield _saving("keep more: a larger queues.retain_bytes", trials, finding.gain)
    if every > 1:
        do = f"let queues be emptied more often: recovery.snapshot_every = {max(1, every // 2)} in place of {every}"
        yield _saving(do, trials, 0.5 * finding.gain)


def _of_script(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    do = "let the script do less between two steps, or read a loss only now and then"
    yield _saving(do, trials, finding.gain)


def _of_evaluation(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    every = trials.table("evaluation").get("every")
    known = f"evaluation.every = {4 * every} in place of {every}" if isinstance(every, int) else ""
    times = known or "a larger evaluation.every"
    yield _saving(f"evaluate less often: {times}", trials, 0.75 * finding.gain)


def _of_switching(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    do = f'keep the schedule: schedule.name = "{trials.schedule.name}" in place of "auto"'
    yield _saving(do, trials, finding.gain)


def _of_offload(finding: Finding, trials: Trials) -> Iterator[Remedy]:
    do = 'keep activations in memory: no "activations" in memory.offload or stage.N.offload, and a larger memory.limit'
    yield _saving(do, trials, finding.gain)
    yield _saving("keep run.dir on a faster disk", trials, 0.5 * finding.gain)


_BY_CAUSE: Mapping[Cause, Callable[[Finding, Trials], Iterator[Remedy]]] = {
    Cause.COMPUTE: _of_compute,
    Cause.WINDOW: _of_window,
    Cause.WIRE: _of_wire,
    Cause.DATA: _of_data,
    Cause.DISK: _of_disk,
    Cause.CREDIT: _of_credit,
    Cause.ROOM: _of_room,
    Cause.SCRIPT: _of_script,
    Cause.EVALUATION: _of_evaluation,
    Cause.SWITCHING: _of_switching,
    Cause.OFFLOAD: _of_offload,
}
