"""Replicas of a stage: the copies of each stage, and the microbatches of a step that each copy has.

Copies are numbered: 0 to S-1 are the first copies of stages 0 to S-1, so a schedule without replicas has no other
numbers; further copies follow, in the order of their stages. People read labels: "1" where a stage has one copy, "1.0"
and "1.1" where it has two.

    stage      0    1    1    2          microbatches 0 1 2 3 4 5, share = [2, 1] in stage 1
    copy       0    1    3    2          copy 1 has 0 2 3 5, copy 3 has 1 4
    label      0    1.0  1.1  2

A copy's microbatches are its group. They are dealt by smooth weighted round robin, so that neighbours go to different
copies, and stay as they are for the run: the order in which gradients are added follows from them.

**Lists.** In a schedule in which stages have replicas, each copy is given what it can begin first, a backward before
a forward, with a limit on its microbatches in flight.

No list can make workers wait for each other for ever, whatever the windows are. Copies run forwards, and backwards, in
ascending order. So the lowest microbatch that is not through has nothing before it at any copy, and nothing in flight
there but itself: its next action can begin.

In flight in all copies of stage k, with r[j] replicas of stage j, and n[j] = 2 * r[j], or 1 where r[j] is 1:

    1f1b          n[k] + n[k+1] + ... + n[S-1]
    eager-1f1b    n[k] + 2 * (r[k+1] + ... + r[S-1])
    window        what is given for the stage
    gpipe         all; a copy runs all its forwards first

Replicas need two each: they begin at the same time, and the next stage, which is one worker, computes what they hand on
one after the other; with one each, half of them would wait for it.

A stage's number is divided among its copies by the number of their microbatches, and rounded up. A stage with r
replicas is taken to be r times as slow as one without: that is what replicas are for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from .action import Action, Kind, Lists
from .shape import Shape

Shares = tuple[tuple[int, ...], ...]  # [stage][replica]; what part of a step's microbatches each replica has
NAMES = ("gpipe", "1f1b", "eager-1f1b", "window")


def dealt(shares: Sequence[int], microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of each replica, in ascending order, dealt in proportion to `shares` (each 1 or more)."""
    groups: tuple[list[int], ...] = tuple([] for _ in shares)
    credit, total = [0] * len(shares), sum(shares)
    for microbatch in range(microbatches):
        credit = [have + share for have, share in zip(credit, shares, strict=True)]
        chosen = credit.index(max(credit))
        credit[chosen] -= total
        groups[chosen].append(microbatch)
    return tuple(map(tuple, groups))


