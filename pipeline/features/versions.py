"""Versions of weights: a forward reads one, and its backward reads the same.

Versions           the parameters, which an update changes in place           synchronous schedules
StashedVersions    the newest at the forward; no update writes to a version   asynchronous mode
TwoVersions        the weights before the newest update                       name = "2bw"

Weight stashing (PipeDream, SOSP'19, section 3.3): a backward uses the weights that its forward used.

An update changes parameters in place, so every forward between two updates runs on a copy that no update touches.

    F5      U3      F6      U4     B5               F5 and B5 use version a, F6 version b
    a       b       b       c      a

Double-buffered weights (PipeDream-2BW, arXiv 2006.09503, section 3.1): the gradients of a step are computed at the
weights before the newest update, W(t+1) = W(t) - rate * gradient(W(t-1)), and no third version is ever needed.

With W(t) the weights after t updates, the microbatches of step t read W(t-1), those of steps 0 and 1 W(0). A stage
that is ahead of the last begins step t before its update t-1 makes W(t), the last one after it.

    step 1, update 1      step 2, begun     update 2        step 2, the rest
    W(0)    W(1)          W(1)              W(1)  W(2)      W(1)

The memory of the parameters becomes that of the version before, which graphs may hold, and the parameters go on in a
copy, which the optimizer then changes. So there are two versions in memory, one of them the parameters themselves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stageline.pipeline.errors import ForeignState, ModelRefused, StageError
from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied, overlaps
from stageline.pipeline.stage.layers.passage import Backward, Key, Passage, Run, Version, present
from stageline.pipeline.tree import Tree


@dataclass(frozen=True, slots=True)
class InFlight:
    """A microbatch between its forward and its backward, with the tensors that its forward has read.

    Only tensors that later actions change are kept. All are on the CPU.

    Attributes:
        step: Step of the microbatch.
        microbatch: Number of the microbatch within the step.
        weights: Trainable parameters that the forward has read, by the unsplit model's names.
        buffers: Buffers as they were before the forward, by the unsplit model's names.
    """

    step: int
    microbatch: int
    weights: Weights
    buffers: Weights


@dataclass(frozen=True, slots=True)
class Previous:
    """The trainable parameters before the last of `updates` updates, by the unsplit model's names."""

    updates: int
    weights: Weights


class Versions:
    """The versions of one stage's weights that are in use. Here there is one: the parameters themselves.

    Attributes:
        stashed: True if each forward has weights that no update writes to.
        indivisible: Reason why a backward cannot be halved; "" if it can.
        version_for: Returns the version that the forward of a microbatch reads.
    """

    stashed = False  # whether each forward has weights that no update writes to

    indivisible = ""  # why a backward cannot be halved

    version_for: Callable[[Key], Version] = staticmethod(present)  # that which the forward of a microbatch reads

    def around(self, run: Run) -> Run:
        """Return `run` with the weights of each microbatch's version."""
        return run

    def around_backward(self, backward: Backward) -> Backward:
        """Return `backward` with the gradients of each microbatch's version."""
        return backward

    @property
    def previous(self) -> Previous | None:
        """The weights besides the parameters that future microbatches read; None if there are none."""
        return None

    def begin_update(self) -> bool:
        """Prepare for an update, before the parameters change. Return True if they now lie in other memory."""
        return False

    def invalidate(self) -> None:
        """Note that the parameters have changed."""

    def in_flight(self, versions: Iterable[tuple[Key, Version]]) -> tuple[InFlight, ...]:
        """Return the state of microbatches that have yet to go backward, and of those still to be run again.

        Args:
            versions: Step and microbatch of each microbatch that has yet to go backward, with the version that its
                forward read.
        """
        return ()

    def restore(self, in_flight: Iterable[InFlight], previous: Previous | None) -> None:
        """Make the forwards of microbatches that run again read what they read before.

        Args:
            in_flight: The microbatches, as the method `in_flight` returned them.
            previous: The property `previous` of the stage that this state was taken from.
        """


