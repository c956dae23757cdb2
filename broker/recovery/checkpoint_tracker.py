"""The newest step that every stage could go back to, from the snapshots that the stages have on disk.

    stage 0    20  40  60
    stage 1    20  40              complete: 40, once the losses before step 40 are stored
    stage 2    20  40      80

A stage that is given to another worker has the complete checkpoint, which that worker starts from, and nothing newer:
counting a snapshot of its former owner would complete a checkpoint that the new owner has yet to reach.
"""

from collections.abc import Collection, Iterable

import msgspec


class CheckpointTracker(msgspec.Struct):
    """Collects snapshots. `complete` goes back in `reset` only; before any snapshot it is 0, the initial weights."""

    complete: int
    newer: list[set[int]]  # [stage]: steps of snapshots after `complete`

    @property
    def candidates(self) -> set[int]:
        """Newer steps of which every stage has a snapshot."""
        return set.intersection(*self.newer)

    def add(self, stage: int, step: int) -> bool:
        """The stage's current owner has written its snapshot of `step`. False if that was known."""
        if step <= self.complete or step in self.newer[stage]:
            return False
        self.newer[stage].add(step)
        return True

    def forget(self, stages: Iterable[int]) -> None:
        """The stages have lost their owners."""
        for stage in stages:
            self.newer[stage].clear()

    def reset(self, step: int) -> None:
        """Sets `complete`: the records are lost, or newer snapshots are damaged."""
        self.complete = step
        self.forget(range(len(self.newer)))

    def advance(self, finished: int) -> bool:
        """Completes the newest candidate before which all stages have reported their steps: `finished` of them."""
        reported = [step for step in self.candidates if step <= finished]
        if not reported:
            return False
        self.complete = max(reported)
        self.newer = [{step for step in steps if step > self.complete} for steps in self.newer]
        return True


def is_gone(step: int, stages: Iterable[int], snapshots: Collection[tuple[int, int]]) -> bool:
    """Whether, for one of `stages`, the snapshot of `step` is missing and a newer one exists among `snapshots`.

    `snapshots` are (stage, step) pairs. A snapshot is deleted only after a newer checkpoint was announced. One that was
    never there proves nothing: the disk may be another.
    """
    kept = ({of for each, of in snapshots if each == stage} for stage in stages)
    return step > 0 and any(step not in steps and max(steps, default=0) > step for steps in kept)
