"""Progress of a worker's transfers of snapshots, kept for its reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stageline.broker.control.checkpoints import CopyReport, CopyState


@dataclass(slots=True)
class CopyProgress:
    """Progress of a worker's transfers. The loop writes it, and the control thread reads it without a lock.

    Attributes:
        states: State of each transfer, by number.
        chunks: Chunks that were sent or received so far.
        lacks: (stage, step) of each snapshot that the worker begins with, and that is not on its disk.
    """

    states: Mapping[int, CopyState] = field(default_factory=dict)
    chunks: int = 0
    lacks: Sequence[tuple[int, int]] = ()

    @property
    def report(self) -> CopyReport:
        """The transfers as the broker is told of them."""
        return CopyReport(list(self.states.items()), self.chunks, list(self.lacks))

    def note(self, states: Mapping[int, CopyState]) -> None:
        """Note how far each transfer is."""
        self.states = states

    def moved(self) -> None:
        """Note that a chunk was sent or received."""
        self.chunks += 1

    def lack(self, snapshots: Sequence[tuple[int, int]]) -> None:
        """Note which snapshots the worker lacks."""
        self.lacks = snapshots
