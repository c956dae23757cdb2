"""Tensors in memory that belongs to a file: the system reads them on use, and takes them out when it needs room.

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
    """Files, each of which exists as long as its memory is used. They are lost with the process."""

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return the memory of a new file of `size` bytes, aligned as torch's own.

        Raises the exception that made this impossible.
        """

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return True if the method `storage` returned this `storage`."""

    def fetch(self, storage: torch.UntypedStorage) -> None:
        """Begin to read the file behind `storage`. Returns at once."""


class FileMemory:
    """The memory for tensors of a stage on the CPU that need not be in memory of the process."""

    def __init__(self, files: StateFiles) -> None:
        """Take the files."""
        self._files = files

    def empty(
        self, shape: Ints, strides: Ints, dtype: torch.dtype, skew: int = 0, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return an uninitialised tensor in a file, or in memory if it is small or on a device other than the CPU.

        Args:
            shape: Shape of the tensor.
            strides: Strides in elements, not of an overlapping layout.
            dtype: Type of the elements.
            skew: Bytes from the alignment boundary to the first element.
            device: Device of the tensor; by default the CPU.
        """
        size = skew + (layout(shape, strides).extent or 0) * dtype.itemsize
        if size < LEAST or (device is not None and device.type != "cpu"):
            return empty(shape, strides, dtype, skew, device)
        return torch.empty(0, dtype=dtype).set_(self._files.storage(size), skew // dtype.itemsize, shape, strides)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` in a file, in the same layout, as `memory.copied` makes it in memory."""
        return copied(tensor, self.empty)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` in a file, without its graph.

        Returns `tensor` itself if it is in a file already, is small, or cannot be there.
        """
        if not self._movable(tensor):
            return tensor
        return self.copied(tensor.detach())

    def take_parameters(self, module: torch.nn.Module) -> None:
        """Move the parameters of `module`, and from now on each of their gradients that autograd adds up, into files.

        Parameters that share memory with any other tensor stay.
        """
        for parameter in module.parameters():
            self._take_parameter(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]

    def take_state(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Move the tensors that `optimizer` keeps of `parameters` into files."""
        for entry in (optimizer.state[each] for each in parameters if each in optimizer.state):
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = self.moved(value)

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to read those of `tensors` that are in files, since they will be used soon."""
        for tensor in filter(self.has, tensors):
            self._files.fetch(tensor.untyped_storage())

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of `tensor` is that of a file."""
        return tensor.layout is torch.strided and self._files.has(tensor.untyped_storage())

    def _take_parameter(self, parameter: torch.Tensor) -> None:
        """Move `parameter` unless its memory is shared.

        A view of it, a buffer or an attribute of a layer, must go on seeing what is written to it: where the former
        memory still exists once the parameter has left it, the parameter goes back.
        """
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
    """The layers of a stage whose weights are in memory, in their order."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        """Take the layers, in order."""
        self._layers = layers

    @property
    def layers(self) -> Sequence[Callable[[Any], Any]]:
        """The functions that compute the layers, in order."""
        return self._layers

    @property
    def begins(self) -> tuple[Callable[[object], object], ...]:
        """The functions to call with each microbatch before its backward."""
        return ()


class LayersAhead(NoLayersAhead):
    """The layers of a stage whose weights are in files. The weights of a layer are read ahead of its computation."""

    def __init__(self, layers: Sequence[torch.nn.Module], memory: FileMemory) -> None:
        """Find out which weights to read ahead, and register hooks for the backward.

        Args:
            layers: The layers, in order.
            memory: Reads their weights.
        """
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
        """The functions that compute the layers, in order; each first begins to read the next weights."""
        return [partial(self._run, place, layer) for place, layer in enumerate(self._layers)]

    @property
    def begins(self) -> tuple[Callable[[object], object], ...]:
        """The functions to call with each microbatch before its backward."""
        return (lambda microbatch: self.before_backward(),)

    def _run(self, place: int, layer: torch.nn.Module, x: Any) -> Any:
        self.before_forward(place)
        return layer(x)

    def before_forward(self, place: int) -> None:
        """Begin to read the weights that follow, since the layer at `place` is about to run forward."""
        for wanted in self._wanted.get(place, ()):
            self._memory.fetch(self._weights[wanted])

    def before_backward(self) -> None:
        """Begin to read the weights of the last layers, since the stage is about to run backward."""
        for weights in reversed(self._backward[-2:]):
            self._memory.fetch(_with_gradients(weights))


def layers_of(layers: torch.nn.ModuleList, memory: FileMemory | None) -> NoLayersAhead:
    """Return the `layers` as a stage runs them; their parameters are moved to the files of `memory`, if it is given."""
    if memory is None:
        return NoLayersAhead([*layers])
    memory.take_parameters(layers)
    return LayersAhead([*layers], memory)


def _from_first_trained(layers: Sequence[Sequence[torch.nn.Parameter]]) -> Sequence[Sequence[torch.nn.Parameter]]:
    """Return the weights of the layers from the first trained one on.

    Backward uses no weights of the layers before it.
    """
    trained = [number for number, weights in enumerate(layers) if any(each.requires_grad for each in weights)]
    return layers[trained[0] :] if trained else []


def _with_gradients(weights: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in weights:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
