"""Weight stashing (PipeDream, SOSP'19, section 3.3): a backward uses the weights that its forward used.

An update changes parameters in place, so every forward between two updates runs on a copy that no update touches.

    F5      U3      F6      U4     B5               F5 and B5 use version a, F6 version b
    a       b       b       c      a
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from stageline.pipeline.tree import Tree

from .body import Body, Weights
from .placing import copied
from .state import InFlight

Key = tuple[int, int]  # step, microbatch


@dataclass(frozen=True, slots=True)
class Version:
    """What one forward reads and later actions change, by the body's names: trainable parameters, as leaves of their
    own, and the buffers as they were before it. `again`: the forward has run before, in another process."""

    weights: Weights
    buffers: Weights
    again: bool = False


class Versions:
    """The versions of one stage's weights that are in use."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._current: Weights | None = None
        self._again: dict[Key, Version] = {}

    def of(self, key: Key) -> Version:
        """The version that the forward of microbatch `key` reads: the current one, unless it ran before."""
        if key in self._again:
            return self._again.pop(key)
        if self._current is None:
            self._current = {name: _leaf(parameter) for name, parameter in self._body.trainable().items()}
        return Version(self._current, {name: copied(buffer) for name, buffer in self._body.named_buffers()})

    def run(self, version: Version, forward: Callable[[], Tree]) -> Tree:
        """What `forward()` gives with the version's weights.

        One that runs again works on copies of the buffers it once had, and leaves the layers' own as they are: what it
        does to them has been done.
        """
        buffers = {name: copied(buffer) for name, buffer in version.buffers.items()} if version.again else {}
        return self._body.lend({**version.weights, **buffers}, forward)

    def collect(self, version: Version) -> None:
        """Moves the gradients that a backward has left at the version's weights to the parameters."""
        for name, parameter in self._body.trainable().items():
            parameter.grad, version.weights[name].grad = version.weights[name].grad, None

    def expire(self) -> None:
        """The parameters have changed: the next forward begins a version of its own."""
        self._current = None

    def saved(self, used: Iterable[tuple[Key, Version]]) -> tuple[InFlight, ...]:
        """The versions `used` by microbatches in flight, and those to be run again, as values. Nothing ever writes to
        them, so they are no copies."""
        unsplit = self._body.unsplit
        return tuple(
            InFlight(*key, _on_host(unsplit(version.weights)), _on_host(unsplit(version.buffers)))
            for key, version in (*used, *self._again.items())
        )

    def restore(self, in_flight: Iterable[InFlight]) -> None:
        """The forwards of these microbatches, when they run again, will read what they once read."""
        self._current = None
        self._again = {(each.step, each.microbatch): self._restored(each) for each in in_flight}

    def _restored(self, saved: InFlight) -> Version:
        own = self._body.own
        return Version(
            {name: _leaf(tensor) for name, tensor in own(saved.weights).items()},
            {name: copied(tensor) for name, tensor in own(saved.buffers).items()},
            again=True,
        )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _on_host(named: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.detach().cpu() for name, tensor in named.items()}
