"""Scenario of a seed: the shape of a run, the weather, and the faults."""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from itertools import pairwise
from typing import get_args

from simulation.network import Weather
from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.program import (
    Neighbours,
    NormClipping,
    Pass,
    SnapshotCopies,
    Tied,
    TiedStages,
    compile_program,
    neighbours_of,
)
from stageline.pipeline.schedule import Mode, Placement, Schedule, ScheduleRefused, make_schedule
from stageline.workers.runtime.calls import CallKind
from stageline.workers.runtime.plan_calls import NO_ROUNDS

PLACEMENTS: tuple[Placement, ...] = (
    ((0,), (1,)),
    ((0, 1),),
    ((0,), (1,), (2,)),
    ((0, 2), (1,)),
    ((0,), (1, 2)),
    ((0,), (1,), (2,), (3,)),
    ((0, 3), (1,), (2,)),
    ((0, 2), (1, 3)),
    ((0, 1), (2, 3)),
)
NAMES = ("1f1b", "1f1b", "gpipe", "eager-1f1b", "interleaved-1f1b")
SPLIT = ("zb-h1", "zb-h1", "zb-v")


class PlannedFault(StrEnum):
    """Faults of a run."""

    KILL = "a worker is killed"
    KILL_ALL = "all workers are killed"
    KILL_BROKER = "the broker is killed"
    KILL_BROKER_WRITING = "the broker is killed while it writes"
    LOSE_RECORDS = "the broker is killed, its records are lost"
    OLD_RECORDS = "the broker is killed, its records are those of a while ago"
    POWER = "the power fails, the newest records are lost"
    REVOKE = "the key of a worker's machine is revoked"
    PAUSE = "a worker is paused"
    HANG = "a worker hangs in an action"
    PARTITION = "a host is cut off"
    CUT = "a connection is cut"
    RESUME = "all processes are killed, and the run is resumed"
    KILL_SCRIPT = "the script is killed"
    PAUSE_SCRIPT = "the script is paused, and another is started"
    PAUSE_RUN = "the run is paused for a while"
    LOSE_DISK = "a worker is killed, and its disk is lost"
    LOSE_DISKS = "a worker and the holder of its copies are killed, and their disks are lost"
    LEAVE = "a worker is given notice"
    DRAIN = "a command has a worker leave"


_TAMPERING = {
    PlannedFault.LOSE_RECORDS,
    PlannedFault.OLD_RECORDS,
    PlannedFault.POWER,
}


OF_SCRIPT = (PlannedFault.KILL_SCRIPT, PlannedFault.PAUSE_SCRIPT)
OF_DISKS = (PlannedFault.LOSE_DISK, PlannedFault.LOSE_DISKS)
OF_LEAVERS = (PlannedFault.LEAVE, PlannedFault.DRAIN)
_OF_OWN = {PlannedFault.RESUME, PlannedFault.PAUSE_RUN, *OF_SCRIPT, *OF_LEAVERS, *OF_DISKS}  # drawn for themselves

