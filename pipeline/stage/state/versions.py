"""Which weights a forward reads, and its backward after it.

Versions           the parameters, which an update changes in place       synchronous schedules
StashedVersions    the newest when it runs; no update writes to them      asynchronous mode
TwoVersions        those before the newest update                         name = "2bw"
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stageline.pipeline.stage.layers.body import Weights
from stageline.pipeline.tree import Tree

from .stage_state import InFlight, Previous

Key = tuple[int, int]  # step, microbatch


@dataclass(frozen=True, slots=True)
class Version:
    """What one forward reads and later actions change, by the body's names: trainable parameters, as leaves of their
    own, and the buffers as they were before it. `rerun`: the forward has run before, in another process."""

    weights: Weights
    buffers: Weights
    rerun: bool = False


PRESENT = Version({}, {})  # the parameters and buffers themselves


class Versions:
    """The versions of one stage's weights that are in use: one, the parameters themselves."""

    stashed = False  # whether each forward has weights that no update writes to

    def version_for(self, key: Key) -> Version:
        """The version that the forward of microbatch `key` reads."""
        return PRESENT

    def run(self, version: Version, forward: Callable[[], Tree]) -> Tree:
        """Returns `forward()`, called with the version's weights."""
        return forward()

    def lend(self, version: Version) -> None:
        """Called before a backward, which adds to the gradients of the step's earlier microbatches."""

    def collect(self, version: Version) -> None:
        """Called after a backward: the gradients are those of the parameters from now on."""

    @property
    def previous(self) -> Previous | None:
        """What microbatches read that are yet to come, besides the parameters."""
        return None

    def begin_update(self) -> bool:
        """Called before the parameters change. Returns whether they lie in other memory now."""
        return False

    def invalidate(self) -> None:
        """Called when the parameters have changed."""

    def in_flight(self, versions: Iterable[tuple[Key, Version]]) -> tuple[InFlight, ...]:
        """The state of the microbatches that have yet to go backward, by their `versions`, and of those that are still
        to be run again."""
        return ()

    def restore(self, in_flight: Iterable[InFlight], previous: Previous | None) -> None:
        """Makes the forwards of these microbatches, when they run again, read what they have read before. `previous` is
        that of the stage whose state this is."""
