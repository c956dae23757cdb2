"""The newest step that every stage could go back to, from the snapshots that the stages have on disk.

    stage 0    20  40  60
    stage 1    20  40              complete: 40, once the losses before step 40 are stored
    stage 2    20  40      80

A stage that is given to another worker has the complete checkpoint, which that worker starts from, and nothing newer:
counting a snapshot of its former owner would complete a checkpoint that the new owner has yet to reach.
"""

from collections.abc import Collection, Iterable

import msgspec


class CheckpointTracker:
    """Collects snapshots. `complete` goes back in `reset` only; before any snapshot it is 0, the initial weights."""

    def __init__(self, stages: int) -> None:
        self.complete = 0
        self.candidates: set[int] = set()  # newer steps of which every stage has a snapshot
        self._newer: list[set[int]] = [set() for _ in range(stages)]

    def add(self, stage: int, step: int) -> bool:
        """The stage's current owner has written its snapshot of `step`. False if that was known."""
        if step <= self.complete or step in self._newer[stage]:
            return False
        self._newer[stage].add(step)
        self._intersect()
        return True

    def forget(self, stages: Iterable[int]) -> None:
        """The stages have lost their owners."""
        for stage in stages:
            self._newer[stage].clear()
        self._intersect()

    def reset(self, step: int) -> None:
        """Sets `complete`: the records are lost, or newer snapshots are damaged."""
        self.complete = step
        self.forget(range(len(self._newer)))

    def advance(self, finished: int) -> bool:
        """Completes the newest candidate before which all stages have reported their steps: `finished` of them."""
        reported = [step for step in self.candidates if step <= finished]
        if not reported:
            return False
        self.complete = max(reported)
        self._newer = [{step for step in steps if step > self.complete} for steps in self._newer]
        self._intersect()
        return True

    def facts(self) -> dict[str, object]:
        """What is stored for `restore`, as JSON's own types."""
        return {"complete": self.complete, "newer": [sorted(steps) for steps in self._newer]}

    def restore(self, facts: object) -> None:
        kept = msgspec.convert(facts, _StoredCheckpoints)
        self.complete, self._newer = kept.complete, kept.newer
        self._intersect()

    def _intersect(self) -> None:
        self.candidates = set.intersection(*self._newer)


def is_gone(step: int, stages: Iterable[int], snapshots: Collection[tuple[int, int]]) -> bool:
    """Whether, for one of `stages`, the snapshot of `step` is missing and a newer one exists among `snapshots`.

    `snapshots` are (stage, step) pairs. A snapshot is deleted only after a newer checkpoint was announced. One that was
    never there proves nothing: the disk may be another.
    """
    kept = ({of for each, of in snapshots if each == stage} for stage in stages)
    return step > 0 and any(step not in steps and max(steps, default=0) > step for steps in kept)


class _StoredCheckpoints(msgspec.Struct):
    complete: int
    newer: list[set[int]]