@dataclass(frozen=True)
class Replicas:
    """The copies of every stage, for steps of `microbatches` microbatches."""

    shares: Shares
    microbatches: int

    @classmethod
    def single(cls, stages: int) -> "Replicas":
        """Return one copy of each of `stages` stages, which runs every microbatch."""
        return cls(((1,),) * stages, 0)

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return len(self.shares)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Stage and replica of each copy."""
        first = ((stage, 0) for stage in range(self.stages))
        further = ((stage, each) for stage, shares in enumerate(self.shares) for each in range(1, len(shares)))
        return (*first, *further)

    @property
    def copies(self) -> range:
        """Numbers of all copies."""
        return range(len(self.places))

    @cached_property
    def of_stage(self) -> tuple[tuple[int, ...], ...]:
        """Copies of each stage, by replica."""
        return tuple(
            tuple(copy for copy in self.copies if self.places[copy][0] == stage) for stage in range(self.stages)
        )

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Microbatches of each copy."""
        of_stage = [dealt(shares, self.microbatches) for shares in self.shares]
        return tuple(of_stage[stage][replica] for stage, replica in self.places)

    @cached_property
    def _having(self) -> tuple[dict[int, int], ...]:
        return tuple({each: copy for copy in copies for each in self.groups[copy]} for copies in self.of_stage)

    def stage(self, copy: int) -> int:
        """Return the stage of a copy."""
        return self.places[copy][0]

    def having(self, stage: int, microbatch: int) -> int:
        """Return the copy of `stage` that has the microbatch; the first one, `stage`, if no copy has it to itself."""
        return self._having[stage].get(microbatch, stage)

    @cached_property
    def several(self) -> bool:
        """True if some stage has several copies."""
        return len(self.places) > self.stages

    def is_replicated(self, stage: int) -> bool:
        """Return True if `stage` has several copies."""
        return len(self.shares[stage]) > 1

    def others(self, copy: int) -> tuple[int, ...]:
        """Return the other copies of the copy's stage, by replica."""
        return tuple(each for each in self.of_stage[self.stage(copy)] if each != copy)

    def label(self, copy: int) -> str:
        """Return a copy's name for people: "1", "1.0"."""
        stage, replica = self.places[copy]
        return f"{stage}.{replica}" if self.is_replicated(stage) else str(stage)

    def copy_of(self, name: str) -> int | None:
        """Return the copy with the label `name`, or else with that number; None if there is none."""
        labels = {self.label(copy): copy for copy in self.copies}
        numbers = {str(copy): copy for copy in self.copies}
        return labels.get(name, numbers.get(name))

    def queue(self, flow: str, source: int, consumer: int) -> str:
        """Return the name of the queue between two copies.

        The names are "forward-2"; "forward-2.1" if the consumer has replicas; "forward-2-from-1.0" if the source has;
        "forward-2.1-from-1.0" if both have.

        Args:
            flow: First part of the name, the data that the queue carries.
            source: Copy that puts.
            consumer: Copy that takes.
        """
        name = f"{flow}-{self.label(consumer)}"
        return f"{name}-from-{self.label(source)}" if self.is_replicated(self.stage(source)) else name

    def between(self, flow: str, source: int, consumer: int) -> dict[str, tuple[int, int]]:
        """Return the queues from the copies of stage `source` to those of stage `consumer`.

        There is a queue for each two copies that have a microbatch in common.

        Args:
            flow: First part of the names, the data that the queues carry.
            source: Stage whose copies put.
            consumer: Stage whose copies take.

        Returns:
            By name of the queue, the copy that puts and the copy that takes.
        """
        return {
            self.queue(flow, one, other): (one, other)
            for one in self.of_stage[source]
            for other in self.of_stage[consumer]
            if not set(self.groups[one]).isdisjoint(self.groups[other])
        }

    def common(self, one: int, other: int) -> tuple[int, ...]:
        """Return the microbatches that both copies have, in ascending order."""
        return tuple(sorted({*self.groups[one]} & {*self.groups[other]}))


@cache
def replicas_of(shares: Shares, microbatches: int) -> Replicas:
    """Return the one `Replicas` for these arguments, so that values derived from it are computed once."""
    return Replicas(shares, microbatches)


def in_flight(name: str, replicas: Replicas, window: Sequence[int] | None) -> list[int]:
    """Return how many microbatches each copy may have in flight: 1 or more.

    Args:
        name: Name of the schedule.
        replicas: Copies of the stages.
        window: Microbatches in flight by stage, for the schedule "window"; the copies of a stage share them.
    """
    counts = [len(each) for each in replicas.shares]
    own = [2 * count if count > 1 else 1 for count in counts]
    match name:
        case "gpipe":
            totals = [replicas.microbatches] * replicas.stages
        case "eager-1f1b":
            totals = [each + 2 * sum(counts[stage + 1 :]) for stage, each in enumerate(own)]
        case "window" if window is not None:
            totals = list(window)
        case _:
            totals = [sum(own[stage:]) for stage in range(replicas.stages)]
    return [
        max(1, math.ceil(totals[replicas.stage(copy)] * len(group) / replicas.microbatches))
        for copy, group in enumerate(replicas.groups)
    ]


def with_replicas(shape: Shape, shares: Shares, mode: str, window: Sequence[int] | None) -> Lists:
    """Return each worker's list for one step, without updates; () if `shares` is empty, so that no stage has replicas.

    Args:
        shape: Shape of the schedule.
        shares: Shares of every stage's replicas.
        mode: "sync" or "async".
        window: Microbatches in flight by stage, for the schedule "window".

    Raises:
        ScheduleRefused: Replicas do not go with the schedule, or a copy would have no microbatch.
    """
    if not shares:
        return ()
    replicas = replicas_of(shares, shape.microbatches)
    _check(shape, replicas, mode, window)
    copies = [
        _Copy(copy, replicas, limit, shape.first_trainable, forwards_first=shape.name == "gpipe")
        for copy, limit in enumerate(in_flight(shape.name, replicas, window))
    ]
    actions = list(_in_order(copies))
    return tuple(tuple(action for action in actions if action.stage in owned) for owned in shape.placement)


