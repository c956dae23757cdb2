"""Records of steps as workers would report them, of a run that is slow for known reasons. Its own small simulation:

each worker runs its program in order, takes what the others have sent, and pauses where it is told to.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import LEAST, TimedAction, TimedWait, WaitCause
from stageline.broker.slowness.pace import RunPace
from stageline.pipeline.schedule import Action, Kind, Schedule, make_schedule
from support.packed import packed_times
from support.shapes import line

EPOCH = 1_790_000_000.0


@dataclass(frozen=True, slots=True)
class SlowRun:
    """A run. Times are in seconds, without the noise.

    Attributes:
        schedule: The schedule of its steps.
        forward: By stage; a backward takes twice as long.
        lag: Of a message, by the lower stage of its hop.
        transfer: Seconds for which a message keeps each link busy.
        data: Seconds in which a batch is drawn, by the first stage and by the last.
        disk: Seconds for which each stage waits for the disk after each `every`th step.
        evaluation: Seconds of a round of evaluation, likewise.
        switching: Seconds for which each stage waits for the order of a schedule, likewise.
        credit: Seconds for which the first stage waits for credit before each forward.
        room: Seconds for which the first stage waits for room after the first forward of each fourth step.
        script: Seconds for which all wait for the script before each step.
        offload: Seconds of each backward in which activations come from files.
        noise: Spread of all times, in parts.
        changes: Stage, step and factor: from that step on, the stage takes so many times as long.
        ahead: Seconds by which the clock of each worker is behind the broker's.
    """

    schedule: Schedule
    forward: tuple[float, ...]
    lag: tuple[float, ...]
    transfer: float = 0.0
    data: float = 0.0
    disk: float = 0.0
    evaluation: float = 0.0
    switching: float = 0.0
    credit: float = 0.0
    room: float = 0.0
    script: float = 0.0
    offload: float = 0.0
    every: int = 20
    noise: float = 0.05
    changes: tuple[int, int, float] | None = None
    ahead: dict[int, float] = field(default_factory=dict)

    def records(self, steps: int, seed: int) -> list[StepRecord]:
        """The records of the first steps, in the order of steps."""
        return _Simulation(self, Random(seed)).run(steps)

    def pace(self, steps: int, seed: int) -> RunPace:
        """The pace of a run that has reported these steps."""
        pace = RunPace()
        for record in self.records(steps, seed):
            pace.note([record])
            pace.reached(record.step + 1, EPOCH + record.step)
        return pace


class _Simulation:
    def __init__(self, run: SlowRun, random: Random) -> None:
        self._run, self._random = run, random
        self._sent: dict[tuple[int, bool, int, int], float] = {}  # arrival, by step, direction, taker and microbatch
        self._link_free: dict[tuple[bool, int], float] = {}
        self._entries: dict[tuple[int, int], list[TimedAction | TimedWait]] = defaultdict(list)
        self._ended: dict[int, dict[int, float]] = defaultdict(dict)  # by step and worker

    def run(self, steps: int) -> list[StepRecord]:
        schedule = self._run.schedule
        programs = [list(schedule.program(worker, range(steps))) for worker in range(len(schedule.placement))]
        free, at = [EPOCH] * len(programs), [0] * len(programs)
        while any(at[worker] < len(each) for worker, each in enumerate(programs)):
            for worker, program in enumerate(programs):
                while at[worker] < len(program) and (end := self._act(worker, free[worker], *program[at[worker]])):
                    free[worker], at[worker] = end, at[worker] + 1
        return [
            StepRecord(stage, step, packed_times(self._entries[stage, step]))
            for step in range(steps)
            for stage in range(schedule.copies)
        ]

    def _act(self, worker: int, free: float, step: int, action: Action) -> float | None:
        """The end of an action that begins when it can; None if its message has not been sent yet."""
        run, entries = self._run, self._entries[action.stage, step]
        forward, stage = action.kind == Kind.FORWARD, action.stage
        if (action.kind == Kind.UPDATE) or (stage == (0 if forward else run.schedule.stages - 1)):
            arrival = free
        elif (step, forward, stage, action.microbatch) in self._sent:
            arrival = self._sent[step, forward, stage, action.microbatch]
        else:
            return None
        first = not entries and step > 0
        if first and run.script and (before := self._ended[step - 1]) and len(before) < len(run.schedule.placement):
            return None
        start = free
        if first and step % run.every == 0:
            start = self._pause(entries, WaitCause.DISK, start, run.disk)
            start = self._pause(entries, WaitCause.EVALUATION, start, run.evaluation)
            start = self._pause(entries, WaitCause.SWITCHING, start, run.switching)
        if first and run.script:
            start = self._wait(entries, WaitCause.SCRIPT, None, start, max(self._ended[step - 1].values()) + run.script)
        other = stage - 1 if forward else stage + 1
        start = self._wait(entries, WaitCause.MESSAGE, other, start, arrival)
        if forward and stage == 0:
            start = self._pause(entries, WaitCause.CREDIT, start, run.credit)
        start += self._noisy(2e-5)
        data = self._noisy(run.data) if self._draws(stage, forward, action.microbatch) else 0.0
        if data > LEAST:
            entries.append(self._shifted(worker, TimedWait(WaitCause.DATA, None, start, start + data)))
        held = self._noisy(run.offload) if run.offload and action.kind == Kind.BACKWARD else 0.0
        if held > LEAST:
            entries.append(self._shifted(worker, TimedWait(WaitCause.OFFLOAD, None, start, start + held)))
        end = start + data + held + self._noisy(self._seconds(action, step))
        behind = run.ahead.get(worker, 0.0)
        entries.append((action, start - behind, end - behind))
        if forward and stage == 0 and action.microbatch == 0 and step % 4 == 0:
            end = self._pause(entries, WaitCause.ROOM, end, run.room)
        self._send(step, action, end)
        if action.kind == Kind.UPDATE:
            self._ended[step][worker] = end
        return end

    def _draws(self, stage: int, forward: bool, microbatch: int) -> bool:
        return forward and microbatch == 0 and stage in (0, self._run.schedule.stages - 1)

    def _seconds(self, action: Action, step: int) -> float:
        run = self._run
        seconds = run.forward[action.stage] * {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.get(action.kind, 0.05)
        if run.changes and action.stage == run.changes[0] and step >= run.changes[1]:
            seconds *= run.changes[2]
        return seconds

    def _send(self, step: int, action: Action, end: float) -> None:
        forward = action.kind == Kind.FORWARD
        taker = action.stage + 1 if forward else action.stage - 1
        if action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT) and 0 <= taker < self._run.schedule.stages:
            lag = self._noisy(self._run.lag[min(action.stage, taker)])
            free = max(end, self._link_free.get((forward, taker), end)) + self._noisy(self._run.transfer)
            self._link_free[forward, taker] = free
            self._sent[step, forward, taker, action.microbatch] = free + lag

    def _pause(self, entries: list[TimedAction | TimedWait], cause: WaitCause, start: float, seconds: float) -> float:
        return self._wait(entries, cause, None, start, start + self._noisy(seconds))

    def _wait(
        self, entries: list[TimedAction | TimedWait], cause: WaitCause, other: int | None, start: float, until: float
    ) -> float:
        if until - start < LEAST:
            return max(start, until)
        entries.append(self._shifted_wait(cause, other, start, until))
        return until

    def _shifted_wait(self, cause: WaitCause, other: int | None, start: float, end: float) -> TimedWait:
        return TimedWait(cause, other, start, end)

    def _shifted(self, worker: int, wait: TimedWait) -> TimedWait:
        behind = self._run.ahead.get(worker, 0.0)
        return wait._replace(start=wait.start - behind, end=wait.end - behind)

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self._run.noise))


KINDS = (
    *("healthy", "stage", "link", "data", "disk", "window", "two"),
    *("credit", "room", "evaluation", "script", "switching"),
)
Named = tuple[str, int | None]  # a cause, and the worker or the lower stage of the hop that it names


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """A run drawn at random, the causes that are right for it, and the plan's settings that matter."""

    run: SlowRun
    right: frozenset[Named]
    settings: dict[str, dict[str, object]]