_MORE_CALLS = (CallKind.EVALUATE, CallKind.PREDICT)


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault, `delay` seconds after the run's `after`-th action. `number`: of processes, or of writes."""

    fault: PlannedFault
    after: int
    delay: float
    seconds: float
    number: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """`every`: steps between snapshots. `lease`, `disk` (a snapshot's mean time) in seconds. `contained`: the workers
    run in containers, restarted under the same process number, and the broker is not told that they exited."""

    seed: int
    schedule: Schedule
    passes: tuple[Pass, ...]  # what shared parameters and clipping add
    steps: int
    every: int
    window: int
    lease: float
    disk: float
    weather: Weather
    spares: int
    contained: bool
    injections: tuple[Injection, ...]
    calls: tuple[CallKind, ...] = ()  # of a script; () if there is none
    replayed_from: int | None = None  # the step from which on frozen first stages run no forwards
    rounds: Rounds = NO_ROUNDS  # of evaluation
    criterion: Criterion | None = None
    keeps_best: bool = False
    chooses: bool = False  # the broker changes the schedule
    copies: bool = False  # each machine has a disk of its own, and snapshots are copied

    @property
    def neighbours(self) -> Neighbours:
        workers = len(self.schedule.placement)
        return neighbours_of(workers, [range(workers)] if self.copies else [])

    @property
    def all_passes(self) -> tuple[Pass, ...]:
        """With the queues that carry copies."""
        return (*self.passes, SnapshotCopies(self.neighbours)) if self.copies else self.passes

    @property
    def tampers(self) -> bool:
        """Whether the broker's records are lost or old at times: with a damaged snapshot besides, a run may end."""
        return any(injection.fault in _TAMPERING for injection in self.injections)

    def sees(self, index: int | None) -> Collection[int]:
        """The stages whose snapshots worker `index` sees: containers share no folder, unless there are spares."""
        apart = self.contained and not self.spares and not self.copies
        return self.schedule.placement[index] if apart and index is not None else range(self.schedule.stages)

    def __str__(self) -> str:
        s = self.schedule
        added = "".join(f", {each}" for each in self.passes)
        shape = f"{s.mode} {s.name} {s.placement}, M {s.microbatches}, first trainable {s.first_trainable}{added}"
        injections = "; ".join(
            f"{b.fault} (action {b.after} + {b.delay:.2f} s, {b.seconds:.2f} s, {b.number})" for b in self.injections
        )
        return (
            f"{shape}, {self.steps} steps, K {self.every}, window {self.window}, lease {self.lease:g} s, "
            f"disk {self.disk:g} s, {self.weather}, {self.spares} spares, contained {self.contained}. {injections}"
            f"{'' if self.replayed_from is None else f'. Replayed from step {self.replayed_from}'}"
            f"{f'. {self.rounds}, {self.criterion}, best kept {self.keeps_best}' if self.rounds.batches else ''}"
            f"{'. The schedule changes' if self.chooses else ''}{'. Snapshots are copied' if self.copies else ''}"
            f"{'. Calls: ' if self.calls else ''}{' '.join(self.calls)}"
        )


