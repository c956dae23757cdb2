"""Ranking of the schedules that a run may take: a step of each is simulated with the measured times.

Candidates are all schedules of the catalogue that accept the run's placement, and windows for its latencies. Those
that do not fit into the memory limit are left out.

The halves of a backward may take longer than the whole, since both read the same weights and activations. A schedule
that runs halves is refused if they take more than 1.15 times as long as the whole. Until they are measured, it is
simulated as if they took as long as the whole; this tells if measuring them is worth while.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stageline.pipeline.program import check_schedule
from stageline.pipeline.schedule import Placement, Schedule, ScheduleRefused, make_schedule, schedule_names, window_for

from .measured import MeasuredTimes

Window = tuple[int, ...]
Taken = Callable[[Sequence[int], Sequence[int]], int]  # bytes, for microbatches in flight and between their halves


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory that a stage takes on its worker, in bytes.

    Attributes:
        fixed: Weights, gradients and optimizer state.
        microbatch: Further bytes for each microbatch in flight.
        halfway: Further bytes for each microbatch between the halves of its backward. None if the stage cannot split
            backwards.
    """

    fixed: int
    microbatch: int
    halfway: int | None = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule to simulate, with its `window` if it has one; or the `reason` why this placement cannot have it."""

    name: str
    window: tuple[int, ...] | None = None
    schedule: Schedule | None = None
    reason: str = ""

    @property
    def halves(self) -> bool:
        """True if the schedule runs backwards in two halves."""
        return self.schedule is not None and self.schedule.halves_backwards


def candidates(
    placement: Placement, microbatches: int, times: MeasuredTimes, taken: Taken, limit: int
) -> Iterator[Candidate]:
    """Yield every schedule of the catalogue, in the catalogue's order, some with several windows.

    Args:
        placement: The stages of each worker.
        microbatches: Microbatches of a step.
        times: Measured times, from which windows are sized.
        taken: Returns the bytes of the worker that takes most, given the microbatches in flight on each stage and those
            between the halves of their backwards.
        limit: Bytes that a worker may take. A window is made smaller until it fits.
    """
    for name in schedule_names():
        for window in _windows(name, placement, microbatches, times, taken, limit):
            yield _candidate(name, window, placement, microbatches, times.first_trainable)


def _candidate(
    name: str, window: Window | None, placement: Placement, microbatches: int, first_trainable: int
) -> Candidate:
    try:
        made = make_schedule(name, placement, microbatches, window=window, first_trainable=first_trainable)
    except ScheduleRefused as refused:
        return Candidate(name, window, reason=refused.reason)
    return Candidate(name, window, made)


def _windows(
    name: str, placement: Placement, microbatches: int, times: MeasuredTimes, taken: Taken, limit: int
) -> list[Window | None]:
    """Return the windows with which to simulate schedule `name`; None stands for the schedule's own.

    For zb-h1 these are 1F1B's window (None), the window sized for the latencies, and a window with one more microbatch
    for each hop, which lets gradients of weights fill the end of a step.
    """
    stages = len(times.forward)

    def whole(window: Window) -> int:
        return taken(window, ())

    def halved(window: Window) -> int:
        return taken(window[:1] * stages, [window[0] - each + 1 for each in window])

    match name:
        case "window":
            return [fitting(sized_window(placement, microbatches, times), whole, limit)]
        case "zb-h1":
            sized = sized_window(placement, microbatches, times)
            roomier = tuple(
                min(microbatches, each + hops) for each, hops in zip(sized, range(stages)[::-1], strict=True)
            )
            fit = dict.fromkeys(fitting(window, halved, limit) for window in (sized, roomier))
            return [None, *(window for window in fit if window != tuple(range(stages, 0, -1)))]
        case _:
            return [None]


def sized_window(placement: Placement, microbatches: int, times: MeasuredTimes) -> Window:
    """Return the smallest window that hides the measured latencies behind the slowest worker.

    Args:
        placement: The stages of each worker.
        microbatches: Microbatches of a step, which no entry of the window exceeds.
        times: Measured times.
    """
    costs = times.costs(halved=False)
    forward = max(sum(costs.forward[stage] for stage in stages) for stages in placement)
    whole = [
        sum(costs.forward[stage] + costs.input[stage] + costs.weight[stage] for stage in stages) for stages in placement
    ]
    window = window_for(times.latency, forward, max(max(whole) - forward, 1e-9))
    return tuple(min(microbatches, each) for each in window)


def fitting(window: Window, taken: Callable[[Window], int], limit: int) -> Window:
    """Return `window`, made smaller until it takes at most `limit` bytes.

    The largest entry is lowered by one repeatedly; the result is 1 everywhere if nothing larger fits. Each stage keeps
    at least as many microbatches as the next one.

    Args:
        window: Microbatches in flight, by stage; no entry is larger than the one before it.
        taken: Returns the bytes that a window takes on the worker that takes most.
        limit: Bytes.
    """
    while taken(window) > limit and window[0] > 1:
        most = window[0]
        last = max(stage for stage, each in enumerate(window) if each == most)
        window = tuple(each - (stage == last) for stage, each in enumerate(window))
    return window


MOST_HALVING = 1.15  # times the whole backward that its halves may take
ALIKE = 1.02  # times the shortest step: schedules up to there count as equally fast, and memory decides


@dataclass(frozen=True, slots=True)
class RankedSchedule:
    """A schedule with the result of its simulation.

    Attributes:
        name: Name in the catalogue.
        window: Microbatches in flight by stage, for a schedule with a window.
        seconds: Time of a step. None if the run cannot take the schedule.
        in_flight: Most microbatches in flight, by stage.
        bytes: Memory of the worker that takes most.
        reason: Why the run cannot take the schedule, "" if it can.
        halves: True if the schedule accepts the placement and runs backwards in two halves.
        at_best: Time of a step if the halves take no longer than the whole backward. None unless the schedule runs
            halves that are not measured yet.
    """

    name: str
    window: tuple[int, ...] | None
    seconds: float | None
    in_flight: tuple[int, ...] = ()
    bytes: int = 0
    reason: str = ""
    halves: bool = False
    at_best: float | None = None

    @property
    def title(self) -> str:
        """Name and window for people: "1f1b", "window 7,4,1"."""
        return self.name if self.window is None else f"{self.name} {','.join(map(str, self.window))}"


@dataclass(slots=True)
class Ranking:
    """Ranking in progress: each `advance` ranks one schedule, since simulating a long step takes a while.

    Attributes:
        placement: The stages of each worker.
        microbatches: Microbatches of a step.
        times: Measured times to simulate with.
        stages: Memory of each stage.
        limit: Bytes that a worker may take.
        found: Schedules ranked so far.
    """

    placement: Placement
    microbatches: int
    times: MeasuredTimes
    stages: Mapping[int, StageBytes]
    limit: int
    found: list[RankedSchedule] = field(default_factory=list)
    _left: Iterator[Candidate] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the first candidate."""
        self._left = candidates(self.placement, self.microbatches, self.times, self.taken, self.limit)

    def advance(self) -> bool:
        """Rank the next schedule. Returns False if there is none."""
        candidate = next(self._left, None)
        if candidate is not None:
            self.found.append(self._ranked(candidate))
        return candidate is not None

    def best(self, given_up: Collection[tuple[str, tuple[int, ...] | None]] = ()) -> RankedSchedule | None:
        """Return the schedule with the least memory among the fastest, without those in `given_up` (name and window).

        Steps up to `ALIKE` times as long as the shortest count as equally fast. Returns None if no schedule fits.
        """
        left = (each for each in self.found if (each.name, each.window) not in given_up)
        possible = [(each.seconds, each) for each in left if each.seconds is not None]
        if not possible:
            return None
        shortest = min(seconds for seconds, _ in possible)
        return min((each for seconds, each in possible if seconds <= ALIKE * shortest), key=lambda each: each.bytes)

    def worth_measuring(self, times_as_fast: float) -> RankedSchedule | None:
        """Return the schedule to run next in order to measure halves of backwards, None if there is none.

        At best, this schedule is more than `times_as_fast` times as fast as every schedule whose time is known.
        """
        known = [each.seconds for each in self.found if each.seconds is not None]
        open_ = [(each.at_best, each) for each in self.found if each.at_best is not None]
        if not open_ or not known:
            return None
        seconds, found = min(open_, key=lambda pair: pair[0])
        return found if min(known) > times_as_fast * seconds else None

    def like(self, name: str, window: Sequence[int] | None) -> RankedSchedule:
        """Return the schedule of this name and window, simulated with these times; it need not be among `found`."""
        given = None if window is None else tuple(window)
        same = (each for each in self.found if (each.name, each.window) == (name, given))
        found = next(same, None)
        return found if found is not None else self._ranked(self._made(name, given))

    def taken(self, in_flight: Sequence[int], halfway: Sequence[int] = ()) -> int:
        """Return the bytes of the worker that takes most.

        Args:
            in_flight: Microbatches in flight, by stage.
            halfway: Microbatches between the halves of their backwards, by stage. Empty for none.
        """
        between = halfway or [0] * len(in_flight)

        def of_stage(stage: int) -> int:
            held = self.stages[stage]
            return held.fixed + held.microbatch * in_flight[stage] + (held.halfway or 0) * between[stage]

        return max(sum(map(of_stage, stages)) for stages in self.placement)

    def _made(self, name: str, window: tuple[int, ...] | None) -> Candidate:
        first = self.times.first_trainable
        made = make_schedule(name, self.placement, self.microbatches, window=window, first_trainable=first)
        return Candidate(name, window, made)

    def _ranked(self, candidate: Candidate) -> RankedSchedule:
        name, window, schedule = candidate.name, candidate.window, candidate.schedule
        if schedule is None:
            return RankedSchedule(name, window, None, reason=candidate.reason)
        verdict = check_schedule(schedule, self.times.costs(halved=candidate.halves))
        taken = self.taken(verdict.stage_peak, verdict.halfway_peak)
        seconds = max(verdict.span, self.microbatches * max(self.times.transfer, default=0.0))
        ranked = RankedSchedule(name, window, seconds, verdict.stage_peak, taken, halves=candidate.halves)
        if why := self._refusal(ranked):
            return replace(ranked, seconds=None, reason=why)
        if candidate.halves and self.times.halving is None:
            why = f"the halves of backwards are not measured; at best, a step takes {seconds:.3g} s"
            return replace(ranked, seconds=None, reason=why, at_best=seconds)
        return ranked

    def _refusal(self, ranked: RankedSchedule) -> str:
        """Return why the run cannot take the schedule, "" if it can."""
        if ranked.halves and (whole := [stage for stage, held in sorted(self.stages.items()) if held.halfway is None]):
            named = f"stage {whole[0]}" if len(whole) == 1 else f"stages {', '.join(map(str, whole))}"
            return f"backwards of {named} cannot be split in two halves, since activations are recomputed there"
        halving = self.times.halving
        if ranked.halves and halving is not None and halving > MOST_HALVING:
            return f"the halves of a backward take {halving:.2f} times as long as the whole, more than {MOST_HALVING}"
        if ranked.bytes > self.limit:
            return f"a worker would take {ranked.bytes} bytes, more than schedule.memory"
        return ""
