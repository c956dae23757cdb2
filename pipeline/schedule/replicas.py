"""Replicas of a stage: which copies of stages there are, and which microbatches of a step each of them has.

Copies are numbered: 0 to S-1 are the first copies of stages 0 to S-1, so a schedule without replicas has no other
numbers; further copies follow, in the order of their stages. People read labels: "1" where a stage has one copy, "1.0"
and "1.1" where it has two.

    stage      0    1    1    2          microbatches 0 1 2 3 4 5, share = [2, 1] in stage 1
    copy       0    1    3    2          copy 1 has 0 2 3 5, copy 3 has 1 4
    label      0    1.0  1.1  2

A copy's microbatches are its group. They are dealt by smooth weighted round robin, so that neighbours go to different
copies, and stay as they are for the run: the order in which gradients are added follows from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

Shares = tuple[tuple[int, ...], ...]  # [stage][replica]; what part of a step's microbatches each replica has


def dealt(shares: Sequence[int], microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The microbatches of each replica, in ascending order: in proportion to `shares`, which are from 1 on."""
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
    """The copies of every stage, for steps of so many `microbatches`."""

    shares: Shares
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.shares)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The stage and the replica that each copy is."""
        first = ((stage, 0) for stage in range(self.stages))
        further = ((stage, each) for stage, shares in enumerate(self.shares) for each in range(1, len(shares)))
        return (*first, *further)

    @property
    def copies(self) -> range:
        return range(len(self.places))

    @cached_property
    def of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The copies of each stage, by replica."""
        return tuple(
            tuple(copy for copy in self.copies if self.places[copy][0] == stage) for stage in range(self.stages)
        )

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The microbatches of each copy."""
        of_stage = [dealt(shares, self.microbatches) for shares in self.shares]
        return tuple(of_stage[stage][replica] for stage, replica in self.places)

    @cached_property
    def _having(self) -> tuple[dict[int, int], ...]:
        return tuple({each: copy for copy in copies for each in self.groups[copy]} for copies in self.of_stage)

    def stage(self, copy: int) -> int:
        return self.places[copy][0]

    def having(self, stage: int, microbatch: int) -> int:
        """The copy of `stage` that has the microbatch."""
        return self._having[stage][microbatch]

    @cached_property
    def several(self) -> bool:
        """True if some stage has several copies."""
        return len(self.places) > self.stages

    def is_replicated(self, stage: int) -> bool:
        return len(self.shares[stage]) > 1

    def others(self, copy: int) -> tuple[int, ...]:
        """The other copies of its stage, by replica."""
        return tuple(each for each in self.of_stage[self.stage(copy)] if each != copy)

    def label(self, copy: int) -> str:
        """ "1", "1.0": a copy for people."""
        stage, replica = self.places[copy]
        return f"{stage}.{replica}" if self.is_replicated(stage) else str(stage)

    def copy_of(self, name: str) -> int | None:
        """The copy with this label, or else with this number; None if there is none."""
        labels = {self.label(copy): copy for copy in self.copies}
        numbers = {str(copy): copy for copy in self.copies}
        return labels.get(name, numbers.get(name))

    def queue(self, flow: str, source: int, consumer: int) -> str:
        """The name of the queue between two copies: "forward-2", "forward-2.1", "forward-2.1-from-1.0"."""
        name = f"{flow}-{self.label(consumer)}"
        return f"{name}-from-{self.label(source)}" if self.is_replicated(self.stage(source)) else name

    def between(self, flow: str, source: int, consumer: int) -> dict[str, tuple[int, int]]:
        """The queues from the copies of stage `source` to those of `consumer`: for each, the copy that puts and the one
        that takes. There is one for each two that have some microbatch."""
        return {
            self.queue(flow, one, other): (one, other)
            for one in self.of_stage[source]
            for other in self.of_stage[consumer]
            if not set(self.groups[one]).isdisjoint(self.groups[other])
        }

    def common(self, one: int, other: int) -> tuple[int, ...]:
        """The microbatches that both copies have, in ascending order."""
        return tuple(sorted({*self.groups[one]} & {*self.groups[other]}))


@cache
def replicas_of(shares: Shares, microbatches: int) -> Replicas:
    """The same value each time: what follows from it is computed once."""
    return Replicas(shares, microbatches)
