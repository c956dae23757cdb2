"""What it costs in time to take less memory, in nanoseconds of a step.

recompute    backward computes more: as much as the operations of a trial tell
offload      bytes go to a disk and back. Threads and the system carry them while stages compute; what takes longer than
             the computing itself is waited for. Copying them takes time of its own

Times follow from counts of operations and bytes at fixed rates, not from a clock: two processes on two machines, one of
them busy, must come to the same choice.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

DISK = 0.5  # bytes a nanosecond, read and written: a SATA SSD
COPYING = 4.0  # bytes a nanosecond


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of a stage that can be in files, by what they are; `activations` are those of one microbatch."""

    activations: int = 0
    weights: int = 0
    gradients: int = 0
    averages: int = 0
    optimizer: int = 0

    @classmethod
    def of(cls, movable: Mapping[str, int], in_flight: int) -> "Moved":
        """Of a stage that keeps `movable` bytes, of activations those of all microbatches `in_flight`."""
        kept = {name: movable.get(name, 0) for name in cls.__dataclass_fields__}
        return cls(**{**kept, "activations": kept["activations"] // max(1, in_flight)})


def moved_bytes(stage: Moved, offload: Collection[str], microbatches: int) -> int:
    """How many go to files and come back in a step. Weights are read for each forward and each backward, which adds to
    the gradients; an update reads and writes all."""
    of_microbatch = of_update = 0
    if "activations" in offload:
        of_microbatch += 2 * stage.activations
    if "weights" in offload:
        of_microbatch += 2 * stage.weights + 2 * stage.gradients
        of_update += 2 * stage.weights + stage.gradients + 2 * stage.averages
    if "optimizer" in offload:
        of_update += 2 * stage.optimizer
    return microbatches * of_microbatch + of_update


def added_nanoseconds(computing: int, least: int, moved: int) -> int:
    """How much longer a stage takes for a step that computes for `computing` nanoseconds and moves so many bytes, than
    one that computes for `least` and moves none."""
    waited = max(0.0, moved / DISK - computing)
    return round(max(0, computing - least) + waited + moved / COPYING)