def drawn(kind: str, seed: int) -> DrawnRun:
    """A run that is slow for a reason of this kind, drawn at random in its place and its size."""
    random = Random(f"{kind}/{seed}")
    stages, microbatches = random.randint(2, 5), random.choice([4, 8, 12])
    base = random.uniform(0.002, 0.02)
    forward = [base * random.uniform(0.93, 1.07) for _ in range(stages)]
    lag = [base * random.uniform(0.01, 0.04) for _ in range(stages - 1)]
    step, right = base * 3 * (microbatches + stages - 1), set[Named]()
    pauses: dict[str, float] = {}

    def slow_stage() -> None:
        place = random.randrange(stages)
        forward[place] *= random.uniform(1.8, 4)
        right.add(("compute", place))

    def slow_link() -> None:
        place = random.randrange(stages - 1)
        lag[place] = base * random.uniform(1.5, 5)
        right.add(("wire", place))

    def slow_data() -> None:
        pauses["data"] = step * random.uniform(0.25, 1)
        right.add(("data", None))

    def slow_disk() -> None:
        pauses["disk"] = 20 * step * random.uniform(0.25, 1)
        right.add(("disk", None))

    ways = {"stage": slow_stage, "link": slow_link, "data": slow_data, "disk": slow_disk}
    for each in random.sample(sorted(ways), 2) if kind == "two" else [kind]:
        if each in ways:
            ways[each]()
    pauses |= _paused(kind, step, base, random)
    right |= {(each, None) for each in pauses if each not in ("data", "disk")}
    placement, settings = line(stages), {"data": {"dataset": "data.py:train"}}
    schedule = make_schedule("1f1b", placement, microbatches, first_trainable=int(kind == "credit"))
    if kind == "window":
        schedule = make_schedule("window", placement, microbatches, window=[1] * stages)
        settings["schedule"] = {"window": [1] * stages}
        right.add(("window", None))
    return DrawnRun(SlowRun(schedule, tuple(forward), tuple(lag), **pauses), frozenset(right), settings)


def _paused(kind: str, step: float, base: float, random: Random) -> dict[str, float]:
    """The pauses of a run whose steps take `step` seconds without them, and forwards `base`."""
    match kind:
        case "credit":
            return {"credit": base * random.uniform(4, 8)}
        case "room":
            return {"room": 4 * step * random.uniform(0.25, 1)}
        case "evaluation" | "switching":
            return {kind: 20 * step * random.uniform(0.25, 1)}
        case "script":
            return {"script": step * random.uniform(0.25, 1)}
        case _:
            return {}


def named(facts: dict[str, object]) -> frozenset[Named]:
    """The causes that an answer names, each with its worker or the lower stage of its hop."""
    found: list[dict[str, object]] = facts["findings"]  # type: ignore[assignment]
    return frozenset(
        (str(each["cause"]), each["hop"][0] if each["hop"] else each["worker"])  # type: ignore[index, misc]
        for each in found
    )
