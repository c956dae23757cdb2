"""What the process of a worker takes at most, beyond its program: the sum of what its stages and its messages take.

stages      weights, gradients, optimizer, and what is stashed of the microbatches in flight
working     what operations make and free again: of one stage at a time
messages    those that are kept until a checkpoint lets them go, and those that have come and wait
snapshots   a copy of the stages' state, while it is written
offload     activations on their way to files and back
"""

from dataclasses import dataclass

LEAST_RESERVE = 16 << 20  # bytes
_LEAST_SPARE = 2 * LEAST_RESERVE


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Bytes that a stage takes of its worker: `held` all the time, `working` for a moment, `copied` for a snapshot.
    Activations of `offloaded` bytes go to files and come back."""

    held: int = 0
    working: int = 0
    copied: int = 0
    offloaded: int = 0

    def beside(self, other: "StageLoad") -> "StageLoad":
        """What the two take in one process."""
        return StageLoad(
            self.held + other.held,
            max(self.working, other.working),
            self.copied + other.copied,
            self.offloaded + other.offloaded,
        )

    def within(self, other: "StageLoad") -> bool:
        """Whether it takes no more than `other` of anything."""
        return (
            self.held <= other.held
            and self.working <= other.working
            and self.copied <= other.copied
            and self.offloaded <= other.offloaded
        )


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """The process of one worker. Its `messages` take so many bytes whatever its stages do, as does the `model` as a
    whole while the stages are made; `under_way` bytes at most are on their way to files and back. It may take `limit`
    bytes; any number, if that is None."""

    messages: int = 0
    model: int = 0
    under_way: int = 0
    limit: int | None = None

    def parts(self, load: StageLoad) -> dict[str, int]:
        """Bytes, by what they are for."""
        return {
            "stages": load.held,
            "working": load.working,
            "messages": self.messages,
            "snapshots": load.copied,
            "offload": min(load.offloaded, self.under_way),
        }

    def peak(self, load: StageLoad) -> int:
        """Bytes at most."""
        return max(self.model, sum(self.parts(load).values()))

    def fits(self, load: StageLoad) -> bool:
        """Whether that is within the limit."""
        return self.limit is None or self.peak(load) <= foreseen_within(self.limit)

    def is_tight(self, plain: StageLoad) -> bool:
        """Whether a worker must give back what it frees, and wait for its snapshots, to stay within the limit. Its
        stages take `plain` where it does neither."""
        return self.limit is not None and self.peak(plain) > foreseen_in_ample(self.limit)


def foreseen_within(limit: int) -> int:
    """How many bytes may be foreseen of a worker that may take `limit`."""
    return limit - reserve_of(limit)


def reserve_of(limit: int) -> int:
    """Bytes of a limit that are left to what is not foreseen, such as memory that the allocator keeps: an eighth, and
    16 MiB at least."""
    return max(limit // 8, LEAST_RESERVE)


def limit_for(foreseen: int) -> int:
    """The least limit with which so many bytes may be foreseen."""
    return max(foreseen + LEAST_RESERVE, 8 * (foreseen - 1) // 7 + 1)


def foreseen_in_ample(limit: int) -> int:
    """The same of a worker that keeps what it frees, and goes on while a snapshot is written: a third, and 32 MiB at
    least, are left to the gaps of an allocator that keeps memory."""
    return limit - max(limit // 3, _LEAST_SPARE)


def ample_limit_for(foreseen: int) -> int:
    """The least limit with which so many bytes may be foreseen of such a worker."""
    return max(foreseen + _LEAST_SPARE, 3 * (foreseen - 1) // 2 + 1)
