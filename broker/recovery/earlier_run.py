"""What a run goes on from that lays another run out in a new way: it begins at that run's checkpoint, and never below.

runs/digits-1f0c               stopped after 120 steps
runs/digits-1f0c-at120-5e1d03  the same work from step 120 on: the snapshots of step 120 are made of the other's
"""

from collections.abc import Collection
from dataclasses import dataclass

from stageline.broker.membership.member import stages_label
from stageline.pipeline.schedule import Placement


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run goes on with the first `step` steps of another, whose folder is `source`, "" if that is not known here.
    `folder` is its own, where each machine has the snapshots of its stages. `scripted`: a script began both."""

    step: int
    source: str
    folder: str
    scripted: bool = False

    def refusal(self, placement: Placement, lacking: Collection[int] = ()) -> str:
        """Why the run cannot begin, for people: the stages `lacking`, or without them some, have no snapshot."""
        stages = sorted(lacking or [stage for each in placement for stage in each])
        paths = ", ".join(f"{self.folder}/checkpoints/stage-{stage}/step-{self.step:010d}" for stage in stages)
        return (
            f"the run goes on from step {self.step} of {self.source or 'another run'}, and does not begin below it. On "
            f"the machine of {'its worker' if len(stages) == 1 else 'their workers'}, {stages_label(stages)} must have "
            f"{paths}. {self.remedy(placement, lacking)}, and resume the run"
        )

    def below(self, placement: Placement) -> str:
        """Return, for people, that the run does not go back below its first step, and the way out."""
        return (
            f"goes on from step {self.step} of {self.source or 'another run'}, and does not go back below it. "
            f"{self.remedy(placement)}, and resume it again"
        )

    def remedy(self, placement: Placement, stages: Collection[int] = ()) -> str:
        """How the snapshots of `stages`, or without them of all, are written again, for people."""
        if self.scripted:
            return f'Write what is missing with Line.resume("{self.source or "RUN"}", ...), with this layout'
        command = f"stageline checkpoint split {self.source or 'RUN'} --step {self.step}"
        workers = [index for index, owned in enumerate(placement) if not set(stages).isdisjoint(owned)]
        each = " and ".join(f"`{command} --worker {index} --write`" for index in workers)
        found = each or f"`{command} --write` (of several machines on each, with its --worker)"
        return f"Write what is missing there with {found}, with this run's plan and --set"