def drawn(seed: int) -> Scenario:
    """The scenario of `seed`."""
    rng = random.Random(seed)
    schedule = _delayed(_split(_schedule(rng), random.Random(seed + 7 * 10**9)), random.Random(seed + 9 * 10**9))
    passes = _passes(schedule, random.Random(seed + 3 * 10**9), random.Random(seed + 4 * 10**9))
    steps = rng.randint(3, 8) if schedule.mode == "sync" else rng.randint(4, 14) // (2 if schedule.delays else 1)
    lease = rng.choice([1.0, 2.0])
    actions = steps * sum(map(len, compile_program(schedule, passes).step))
    evaluation = _evaluation(schedule, steps, random.Random(seed + 5 * 10**9))
    found = Scenario(
        seed,
        schedule,
        passes,
        steps,
        every=rng.randint(1, 5),
        window=rng.choice([1, 2, 3, 8]),
        lease=lease,
        disk=rng.choice([0.005, 0.05, 0.5, 2.0]),
        weather=_weather(rng),
        spares=rng.choice([0, 0, 1, 2]),
        contained=rng.random() < 0.3,
        injections=tuple(_injection(rng, actions, lease) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 6]))),
        replayed_from=_replayed_from(schedule, steps, random.Random(seed + 6 * 10**9)),
        rounds=evaluation[0],
        criterion=evaluation[1],
        keeps_best=evaluation[2],
        chooses=schedule.mode == "sync" and random.Random(seed + 7 * 10**9).random() < 0.4,
    )
    resumes = random.Random(seed + 10**9)  # of its own: the other injections of a seed are what they were without it
    if resumes.random() < 0.6 or found.tampers:
        return found
    return replace(
        found,
        injections=(
            *found.injections,
            Injection(PlannedFault.RESUME, resumes.randrange(actions // 2, actions), 0.0, 0.0, 1),
        ),
    )


def with_pauses(scenario: Scenario) -> Scenario:
    """The same scenario, in which a person pauses the run one to three times, each time for a while."""
    rng = random.Random(scenario.seed + 10 * 10**9)
    actions = scenario.steps * sum(map(len, compile_program(scenario.schedule, scenario.passes).step))
    pauses = [
        Injection(
            PlannedFault.PAUSE_RUN,
            rng.randrange(actions),
            rng.choice([0.0, rng.expovariate(1)]),
            rng.choice([0.05, 0.5, 2.0, 8.0]) * scenario.lease,
            1,
        )
        for _ in range(rng.randint(1, 3))
    ]
    return replace(scenario, injections=(*scenario.injections, *pauses))


def with_lost_disks(scenario: Scenario, *, many: bool = False) -> Scenario:
    """The same scenario on machines with disks of their own, of which one is lost; with `many`, there may be more.

    A resumed run asks no spares for snapshots, so there are none then.
    """
    if len(scenario.schedule.placement) == 1:
        return scenario
    rng = random.Random(scenario.seed + 11 * 10**9)
    actions = scenario.steps * sum(map(len, compile_program(scenario.schedule, scenario.passes).step))
    faults = OF_DISKS if many else (PlannedFault.LOSE_DISK,)
    losses = [
        Injection(rng.choice(faults), rng.randrange(actions), rng.choice([0.0, rng.expovariate(1)]), 0.0, 1)
        for _ in range(rng.randint(1, 3) if many else 1)
    ]
    resumed = any(each.fault is PlannedFault.RESUME for each in scenario.injections)
    spares = 0 if resumed else scenario.spares
    injections = (*scenario.injections, *losses)
    return replace(scenario, copies=True, keeps_best=False, spares=spares, injections=injections)


def with_leavers(scenario: Scenario) -> Scenario:
    """The same scenario, in which one to three workers leave on notice, some of it too short."""
    rng = random.Random(scenario.seed + 11 * 10**9)
    actions = scenario.steps * sum(map(len, compile_program(scenario.schedule, scenario.passes).step))
    leavers = [
        Injection(
            rng.choice(OF_LEAVERS),
            rng.randrange(actions),
            rng.choice([0.0, rng.expovariate(1)]),
            rng.choice([0.01, 0.5, 3.0, 20.0, 20.0]) * scenario.lease,
            1,
        )
        for _ in range(rng.randint(1, 3))
    ]
    return replace(scenario, injections=(*scenario.injections, *leavers))


def drawn_script(seed: int) -> Scenario:
    """The scenario of `seed` in which a script calls the workers: the same faults, and some that befall the script."""
    found, rng = replace(drawn(seed), replayed_from=None), random.Random(seed + 2 * 10**9)
    while found.schedule.mode != "sync":
        schedule = _schedule(rng)
        found = replace(found, schedule=schedule, passes=_passes(schedule, rng, rng))
    kinds = [kind for _ in range(found.steps) for kind in (CallKind.TRAIN, *_between(rng))]
    strikes = [_strike_of_script(rng, found) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    found = replace(found, rounds=NO_ROUNDS, criterion=None, keeps_best=False, chooses=False)
    return replace(found, calls=(*_between(rng), *kinds, CallKind.STOP), injections=(*found.injections, *strikes))


def _evaluation(schedule: Schedule, steps: int, rng: random.Random) -> tuple[Rounds, Criterion | None, bool]:
    """When it evaluates, in some runs; whether it may end early then, and keeps the best checkpoint."""
    if schedule.mode == "async" or rng.random() < 0.5:
        return NO_ROUNDS, None, False
    rounds = Rounds(steps, rng.randint(1, 3), rng.choice([None, 1, 2, 3]))
    if rounds.every is None:
        return rounds, Criterion(), False
    return rounds, Criterion(patience=rng.choice([None, None, 1, 2])), rng.random() < 0.5


def _between(rng: random.Random) -> list[CallKind]:
    """Calls of a script between two training steps."""
    return rng.choices(_MORE_CALLS, k=rng.choice([0, 0, 0, 1, 2]))


def _strike_of_script(rng: random.Random, scenario: Scenario) -> Injection:
    actions = scenario.steps * sum(map(len, compile_program(scenario.schedule, scenario.passes).step))
    delay, seconds = rng.choice([0.0, rng.expovariate(1)]), rng.choice([0.1, 0.8, 1.5, 3.0]) * scenario.lease
    return Injection(rng.choice(OF_SCRIPT), rng.randrange(actions), delay, seconds, 1)


def _schedule(rng: random.Random) -> Schedule:
    placement = rng.choice(PLACEMENTS)
    stages = sum(map(len, placement))
    frozen = rng.choice([0, 0, 0, rng.randrange(stages)])
    if rng.random() < 0.3:
        return _made("1f1b", placement, 1, "async", frozen)
    return _made(rng.choice(NAMES), placement, rng.randint(1, 4), "sync", frozen)


def _split(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same shape, in some runs with backwards in two halves."""
    s = schedule
    if s.mode == "async" or rng.random() < 0.75:
        return s
    return _made(rng.choice(SPLIT), s.placement, s.microbatches, "sync", s.first_trainable)


def _delayed(schedule: Schedule, rng: random.Random) -> Schedule:
    """The same shape, in a third of the asynchronous runs with an update for several microbatches."""
    s = schedule
    if s.mode == "sync" or rng.random() < 2 / 3:
        return s
    return _made("2bw", s.placement, s.stages + rng.randint(0, 1), "async", s.first_trainable)


def _passes(schedule: Schedule, of_ties: random.Random, of_clips: random.Random) -> tuple[Pass, ...]:
    return (*_ties(schedule, of_ties), *_clips(schedule, of_clips))


def _ties(schedule: Schedule, rng: random.Random) -> tuple[TiedStages, ...]:
    """In some runs, stages share parameters."""
    trained = range(schedule.first_trainable, schedule.stages)
    if schedule.mode == "async" or len(trained) < 2 or rng.random() < 0.6:
        return ()
    sharing = sorted(rng.sample(trained, rng.randint(2, min(3, len(trained)))))
    return (TiedStages(tuple(pairwise(sharing)), rng.choice(get_args(Tied))),)


def _replayed_from(schedule: Schedule, steps: int, rng: random.Random) -> int | None:
    """Of half the runs in which the first stages are frozen."""
    return rng.randrange(1, steps) if schedule.first_trainable and rng.random() < 0.5 else None


def _clips(schedule: Schedule, rng: random.Random) -> tuple[NormClipping, ...]:
    """In some runs, gradients are clipped by their norm over all stages."""
    return () if schedule.mode == "async" or rng.random() < 0.75 else (NormClipping(),)


@cache
def _made(name: str, placement: Placement, microbatches: int, mode: Mode, frozen: int) -> Schedule:
    made = partial(make_schedule, placement=placement, microbatches=microbatches, first_trainable=frozen)
    try:
        return made(name, mode=mode)
    except ScheduleRefused:  # interleaving is not for every shape
        return made("1f1b")


def _weather(rng: random.Random) -> Weather:
    drop, repeat, overtake = (rng.choice([0.0, 0.0, 0.02, 0.1]) for _ in range(3))
    return Weather(drop, repeat, overtake, rng.choice([0.001, 0.005, 0.05]))


def _injection(rng: random.Random, actions: int, lease: float) -> Injection:
    fault = rng.choice(
        [*(fault for fault in PlannedFault if fault not in _OF_OWN), PlannedFault.KILL, PlannedFault.KILL]
    )
    delay = rng.choice([0.0, rng.expovariate(20), rng.expovariate(1)])
    return Injection(fault, rng.randrange(actions), delay, rng.choice([0.1, 0.8, 1.5, 3.0]) * lease, rng.randint(1, 4))
