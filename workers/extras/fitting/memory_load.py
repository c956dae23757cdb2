"""Bytes that the process of a worker takes at most, beyond its program: the sum of its stages and its messages.

stages      weights, gradients, optimizer, and what is stashed of the microbatches in flight
working     what operations make and free again: of one stage at a time
messages    those that are kept until a checkpoint lets them go, and those that have come and wait
snapshots   a copy of the stages' state, while it is written
offload     activations on their way to files and back

A stage has options to take less. Each has switches, a load, and a cost in nanoseconds of a step:

recompute    backward computes more: as much as the operations of a trial tell
offload      bytes go to a disk and back. Threads and the system carry them while stages compute; what takes longer than
             the computing itself is waited for. Copying them takes time of its own

Times follow from counts of operations and bytes at fixed rates, not from a clock: two processes on two machines, one of
them busy, must come to the same choice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LEAST_RESERVE = 16 << 20  # bytes
_LEAST_SPARE = 2 * LEAST_RESERVE
DISK = 0.5  # bytes a nanosecond, read and written: a SATA SSD
COPYING = 4.0  # bytes a nanosecond


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Bytes that a stage takes of its worker: `held` all the time, `working` for a moment, `copied` for a snapshot.

    Activations of `offloaded` bytes go to files and come back.
    """

    held: int = 0
    working: int = 0
    copied: int = 0
    offloaded: int = 0

    def beside(self, other: "StageLoad") -> "StageLoad":
        """Return the load of this stage and another in one process.

        Each number is the sum, except `working`, the larger one: only one stage works at a time.
        """
        return StageLoad(
            self.held + other.held,
            max(self.working, other.working),
            self.copied + other.copied,
            self.offloaded + other.offloaded,
        )

    def within(self, other: "StageLoad") -> bool:
        """Return True if no part of this load is larger than that of `other`."""
        return (
            self.held <= other.held
            and self.working <= other.working
            and self.copied <= other.copied
            and self.offloaded <= other.offloaded
        )


Loads = Mapping[int, StageLoad]  # by worker


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """Memory of one worker's process.

    `messages` bytes are taken whatever its stages do, as are `model` bytes for the whole model while the stages are
    made. `under_way` bytes at most are on their way to files and back. The process may take `limit` bytes; None for any
    number.
    """

    messages: int = 0
    model: int = 0
    under_way: int = 0
    limit: int | None = None

    def parts(self, load: StageLoad) -> dict[str, int]:
        """Return the bytes of the worker with this load, by purpose."""
        return {
            "stages": load.held,
            "working": load.working,
            "messages": self.messages,
            "snapshots": load.copied,
            "offload": min(load.offloaded, self.under_way),
        }

    def peak(self, load: StageLoad) -> int:
        """Return how many bytes the worker takes at most with this load."""
        return max(self.model, sum(self.parts(load).values()))

    def fits(self, load: StageLoad) -> bool:
        """Return True if there is no limit, or the worker's peak with this load is within it, less its reserve."""
        return self.limit is None or self.peak(load) <= foreseen_within(self.limit)

    def is_tight(self, plain: StageLoad) -> bool:
        """Return True if the worker must return freed memory and wait for its snapshots to stay within the limit.

        `plain` is the load of its stages if it does neither.
        """
        return self.limit is not None and self.peak(plain) > foreseen_in_ample(self.limit)


def foreseen_within(limit: int) -> int:
    """Return how many bytes may be foreseen of a worker that may take `limit` bytes."""
    return limit - reserve_of(limit)


