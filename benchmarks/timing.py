"""The timing of one trainer's run of a workload."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """When stage 0 ended each step, in seconds of one clock, the last step's loss, and the bytes retained at most.

    Stage 0 is the last to end its part of a step, so its clock times the whole pipeline.
    """

    ends: tuple[float, ...]
    loss: float
    retained: int = 0

    def steps_per_second(self, warm: int) -> float:
        """Over all steps but the first `warm`."""
        return (len(self.ends) - warm) / (self.ends[-1] - self.ends[warm - 1])