def _check(shape: Shape, replicas: Replicas, mode: str, window: Sequence[int] | None) -> None:
    if mode != "sync":
        raise shape.refused('replicas update together, at the end of a step; use mode = "sync"')
    if shape.name not in NAMES:
        raise shape.refused(f"stages have no replicas in it; use one of {', '.join(NAMES)}")
    if shape.name == "window" and (window is None or len(window) != replicas.stages or min(window) < 1):
        raise shape.refused(f"the window needs one number from 1 on for each of the {replicas.stages} stages")
    if shape.stages != sum(map(len, replicas.shares)):
        raise shape.refused(f"its stages have {sum(map(len, replicas.shares))} copies in all; give each one worker")
    for stage, of_stage in enumerate(replicas.shares):
        if min(of_stage) < 1:
            raise shape.refused(f"a replica of stage {stage} has a share of {min(of_stage)}; use 1 or more")
    for copy, dealt in enumerate(replicas.groups):
        if not dealt:
            raise shape.refused(
                f"stage {replicas.label(copy)} has no microbatch: shares {list(replicas.shares[replicas.stage(copy)])} "
                f"deal {shape.microbatches}; use more microbatches, or fewer replicas"
            )


_Done = dict[tuple[str, int, int], float]  # when the action of a stage on a microbatch ended


@dataclass(slots=True)
class _Copy:
    """State of a copy while the lists are made, from which its next actions follow."""

    number: int
    replicas: Replicas
    window: int
    first_trainable: int
    forwards_first: bool
    free: float = 0
    forwarded: int = 0
    backwarded: int = 0

    @property
    def stage(self) -> int:
        """Stage of the copy."""
        return self.replicas.stage(self.number)

    @property
    def dealt(self) -> tuple[int, ...]:
        """Microbatches of the copy."""
        return self.replicas.groups[self.number]

    def candidates(self, done: _Done) -> Iterator[tuple[float, bool, int, int, Action]]:
        """Yield the actions that can begin, at most a forward and a backward.

        Each is a tuple (start, is a forward, microbatch, number of the copy, action): the smallest one is to be run
        first, so that of two that start at once the backward is preferred.
        """
        stage, trains = self.stage, self.stage >= self.first_trainable
        held = self.forwarded - self.backwarded
        if self.forwarded < len(self.dealt) and (not trains or held < self.window):
            number = self.dealt[self.forwarded]
            arrived = done.get((Kind.FORWARD, stage - 1, number)) if stage else 0
            if arrived is not None:
                yield self._at(arrived, Kind.FORWARD, number)
        waits = self.forwards_first and self.forwarded < len(self.dealt)
        if trains and held and not waits:
            number, last = self.dealt[self.backwarded], stage == self.replicas.stages - 1
            arrived = 0 if last else done.get((Kind.BACKWARD, stage + 1, number))
            if arrived is not None:
                yield self._at(arrived, Kind.BACKWARD, number)

    def run(self, start: float, action: Action, done: _Done) -> None:
        """Run `action` from `start` on, and note its end in `done`."""
        slowness = len(self.replicas.of_stage[self.stage])
        forward = action.kind is Kind.FORWARD
        self.free = start + (slowness if forward else 2 * slowness)
        self.forwarded += forward
        self.backwarded += not forward
        done[action.kind, self.stage, action.microbatch] = self.free

    def _at(self, arrived: float, kind: Kind, number: int) -> tuple[float, bool, int, int, Action]:
        forward = kind is Kind.FORWARD
        return max(self.free, arrived), forward, number, self.number, Action(kind, self.number, number)


def _in_order(copies: Sequence[_Copy]) -> Iterator[Action]:
    """Yield all actions in the order of their start, in which a worker that has several copies runs them.

    Of actions that start at once, backwards come first, then lower microbatches.
    """
    done: _Done = {}
    while ready := [each for copy in copies for each in copy.candidates(done)]:
        start, _, _, copy, action = min(ready)
        copies[copy].run(start, action, done)
        yield action
