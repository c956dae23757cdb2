"""The complete checkpoint: the newest step that every stage could go back to, from the snapshots on the disks.

    stage 0    20  40  60
    stage 1    20  40              complete: 40, once the losses before step 40 are stored
    stage 2    20  40      80

A stage that is given to another worker has the complete checkpoint, which that worker starts from, and nothing newer:
counting a snapshot of its former owner would complete a checkpoint that the new owner has yet to reach.

Where snapshots are copied, a stage has a step only once another worker, the holder, has that snapshot on its disk too:

    stage 0    20  40  60    its holder  20  40      complete: 20. Above that nothing is trimmed or deleted, so a lost
    stage 1    20  40        its holder  20          worker may lose its disk

A copy counts for the owner and the holder that made it. If the holder is lost, its successor has none, and gets that of
the complete checkpoint first; that checkpoint stays complete.
"""

from collections.abc import Iterable

import msgspec


class CheckpointTracker(msgspec.Struct):
    """A record of snapshots. `complete`, 0 (the initial weights) before any snapshot, goes back in `reset` only.

    Attributes:
        complete: Step of the complete checkpoint.
        newer: By stage, steps of snapshots after `complete` that its owner has.
        awaits_steps: True if all stages have a snapshot of a newer step, before which not all steps are reported.
        holders: By stage, the place whose worker holds the copies; None for a stage without. Empty if no stage has one.
        copied: By stage, steps from `complete` on of which the present holder has the snapshot.
        settled: Newest complete checkpoint of which every copy was there. An older one than `complete` while copies of
            that are to come, since it was found on the disks alone. -1 in records of before there were copies.
    """

    complete: int
    newer: list[set[int]]
    awaits_steps: bool = False
    holders: list[int | None] = []
    copied: list[set[int]] = []
    settled: int = -1

    @property
    def announced(self) -> int:
        """Step up to which queues may be trimmed and snapshots deleted; 0 while copies of `complete` are to come."""
        return self.complete if self.settled == self.complete else 0

    @property
    def candidates(self) -> set[int]:
        """The steps after `complete` of which every stage has a snapshot and, where it needs one, a copy."""
        return set.intersection(*map(self._kept, range(len(self.newer))))

    def add(self, stage: int, step: int) -> bool:
        """Note that the stage's owner has written its snapshot of `step`. Returns False if that was known."""
        if step <= self.complete or step in self.newer[stage]:
            return False
        self.newer[stage].add(step)
        return True

    def holder(self, stage: int) -> int | None:
        """Return the place whose worker holds the stage's copies; None if there are none."""
        return self.holders[stage] if self.holders else None

    def hold(self, stage: int, holder: int | None) -> bool:
        """Have the worker of place `holder`, None for none, hold the stage's copies. Returns True if that is new."""
        if self.holder(stage) == holder:
            return False
        stages = len(self.newer)
        self.holders = self.holders or [None] * stages
        self.copied = self.copied or [set() for _ in range(stages)]
        self.holders[stage] = holder
        self.copied[stage].clear()
        self.settle()
        return True

    def add_copy(self, stage: int, step: int) -> bool:
        """Note that the stage's holder has the snapshot of `step`. Returns False if that changes nothing."""
        if self.holder(stage) is None or step < self.complete or step in self.copied[stage]:
            return False
        self.copied[stage].add(step)
        self.settle()
        return True

    def settle(self) -> None:
        """Let the complete checkpoint be announced if each stage that needs a copy of it has one.

        Call it only once it is known which stages do.
        """
        kept = (self.holder(stage) is None or self.complete in self.copied[stage] for stage in range(len(self.newer)))
        if self.settled < self.complete and all(kept):
            self.settled = self.complete

    def lose_copies(self, place: int) -> None:
        """Forget the copies that the worker of `place` held: its disk may be lost."""
        for stage, holder in enumerate(self.holders):
            if holder == place:
                self.copied[stage].clear()
        self.awaits_steps = self.awaits_steps and bool(self.candidates)

    def wanted(self, stage: int) -> list[int]:
        """Return the steps whose snapshots the stage's holder is to get, the first one next.

        That of the complete checkpoint comes first. Then the newest that all stages have: a slow network leaves out
        those before it.
        """
        if self.holder(stage) is None:
            return []
        have, everywhere = self.copied[stage], set.intersection(*self.newer)
        complete = [self.complete] if self.complete else []
        if everywhere:
            following = [max(everywhere)]
        else:
            following = [] if self.newer[stage] & have else sorted(self.newer[stage])[:1]
        return [step for step in (*complete, *following) if step not in have]

    def forget(self, stages: Iterable[int]) -> None:
        """Forget the snapshots of stages that have lost their owners, and the copies of those snapshots."""
        for stage in stages:
            self.newer[stage].clear()
            if self.copied:
                self.copied[stage].intersection_update({self.complete})
            self.awaits_steps = False  # no step has snapshots of all stages now

    def reset(self, step: int) -> None:
        """Set `complete` to `step`: the records are lost, or newer snapshots are damaged. No copy is known then."""
        self.complete = step
        self.forget(range(len(self.newer)))
        self.settled = max(0, min(self.settled, step))
        for copied in self.copied:
            copied.clear()

    def advance(self, finished: int, *, copied: bool = True) -> bool:
        """Complete the newest candidate that is at most `finished`, the steps reported by all stages. True if done.

        Args:
            finished: Steps that all stages have reported.
            copied: False if snapshots without a copy count as well, since the run is over and nothing is deleted.
        """
        candidates = self.candidates if copied else set.intersection(*self.newer)
        reported = [step for step in candidates if step <= finished]
        self.awaits_steps = max(candidates, default=0) > finished
        if not reported:
            return False
        self.complete = max(reported)
        self.newer = [{step for step in steps if step > self.complete} for steps in self.newer]
        self.copied = [{step for step in steps if step >= self.complete} for steps in self.copied]
        self.settle()
        return True

    def _kept(self, stage: int) -> set[int]:
        newer = self.newer[stage]
        return newer if self.holder(stage) is None else newer & self.copied[stage]
