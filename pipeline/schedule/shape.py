"""The shape that a schedule is made for, and the check that a schedule can be made for it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stageline.pipeline.errors import ExitCode, StagelineError

from .action import Action, Kind

Placement = tuple[tuple[int, ...], ...]  # the stages of each worker


class ScheduleRefused(StagelineError):
    """Error that a schedule cannot be made for these stages, workers and microbatches.

    Mend: Change the numbers that the message names, or take another schedule: `stageline schedule list` shows them all.

    Example: schedule zb-v cannot run 3 stages, 8 microbatches: it needs at least two microbatches for each worker, to
    have pairs; use 6 or more, or zb-v
    """

    error_code = "SL102"
    exit_code = ExitCode.REFUSED

    def __init__(self, text: str, reason: str = "") -> None:
        """Take the whole `text`, and the `reason` in it without the schedule and the shape."""
        super().__init__(text)
        self.reason = reason or text  # without the schedule and the shape


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a schedule.

    Attributes:
        name: Name of the schedule.
        placement: Stages of each worker.
        microbatches: Microbatches of a step.
        first_trainable: First stage that trains.
    """

    name: str
    placement: Placement
    microbatches: int
    first_trainable: int = 0

    def __post_init__(self) -> None:
        """Raise `ScheduleRefused` unless every stage has one worker and the numbers are in range."""
        if self.microbatches < 1:
            raise self.refused("a step needs at least one microbatch; set schedule.microbatches to 1 or more")
        for worker, stages in enumerate(self.placement):
            if not stages:
                raise self.refused(f"worker {worker} owns no stage; give it one or leave it out")
        owned = sorted(stage for stages in self.placement for stage in stages)
        if not owned:
            raise self.refused("there is no worker; give every stage one")
        if owned != list(range(len(owned))):
            raise self.refused(
                f"the workers own stages {', '.join(map(str, owned))}, "
                f"but each of 0 to {max(owned)} needs exactly one owner"
            )
        if not 0 <= self.first_trainable <= self.stages:
            raise self.refused(f"its first trainable stage is {self.first_trainable}; use one of 0 to {self.stages}")

    @property
    def stages(self) -> int:
        """Number of stages."""
        return sum(len(stages) for stages in self.placement)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.placement)

    def __str__(self) -> str:
        """Return the numbers for people: "4 stages on 2 workers with 8 microbatches"."""
        return (
            f"{_counted(self.stages, 'stage')} on {_counted(self.workers, 'worker')} "
            f"with {_counted(self.microbatches, 'microbatch', 'microbatches')}"
        )

    def trained(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Yield `actions` without the backwards of stages below the first trainable one, which run forward only."""
        return (each for each in actions if each.kind is Kind.FORWARD or each.stage >= self.first_trainable)

    def refused(self, reason: str) -> ScheduleRefused:
        """Return the error that refuses this schedule and shape for `reason`."""
        return ScheduleRefused(f"schedule {self.name} cannot run {self}: {reason}", reason)


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
