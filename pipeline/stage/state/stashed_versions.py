"""Weight stashing (PipeDream, SOSP'19, section 3.3): a backward uses the weights that its forward used.

An update changes parameters in place, so every forward between two updates runs on a copy that no update touches.

    F5      U3      F6      U4     B5               F5 and B5 use version a, F6 version b
    a       b       b       c      a
"""

from collections.abc import Callable, Iterable, Mapping

import torch

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import Tree

from .stage_state import InFlight, Previous
from .versions import PRESENT, Key, Version, Versions


class StashedVersions(Versions):
    """One for each update since the oldest forward that has yet to go backward."""

    stashed = True

    def __init__(self, body: Body) -> None:
        self._body = body
        self._current: Weights | None = None
        self._reruns: dict[Key, Version] = {}

    def version_for(self, key: Key) -> Version:
        """The current one, or the one that the forward has read before."""
        if key in self._reruns:
            return self._reruns.pop(key)
        return Version(self._weights_of(key[0]), {name: copied(buffer) for name, buffer in self._body.named_buffers()})

    def run(self, version: Version, forward: Callable[[], Tree]) -> Tree:
        """Returns `forward()`, called with the version's weights.

        A forward that runs again gets copies of the buffers that it read before, and leaves the layers' own as they
        are: those hold its changes already. Raises `StageError` for a forward that writes to the weights.
        """
        if version is PRESENT:
            return forward()
        buffers = {name: copied(buffer) for name, buffer in version.buffers.items()} if version.rerun else {}
        before = {name: weight._version for name, weight in version.weights.items()}
        output: Tree = torch.func.functional_call(self._body, {**version.weights, **buffers}, (forward,))
        for name, weight in version.weights.items():
            if weight._version != before[name]:
                raise self._written(name)
        return output

    def lend(self, version: Version) -> None:
        """Moves the gradients of the step's earlier microbatches to the version's weights, where autograd adds to them
        as it does in the unsplit model."""
        for name, parameter in self._body.trainable().items():
            version.weights[name].grad, parameter.grad = parameter.grad, None

    def collect(self, version: Version) -> None:
        """Moves the gradients from the version's weights, where backward leaves them, to the parameters.

        Raises `StageError` for a parameter that has a gradient itself: the forward has read it, not the version's.
        """
        for name, parameter in self._body.trainable().items():
            if parameter.grad is not None:
                raise self._not_stashed(name)
            parameter.grad, version.weights[name].grad = version.weights[name].grad, None

    def invalidate(self) -> None:
        """The next forward makes a new version."""
        self._current = None
        for parameter in self._body.trainable().values():
            parameter.grad = None  # also where an optimizer's zero_grad leaves zeros

    def in_flight(self, versions: Iterable[tuple[Key, Version]]) -> tuple[InFlight, ...]:
        """Nothing ever writes to versions, so they are not copied."""
        unsplit = self._body.by_unsplit_names
        return tuple(
            InFlight(*key, on_host_uncopied(unsplit(version.weights)), on_host_uncopied(unsplit(version.buffers)))
            for key, version in (*versions, *self._reruns.items())
        )

    def restore(self, in_flight: Iterable[InFlight], previous: Previous | None) -> None:
        self._current = None
        self._reruns = {(each.step, each.microbatch): self._restored(each) for each in in_flight}

    def _weights_of(self, step: int) -> Weights:
        """What forwards of `step` read from now on."""
        if self._current is None:
            self._current = {name: leaf_copy(parameter) for name, parameter in self._body.trainable().items()}
        return self._current

    def _title(self, name: str) -> str:
        return next(iter(self._body.by_unsplit_names({name: self._body.trainable()[name]})))

    def _written(self, name: str) -> StageError:
        return StageError(
            f"a forward has written to {self._title(name)}, as torch.nn.Embedding with max_norm does. In asynchronous "
            f"mode it writes to one version of the weight, and the cut would decide which microbatches see that. "
            f'Leave the change to the optimizer, or train with mode = "sync"'
        )

    def _not_stashed(self, name: str) -> StageError:
        return StageError(
            f"{self._title(name)} was read other than as the attribute that it is of its module (from a list, a "
            f"closure, or another object that holds it), so the forward used the newest weights and not the version "
            f'stashed for it. Look it up where it is used, as self.name in the forward, or train with mode = "sync"'
        )

    def _restored_buffers(self, saved: InFlight) -> Weights:
        own = self._body.by_own_names(saved.buffers)
        return {name: copied(tensor).to(self._body.device) for name, tensor in own.items()}

    def _restored(self, saved: InFlight) -> Version:
        own = self._body.by_own_names
        return Version(
            {name: leaf_copy(tensor, self._body.device) for name, tensor in own(saved.weights).items()},
            self._restored_buffers(saved),
            rerun=True,
        )


def leaf_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy of which autograd takes gradients, on its own device or another."""
    return copied(tensor.detach()).to(device or tensor.device).requires_grad_()


def on_host_uncopied(named: Mapping[str, torch.Tensor]) -> Weights:
    """On the CPU; what is there already is not copied."""
    return {name: tensor.detach().cpu() for name, tensor in named.items()}
