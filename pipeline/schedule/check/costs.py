"""The times that a schedule's actions and messages are assumed to take."""

from dataclasses import dataclass
from typing import Self

from stageline.pipeline.schedule import Action, Kind


@dataclass(frozen=True, slots=True)
class Costs:
    """Times, all in one unit: of each stage's actions for one microbatch, and of a message over each hop.

    A backward takes as long as its two halves, `input` and `weight`. `latency[h]` is the one-way latency between stages
    h and h+1; between two stages of one worker there is none, whatever its value.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    update: tuple[float, ...]
    latency: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises `ValueError` unless all are for the same stages."""
        lengths = [len(each) for each in (self.forward, self.input, self.weight, self.update)]
        if set(lengths) != {self.stages} or len(self.latency) != max(0, self.stages - 1):
            raise ValueError(
                f"costs are needed for every stage, and latencies for one hop less; forward, input, weight and update "
                f"have {lengths}, latency has {len(self.latency)}"
            )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @classmethod
    def even(
        cls, stages: int, *, forward: float = 1, backward: float = 2, update: float = 0, latency: float = 0
    ) -> Self:
        """The same times for every stage and every hop; the halves of a backward take equally long."""
        half = (backward / 2,) * stages
        return cls((forward,) * stages, half, half, (update,) * stages, (latency,) * (stages - 1))

    def of(self, action: Action) -> float:
        """The time that `action` takes."""
        match action.kind:
            case Kind.FORWARD:
                return self.forward[action.stage]
            case Kind.BACKWARD:
                return self.input[action.stage] + self.weight[action.stage]
            case Kind.INPUT:
                return self.input[action.stage]
            case Kind.WEIGHT:
                return self.weight[action.stage]
            case Kind.UPDATE:
                return self.update[action.stage]
