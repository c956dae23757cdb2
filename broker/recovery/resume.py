"""Which checkpoint a run begins at that is resumed as a whole: one of which all snapshots can be read.

No worker is placed before that is known. All verify their snapshots of the newest complete checkpoint, for which the
records are right too. If one cannot be read, all verify those of the newest other step of which every stage has one,
and so on:

    stage 0    20  40         40 is complete, and damaged at stage 1: every stage begins at 20
    stage 1    20  4?

    stage 0    20  40  60     likewise; but checkpoint 60 was about to be complete, or the records are older than it:
    stage 1    20  4?  60     every stage begins at 60

Once a stage has computed something it is too late: the others do not go back for one that is replaced. The script has
no snapshots: it is not waited for here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stageline.broker.control.messages import Hello
from stageline.broker.membership.member import stages_label
from stageline.pipeline.schedule import Placement


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The run begins at `step`; None: no checkpoint can be used. `damages` found in the steps that were tried first."""

    step: int | None
    damages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointPoll:
    """All workers verify their snapshots of `step`. `damages`: what was wrong with those of the steps `tried`. The run
    does not begin below `floor`, although it may keep an older checkpoint, that of the best evaluation."""

    placement: Placement
    step: int
    damages: tuple[str, ...] = ()
    tried: frozenset[int] = frozenset()
    floor: int = 0

    def absent(self, hellos: Iterable[Hello]) -> list[int]:
        """The indexes for which no worker has verified its snapshots yet."""
        read = [hello for hello in hellos if self._has_read(hello)]
        claims, anywhere = {hello.claim for hello in read}, sum(hello.claim is None for hello in read)
        return [index for index, stages in enumerate(self.placement) if stages and index not in claims][anywhere:]

    def result(self, hellos: Iterable[Hello]) -> "ResumePoint | CheckpointPoll | None":
        """The decision, or the poll for the next step; None while a worker is absent. `hellos`: of all on standby."""
        read = [hello for hello in hellos if self._has_read(hello)]
        if self.absent(read):
            return None
        unusable = self._unusable(read)
        if not unusable:
            return ResumePoint(self.step, self.damages)
        found = [damage for hello in read if hello.inspection is not None for damage in hello.inspection.damages]
        absent = f"no worker has a snapshot of step {self.step} of {stages_label(unusable)}"
        damages = (*self.damages, *dict.fromkeys(found or [absent]))
        other = max(self._others(read), default=None)
        if other is None:
            return ResumePoint(None, damages)
        return replace(self, step=other, damages=damages, tried=self.tried | {self.step})

    def _has_read(self, hello: Hello) -> bool:
        return hello.inspection is not None and hello.inspection.step == self.step

    def _unusable(self, read: list[Hello]) -> list[int]:
        """The stages whose snapshot no worker that may have their place can read."""
        return [
            stage
            for index, stages in enumerate(self.placement)
            for stage in stages
            if not any(hello.inspection and stage in hello.inspection.stages for hello in _fit(index, read))
        ]

    def _others(self, read: list[Hello]) -> set[int]:
        """Steps that were not tried, and of which there are snapshots of all stages."""
        seen = [
            {step for hello in _fit(index, read) for of, step in hello.snapshots or () if of == stage}
            for index, stages in enumerate(self.placement)
            for stage in stages
        ]
        found = set.intersection(*seen) - self.tried - {0, self.step}
        return {step for step in found if step >= self.floor}


def _fit(index: int, read: list[Hello]) -> list[Hello]:
    """Hellos of workers that may have the place."""
    return [hello for hello in read if hello.claim in (None, index)]
