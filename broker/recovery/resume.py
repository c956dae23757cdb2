"""At which checkpoint a run begins that is resumed as a whole: one whose snapshots can all be used.

Nobody is given a place before that is known. Everybody reads its snapshots of the checkpoint that the records call the
newest complete one: what was before it is in the records, too. If one of them cannot be used, everybody reads those of
the newest other step of which there is one of each stage, and so on:

    stage 0    20  40         40 is complete, and damaged at stage 1: every stage begins at 20
    stage 1    20  4?

    stage 0    20  40  60     likewise; but checkpoint 60 was about to be complete, or the records are older than it:
    stage 1    20  4?  60     every stage begins at 60

Once a stage has computed something it is too late: the others do not go back for one that is replaced.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stageline.broker.control.protocol import Hello
from stageline.broker.membership.member import stages_in_words
from stageline.pipeline.schedule import Placement


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The run begins at `step`; None: nowhere. `damages`: what was wrong with the steps asked about first."""

    step: int | None
    damages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointPoll:
    """Everybody is asked about the snapshots of `step`. `damages`: what was wrong with those of the steps `tried`."""

    placement: Placement
    step: int
    damages: tuple[str, ...] = ()
    tried: frozenset[int] = frozenset()

    def absent(self, hellos: Iterable[Hello]) -> list[int]:
        """The indexes for which nobody has come yet who has read its snapshots."""
        read = [hello for hello in hellos if self._has_read(hello)]
        claims, anywhere = {hello.claim for hello in read}, sum(hello.claim is None for hello in read)
        return [index for index in range(len(self.placement)) if index not in claims][anywhere:]

    def look(self, hellos: Iterable[Hello]) -> "ResumePoint | CheckpointPoll | None":
        """The decision, or another question; None as long as somebody is absent. `hellos`: of all that are there."""
        read = [hello for hello in hellos if self._has_read(hello)]
        if self.absent(read):
            return None
        unusable = list(self._unusable(read))
        if not unusable:
            return ResumePoint(self.step, self.damages)
        damages = (*self.damages, *dict.fromkeys([*_told(read), *self._unheard(unusable, read)]))
        other = max(self._others(read), default=None)
        if other is None:
            return ResumePoint(None, damages)
        return CheckpointPoll(self.placement, other, damages, self.tried | {self.step})

    def _has_read(self, hello: Hello) -> bool:
        return hello.inspection is not None and hello.inspection.step == self.step

    def _unusable(self, read: list[Hello]) -> Iterator[int]:
        """The stages of which nobody who may have their place can use the snapshot."""
        for index, stages in enumerate(self.placement):
            usable = {stage for hello in _fit(index, read) if hello.inspection for stage in hello.inspection.stages}
            yield from (stage for stage in stages if stage not in usable)

    def _unheard(self, unusable: list[int], read: list[Hello]) -> Iterator[str]:
        """Of stages whose snapshot nobody has called damaged: nobody has it."""
        if not any(_told(read)):
            yield f"nobody has a snapshot of step {self.step} of {stages_in_words(unusable)}"

    def _others(self, read: list[Hello]) -> set[int]:
        """The steps that were not asked about, and of which there are snapshots of all stages."""
        seen = [
            {step for hello in _fit(index, read) for of, step in hello.snapshots or () if of == stage}
            for index, stages in enumerate(self.placement)
            for stage in stages
        ]
        return set.intersection(*seen) - self.tried - {0, self.step}


def _fit(index: int, read: list[Hello]) -> list[Hello]:
    """Those who may have the place."""
    return [hello for hello in read if hello.claim in (None, index)]


def _told(read: list[Hello]) -> Iterator[str]:
    return (damage for hello in read if hello.inspection is not None for damage in hello.inspection.damages)