def reserve_of(limit: int) -> int:
    """Return how many bytes of a limit are kept for memory that is not foreseen: an eighth, and 16 MiB at least.

    Memory that the allocator keeps is an example.
    """
    return max(limit // 8, LEAST_RESERVE)


def limit_for(foreseen: int) -> int:
    """Return the least limit with which `foreseen` bytes may be foreseen."""
    return max(foreseen + LEAST_RESERVE, 8 * (foreseen - 1) // 7 + 1)


def foreseen_in_ample(limit: int) -> int:
    """Return how many bytes may be foreseen of a worker that keeps freed memory and goes on during snapshots.

    A third, and 32 MiB at least, are left to the gaps of an allocator that keeps memory.
    """
    return limit - max(limit // 3, _LEAST_SPARE)


def ample_limit_for(foreseen: int) -> int:
    """Return the least limit with which `foreseen` bytes may be foreseen of a worker that keeps freed memory."""
    return max(foreseen + _LEAST_SPARE, 3 * (foreseen - 1) // 2 + 1)


@dataclass(frozen=True, slots=True)
class Switches:
    """Ways in which a stage takes less: the values of `stage.N.recompute` and `stage.N.offload`."""

    recompute: str | tuple[str, ...] = "nothing"
    offload: tuple[str, ...] = ()

    def unlike(self, other: "Switches") -> int:
        """Return how many of the two values differ from those of `other`."""
        return (self.recompute != other.recompute) + (self.offload != other.offload)

    def __str__(self) -> str:
        """Return the switches as in a plan: `recompute = "stage", offload = ["weights"]`."""
        recompute = f'"{self.recompute}"' if isinstance(self.recompute, str) else _listed(self.recompute)
        return f"recompute = {recompute}, offload = {_listed(self.offload)}"


@dataclass(frozen=True, slots=True)
class StageOption:
    """Stage with these `switches`: `loads` is what its replicas take of each worker.

    A step of the stage takes `nanoseconds` longer than without any switches. `ample` is the load of workers that
    neither return freed memory nor wait for snapshots.
    """

    switches: Switches
    nanoseconds: int
    loads: Loads
    ample: Loads = field(default_factory=dict)


Options = Sequence[StageOption]  # of one stage


def beside(loads: Loads, others: Loads) -> Loads:
    """Return the loads of two stages together, by worker; see `StageLoad.beside`."""
    nothing = StageLoad()
    return {worker: loads.get(worker, nothing).beside(others.get(worker, nothing)) for worker in {*loads, *others}}


def fit(loads: Loads, workers: Sequence[WorkerRoom]) -> bool:
    """Return True if the load of every worker fits, by `WorkerRoom.fits`."""
    return all(workers[worker].fits(load) for worker, load in loads.items())


def _listed(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of a stage that can be in files, by purpose; `activations` are those of one microbatch."""

    activations: int = 0
    weights: int = 0
    gradients: int = 0
    averages: int = 0
    optimizer: int = 0

    @classmethod
    def of(cls, movable: Mapping[str, int], in_flight: int) -> "Moved":
        """Return a stage's `movable` bytes, with the activations of one microbatch, not of all those `in_flight`."""
        kept = {name: movable.get(name, 0) for name in cls.__dataclass_fields__}
        return cls(**{**kept, "activations": kept["activations"] // max(1, in_flight)})


def moved_bytes(stage: Moved, offload: Collection[str], microbatches: int) -> int:
    """Return how many bytes go to files and come back in a step.

    Weights are read for each forward and each backward, which adds to the gradients; an update reads and writes all.

    Args:
        stage: Bytes of the stage that can be in files.
        offload: Parts that are in files.
        microbatches: Microbatches of a step.
    """
    updated = 2 * stage.weights + stage.gradients + 2 * stage.averages
    moved = {
        "activations": 2 * stage.activations * microbatches,
        "weights": 2 * (stage.weights + stage.gradients) * microbatches + updated,
        "optimizer": 2 * stage.optimizer,
    }
    return sum(moved[part] for part in offload)


def added_nanoseconds(computing: int, least: int, moved: int) -> int:
    """Return how many nanoseconds longer a step of a stage takes than one of `least` nanoseconds that moves nothing.

    Args:
        computing: Computing time of the step, in nanoseconds.
        least: Computing time of the step to compare with, in nanoseconds.
        moved: Bytes that go to files and come back.
    """
    waited = max(0.0, moved / DISK - computing)
    return round(max(0, computing - least) + waited + moved / COPYING)