class StashedVersions(Versions):
    """The stashed versions of one stage's weights.

    There is one for each update since the oldest forward that has yet to go backward.
    """

    stashed = True
    indivisible = "stashes weights, and cannot split a backward: use backward"

    def __init__(self, body: Body) -> None:
        """Begin without a version; the first forward makes one of the parameters of `body`."""
        self._body = body
        self._current: Weights | None = None
        self._reruns: dict[Key, Version] = {}

    def version_for(self, key: Key) -> Version:
        """Return the current version, or for a forward that runs again the version that it has read before."""
        if key in self._reruns:
            return self._reruns.pop(key)
        return Version(self._weights_of(key[0]), {name: copied(buffer) for name, buffer in self._body.named_buffers()})

    def around(self, run: Run) -> Run:
        """Return `run` with the weights of each microbatch's version.

        A forward that runs again gets copies of the buffers that it read before, and leaves the layers' own as they
        are: those hold its changes already. The returned function raises `StageError` for a forward that writes to the
        weights.
        """

        def versioned(x: Tree, passage: Passage) -> Tree:
            version = passage.version
            buffers = {name: copied(buffer) for name, buffer in version.buffers.items()} if version.rerun else {}
            before = {name: weight._version for name, weight in version.weights.items()}
            read = {**version.weights, **buffers}
            output: Tree = torch.func.functional_call(self._body, read, (partial(run, x, passage),))
            for name, weight in version.weights.items():
                if weight._version != before[name]:
                    raise self._written(name)
            return output

        return versioned

    def around_backward(self, backward: Backward) -> Backward:
        """Return `backward` with the gradients of each microbatch's version.

        The gradients of the step's earlier microbatches are moved to the version's weights, where autograd adds to them
        as it does in the unsplit model, and back afterwards. The returned function raises `StageError` if a parameter
        itself has a gradient: the forward has then read the parameter and not the version's weight.
        """

        def versioned(version: Version, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
            for name, parameter in self._body.trainable().items():
                version.weights[name].grad, parameter.grad = parameter.grad, None
            backward(version, outputs, gradients)
            for name, parameter in self._body.trainable().items():
                if parameter.grad is not None:
                    raise self._not_stashed(name)
                parameter.grad, version.weights[name].grad = version.weights[name].grad, None

        return versioned

    def invalidate(self) -> None:
        """Note that the parameters have changed: the next forward makes a new version."""
        self._current = None
        for parameter in self._body.trainable().values():
            parameter.grad = None  # also where an optimizer's zero_grad leaves zeros

    def in_flight(self, versions: Iterable[tuple[Key, Version]]) -> tuple[InFlight, ...]:
        """Return the state of microbatches in flight. Versions are not copied, since nothing ever writes to them."""
        unsplit = self._body.by_unsplit_names
        return tuple(
            InFlight(*key, on_host_uncopied(unsplit(version.weights)), on_host_uncopied(unsplit(version.buffers)))
            for key, version in (*versions, *self._reruns.items())
        )

    def restore(self, in_flight: Iterable[InFlight], previous: Previous | None) -> None:
        """Make the forwards of the microbatches `in_flight` read what they read before, when they run again."""
        self._current = None
        self._reruns = {(each.step, each.microbatch): self._restored(each) for each in in_flight}

    def _weights_of(self, step: int) -> Weights:
        """Return the weights that forwards of `step` read from now on."""
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
    """Return a copy of `tensor` that is a leaf of autograd and requires a gradient.

    Args:
        tensor: The tensor to copy.
        device: Device of the copy; by default, that of `tensor`.
    """
    return copied(tensor.detach()).to(device or tensor.device).requires_grad_()


def on_host_uncopied(named: Mapping[str, torch.Tensor]) -> Weights:
    """Return the tensors detached, on the CPU. A tensor that is there already is not copied."""
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def versions_of(body: Body, *, stash: bool, delay: bool) -> Versions:
    """Return the versions of the weights of `body` that a stage keeps; by default the present one alone.

    Args:
        body: The stage's layers.
        stash: True to keep all versions that microbatches in flight have read.
        delay: True to keep two versions. Takes precedence over `stash`.

    Raises:
        ModelRefused: With `delay`, a trained parameter shares memory with another tensor.
    """
    if delay:
        return TwoVersions(body)
    return StashedVersions(body) if stash else Versions()


class TwoVersions(StashedVersions):
    """The two versions of one stage's weights. Updates are counted, so every step must have one."""

    def __init__(self, body: Body) -> None:
        """Begin before the first update.

        Args:
            body: The stage's layers.

        Raises:
            ModelRefused: A trained parameter shares memory. From the first update on it would have memory of its own.
        """
        super().__init__(body)
        _demand_own_memory(body)
        self._updates = 0
        self._before: Weights | None = None  # the newest update; None before the first

    def version_for(self, key: Key) -> Version:
        """Return the version that the forward of microbatch `key` reads.

        Raises `StageError` for a step that is neither the next to be updated nor the one after it.
        """
        if key[0] not in (self._updates, self._updates + 1):
            raise StageError(
                f"microbatch {key[1]} of step {key[0]} came after {self._updates} updates: delayed weights are there "
                f"for steps {self._updates} and {self._updates + 1}, and every step ends with an update"
            )
        return super().version_for(key)

    @property
    def previous(self) -> Previous | None:
        """The weights before the newest update; None before the first.

        They are not copied, since nothing writes to them.
        """
        if self._before is None:
            return None
        return Previous(self._updates, on_host_uncopied(self._body.by_unsplit_names(self._before)))

    def begin_update(self) -> bool:
        """Keep the parameters' memory as the version before the update, and give the parameters a copy. Return True."""
        self._before, self._current = self._newest(), None
        self._updates += 1
        for parameter in self._body.trainable().values():
            parameter.data = copied(parameter.data)
        return True

    def in_flight(self, versions: Iterable[tuple[Key, Version]]) -> tuple[InFlight, ...]:
        """Return the state of microbatches in flight, without weights: those are in `previous`."""
        unsplit = self._body.by_unsplit_names
        return tuple(
            InFlight(*key, {}, on_host_uncopied(unsplit(version.buffers)))
            for key, version in (*versions, *self._reruns.items())
        )

    def restore(self, in_flight: Iterable[InFlight], previous: Previous | None) -> None:
        """Make the forwards of the microbatches `in_flight` read what they read before, when they run again.

        Raises `ForeignState` if `previous` does not have the weights of exactly the trained parameters.
        """
        self._updates, self._before = 0, None
        if previous is not None:
            weights = self._body.by_own_names(previous.weights)
            if weights.keys() != self._body.trainable().keys():
                raise ForeignState(f"the weights before update {previous.updates} are not those of all that is trained")
            self._updates = previous.updates
            self._before = {name: leaf_copy(each, self._body.device) for name, each in weights.items()}
        super().restore(in_flight, previous)

    def _weights_of(self, step: int) -> Weights:
        before = self._before
        return self._newest() if before is None or step > self._updates else before

    def _newest(self) -> Weights:
        """Return the present weights, in the memory of the parameters.

        They are made from `data`: tensors from `detach` would share the parameters' count of changes, too.
        """
        if self._current is None:
            trainable = self._body.trainable().items()
            self._current = {name: parameter.data.requires_grad_() for name, parameter in trainable}
        return self._current

    def _restored(self, saved: InFlight) -> Version:
        return Version(self._weights_of(saved.step), self._restored_buffers(saved), rerun=True)


def _demand_own_memory(body: Body) -> None:
    trained = body.by_unsplit_names(body.trainable())
    variables = body.by_unsplit_names({**dict(body.named_parameters()), **dict(body.named_buffers())})
    for one, other in overlaps(variables):
        if one in trained or other in trained:
            raise ModelRefused(
                f'{one} and {other} share memory, and name = "2bw" gives a trained parameter other memory at each '
                f"update: what is written to one would no longer be in the other. Make them one parameter, clone one "
                f'of them, or use name = "1f1b"'
            )
