"""The lists of a schedule in which stages have replicas: each copy is given what it can begin first, a backward before
a forward, with at most so many microbatches in flight.

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

from .action import Action, Kind
from .replicas import Replicas
from .shape import Shape

NAMES = ("gpipe", "1f1b", "eager-1f1b", "window")


def in_flight(name: str, replicas: Replicas, window: Sequence[int] | None) -> list[int]:
    """How many microbatches each copy may have in flight: 1 or more."""
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


def replicated(shape: Shape, replicas: Replicas, window: Sequence[int] | None) -> tuple[tuple[Action, ...], ...]:
    """Each worker's list for one step, without updates."""
    copies = [
        _Copy(copy, replicas, limit, shape.first_trainable, forwards_first=shape.name == "gpipe")
        for copy, limit in enumerate(in_flight(shape.name, replicas, window))
    ]
    actions = list(_in_order(copies))
    return tuple(tuple(action for action in actions if action.stage in owned) for owned in shape.placement)


def forwards(shape: Shape, replicas: Replicas) -> tuple[tuple[Action, ...], ...]:
    """Each worker's list of an evaluated batch: all microbatches, through the first copies alone."""
    once = Replicas(((1,),) * replicas.stages, replicas.microbatches)
    actions = list(_in_order([_Copy(stage, once, 1, once.stages, forwards_first=True) for stage in once.copies]))
    return tuple(tuple(action for action in actions if action.stage in owned) for owned in shape.placement)


_Done = dict[tuple[str, int, int], float]  # when the action of a stage on a microbatch ended


@dataclass(slots=True)
class _Copy:
    """What a copy may do next."""

    number: int
    replicas: Replicas
    limit: int
    first_trainable: int
    forwards_first: bool
    free: float = 0
    forwarded: int = 0
    backwarded: int = 0

    @property
    def stage(self) -> int:
        return self.replicas.stage(self.number)

    @property
    def group(self) -> tuple[int, ...]:
        return self.replicas.groups[self.number]

    def candidates(self, done: _Done) -> Iterator[tuple[float, bool, int, int, Action]]:
        """What can begin, when; of those that begin at once the first is to be preferred."""
        stage, trains = self.stage, self.stage >= self.first_trainable
        held = self.forwarded - self.backwarded
        if self.forwarded < len(self.group) and (not trains or held < self.limit):
            number = self.group[self.forwarded]
            arrived = done.get((Kind.FORWARD, stage - 1, number)) if stage else 0
            if arrived is not None:
                yield self._at(arrived, Kind.FORWARD, number)
        waits = self.forwards_first and self.forwarded < len(self.group)
        if trains and held and not waits:
            number, last = self.group[self.backwarded], stage == self.replicas.stages - 1
            arrived = 0 if last else done.get((Kind.BACKWARD, stage + 1, number))
            if arrived is not None:
                yield self._at(arrived, Kind.BACKWARD, number)

    def run(self, start: float, action: Action, done: _Done) -> None:
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
    """All actions in the order of their start: a worker that has several copies runs them in this order."""
    done: _Done = {}
    while ready := [each for copy in copies for each in copy.candidates(done)]:
        start, _, _, copy, action = min(ready)
        copies[copy].run(start, action, done)
        yield action
