"""Snapshots of a run as a worker finds them on its disk before it is assigned stages, or a script, which has none."""

import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from threading import Event
from time import monotonic

from stageline.broker.control.messages import Assigned
from stageline.broker.control.records import Inspection
from stageline.broker.ledger.recovery import is_gone
from stageline.pipeline.plan import Plan
from stageline.pipeline.retry import persist, reason_of
from stageline.workers.disk.atomic_file import create_file
from stageline.workers.runs import folder as runs

from .directory import SnapshotDirectory
from .snapshot import SnapshotDamaged

DISK = "disk"  # file in the run's folder, with a name that no other folder has
LONGEST_LOOK = 5.0  # seconds that snapshots which cannot be read now are tried, for a broker that asks about them


class LocalSnapshots:
    """Snapshots of a run, as a worker sees them before it is assigned stages, or a script, which has none."""

    def __init__(self, plan: Plan, holds: Collection[int] = ()) -> None:
        """Read the snapshots of runs of `plan`.

        Args:
            plan: Plan of the runs.
            holds: Stages whose snapshots may be here as copies.
        """
        self._plan = plan
        self._holds = holds

    def snapshots(self, run: str) -> list[tuple[int, int]] | None:
        """Return (stage, step) of each snapshot; None if the folder cannot be read."""
        try:
            return checkpoints_of(self._plan, run).present()
        except OSError:
            return None

    def disk(self, run: str) -> str:
        """Return the name that the run's folder here has for itself alone; "" if none can be written."""
        path = runs.folder(self._plan, run) / DISK
        try:
            with suppress(FileExistsError):
                if not path.exists():
                    create_file(path, secrets.token_hex(16).encode())
            return path.read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def can_begin(self, assigned: Assigned) -> bool:
        """Return True if the assignment can be accepted.

        It is refused if the snapshots to begin with were deleted after newer ones.
        """
        stages, found = self._stages_of(assigned.index), self.snapshots(assigned.run)
        every = [stage for stages in self._plan.placement for stage in stages]  # a script begins where these are
        return found is None or not is_gone(assigned.step, stages or every, found)  # None: loading will tell

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        """Return which snapshots of `step` are whole.

        Those of worker `claim` are read, and copies that are here; with None, those of all stages that have one.
        """
        checkpoints = checkpoints_of(self._plan, run)
        there = [stage for stage, of in self.snapshots(run) or [] if of == step]
        copies = (stage for stage in there if stage in self._holds)
        stages = there if claim is None else sorted({*self._stages_of(claim), *copies})
        found = {stage: _verified(checkpoints, stage, step) for stage in stages}
        damaged = [SnapshotDamaged(checkpoints.path(stage, step), wrong) for stage, wrong in found.items() if wrong]
        return Inspection(step, [stage for stage, wrong in found.items() if not wrong], [str(each) for each in damaged])

    def abandon(self, assigned: Assigned) -> None:
        """Delete the snapshots and copies of steps after the assignment's first, from ended lives of the run.

        Raises `SnapshotFailed`.
        """
        checkpoints = checkpoints_of(self._plan, assigned.run)
        here = (stage for stage, _ in self.snapshots(assigned.run) or ())
        for stage in {*self._stages_of(assigned.index), *here}:
            checkpoints.delete_after(stage, assigned.step, assigned.since)

    def _stages_of(self, index: int) -> Sequence[int]:
        """Return the stages of worker `index`; none for the script, whose index follows the workers'."""
        return self._plan.placement[index] if index < len(self._plan.workers) else ()


def _verified(checkpoints: SnapshotDirectory, stage: int, step: int) -> list[str]:
    """Return the damages of a snapshot; one that cannot be read now, nor soon, is damaged, too."""
    verify = partial(checkpoints.verify, stage, step)
    try:  # without a note: who asks is told at the end
        return persist(verify, "", lambda fault: None, now=monotonic, wait=Event().wait, bound=LONGEST_LOOK)
    except OSError as error:
        return [f"it cannot be read: {reason_of(error)}"]


def checkpoints_of(plan: Plan, run: str) -> SnapshotDirectory:
    """Return the snapshots of a run of `plan` on this machine."""
    return SnapshotDirectory.of(runs.folder(plan, run), run, plan)
