"""The newest step that every stage could go back to, from the snapshots that the stages have on disk.

    stage 0    20  40  60
    stage 1    20  40              complete: 40, once the losses before step 40 are stored
    stage 2    20  40      80

A stage that is given to another worker has what that worker begins with, the complete checkpoint, and nothing newer.
What its former owner wrote, or is about to write, would complete a checkpoint that its new owner has yet to reach.
"""

from collections.abc import Collection, Iterable

import msgspec


class CheckpointTracker:
    """Fed with snapshots; `complete` never goes back but in `settle`. Before any snapshot it is 0: a stage can be built
    afresh."""

    def __init__(self, stages: int) -> None:
        self.complete = 0
        self._newer: list[set[int]] = [set() for _ in range(stages)]

    def add(self, stage: int, step: int) -> bool:
        """The snapshot of `step` is there, from the stage's current owner. False if that is no news."""
        news = step > self.complete and step not in self._newer[stage]
        if news:
            self._newer[stage].add(step)
        return news

    def forget(self, stages: Iterable[int]) -> None:
        """The stages have lost their owner."""
        for stage in stages:
            self._newer[stage].clear()

    def settle(self, step: int) -> None:
        """Checkpoint `step` was found to be complete: the records are lost, or newer snapshots are damaged."""
        self.complete = step
        self.forget(range(len(self._newer)))

    def advance(self, finished: int) -> bool:
        """Completes the newest step that all stages have, if it has come. All have reported `finished` steps."""
        common = [step for step in set.intersection(*self._newer) if step <= finished]
        if not common:
            return False
        self.complete = max(common)
        self._newer = [{step for step in steps if step > self.complete} for steps in self._newer]
        return True

    def facts(self) -> dict[str, object]:
        """What another broker needs in order to `adopt`, as JSON's own types."""
        return {"complete": self.complete, "newer": [sorted(steps) for steps in self._newer]}

    def adopt(self, facts: object) -> None:
        """Takes up what a former broker knew."""
        kept = msgspec.convert(facts, _StoredCheckpoints)
        self.complete, self._newer = kept.complete, kept.newer


def is_gone(step: int, stages: Iterable[int], snapshots: Collection[tuple[int, int]]) -> bool:
    """Whether the snapshot of `step` of one of `stages` was deleted after a newer one, as (stage, step) in `snapshots`.

    Nobody deletes it before a newer checkpoint is announced. One that was never there shows nothing: the disk may be
    another.
    """
    kept = ({of for each, of in snapshots if each == stage} for stage in stages)
    return step > 0 and any(step not in steps and max(steps, default=0) > step for steps in kept)


class _StoredCheckpoints(msgspec.Struct):
    complete: int
    newer: list[set[int]]
