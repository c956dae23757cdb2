"""Tensors in memory that is a file's: the system reads them when they are used, and takes them out when it needs room.

weights, gradients      from the first step on; each gradient as soon as autograd has added it up
optimizer state         after each part of an update
snapshots               their copies of both

A tensor keeps its strides and its alignment, since kernels choose by these. Small ones stay where they are.

While one layer computes, the weights of the next one that has any are read ahead:

forward    layer 0     dropout     layer 2     layer 3
fetched    0, 2                    3
backward   layer 3                 layer 2     layer 0
fetched    3, 2                    0                       with the gradients that there are: more is added to them
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from .memory import Ints, copied, empty, layout

LEAST = 1 << 16  # bytes of a tensor; less is not worth a file


class StateFiles(Protocol):
    """Files, each of which is there as long as its memory is used. They are lost with the process."""

    def storage(self, size: int) -> torch.UntypedStorage:
        """The memory of a new file of `size` bytes, aligned as torch's own. Raises what made it impossible."""

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` returned it."""

    def fetch(self, storage: torch.UntypedStorage) -> None:
        """Begins to read the file of what `storage` returned, and does not wait for that."""


class FileMemory:
    """Where a stage on the CPU puts tensors that need not be in memory of the process."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files

    def empty(
        self, shape: Ints, strides: Ints, dtype: torch.dtype, skew: int = 0, device: torch.device | None = None
    ) -> torch.Tensor:
        """As `memory.empty`, in a file unless it is small or on another `device`."""
        size = skew + (layout(shape, strides).extent or 0) * dtype.itemsize
        if size < LEAST or (device is not None and device.type != "cpu"):
            return empty(shape, strides, dtype, skew, device)
        return torch.empty(0, dtype=dtype).set_(self._files.storage(size), skew // dtype.itemsize, shape, strides)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `memory.copied`."""
        return copied(tensor, self.empty)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` without its graph: a copy, or itself if it is there already, is small, or cannot be there."""
        if not self._movable(tensor):
            return tensor
        return self.copied(tensor.detach())

    def take_parameters(self, module: torch.nn.Module) -> None:
        """Moves the parameters of `module`, but for those that share memory with any other tensor, and from now on each
        gradient of theirs that autograd adds up."""
        for parameter in module.parameters():
            self._take_parameter(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]

    def take_state(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Moves what `optimizer` keeps of `parameters`."""
        for entry in (optimizer.state[each] for each in parameters if each in optimizer.state):
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = self.moved(value)

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """They will be used soon."""
        for tensor in filter(self.has, tensors):
            self._files.fetch(tensor.untyped_storage())

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is that of a file."""
        return tensor.layout is torch.strided and self._files.has(tensor.untyped_storage())

    def _take_parameter(self, parameter: torch.Tensor) -> None:
        """A view of it, a buffer or an attribute of a layer, must go on seeing what is written to it: where the former
        memory is still there once the parameter has left it, the parameter goes back."""
        if not self._movable(parameter.data):
            return
        lies = parameter.storage_offset(), parameter.shape, parameter.stride()
        former = weakref.ref(parameter.untyped_storage())
        parameter.data = self.moved(parameter.data)
        if (shared := former()) is not None:
            parameter.data = torch.empty(0, dtype=parameter.dtype).set_(shared, *lies)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad = self.moved(parameter.grad)

    def _movable(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.nbytes < LEAST:
            return False
        if layout(tuple(tensor.shape), tensor.stride()).extent is None or tensor.data_ptr() % tensor.itemsize:
            return False
        return not self._files.has(tensor.untyped_storage())


class NoLayersAhead:
    """The `layers` of a stage whose weights are in memory, in their order."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = layers

    @property
    def layers(self) -> Sequence[Callable[[Any], Any]]:
        """What computes each layer."""
        return self._layers

    @property
    def begins(self) -> tuple[Callable[[object], object], ...]:
        """What is called with each microbatch before its backward."""
        return ()


class LayersAhead(NoLayersAhead):
    """Layers whose weights are in files, and are read ahead of each."""

    def __init__(self, layers: Sequence[torch.nn.Module], memory: FileMemory) -> None:
        super().__init__(layers)
        self._memory = memory
        places = [place for place, layer in enumerate(layers) if any(True for _ in layer.parameters())]
        self._weights = {place: [*layers[place].parameters()] for place in places}
        self._wanted = {place: [following] for place, following in pairwise(places)}
        self._wanted |= dict.fromkeys(places[:1], places[:2])
        self._backward = _from_first_trained(list(self._weights.values()))
        for two_before, weights in zip(self._backward, self._backward[2:], strict=False):
            for trained in [each for each in weights if each.requires_grad][:1]:
                trained.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, weights=two_before: memory.fetch(_with_gradients(weights))
                )

    @property
    def layers(self) -> Sequence[Callable[[Any], Any]]:
        return [partial(self._run, place, layer) for place, layer in enumerate(self._layers)]

    @property
    def begins(self) -> tuple[Callable[[object], object], ...]:
        return (lambda microbatch: self.before_backward(),)

    def _run(self, place: int, layer: torch.nn.Module, x: Any) -> Any:
        self.before_forward(place)
        return layer(x)

    def before_forward(self, place: int) -> None:
        """The layer at `place` is about to run forward."""
        for wanted in self._wanted.get(place, ()):
            self._memory.fetch(self._weights[wanted])

    def before_backward(self) -> None:
        """The stage is about to run backward."""
        for weights in reversed(self._backward[-2:]):
            self._memory.fetch(_with_gradients(weights))


def layers_of(layers: torch.nn.ModuleList, memory: FileMemory | None) -> NoLayersAhead:
    """Return the `layers` as a stage runs them; their parameters are moved to the files of `memory`."""
    if memory is None:
        return NoLayersAhead([*layers])
    memory.take_parameters(layers)
    return LayersAhead([*layers], memory)


def _from_first_trained(layers: Sequence[Sequence[torch.nn.Parameter]]) -> Sequence[Sequence[torch.nn.Parameter]]:
    """Backward uses no weights of the layers before."""
    trained = [number for number, weights in enumerate(layers) if any(each.requires_grad for each in weights)]
    return layers[trained[0] :] if trained else []


def _with_gradients(weights: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in weights:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
