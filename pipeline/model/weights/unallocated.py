"""Makes a model whose parameters take no memory: they are on torch's meta device; all else is computed as ever.

a parameter                         shape, dtype and strides, until its stage's weights are read from a file
rotary frequencies, position ids    their values: a buffer, or a tensor that a module keeps, is what the factory makes
a buffer computed of a parameter    on the meta device too: see `demand_known`
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from threading import get_ident
from typing import TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.stage.layers.layer import joined
from stageline.pipeline.stage.layers.memory import empty, layout, parameter_like

Made = TypeVar("Made")
_WAY_OUT = "register it as a persistent buffer, which the weights have, or compute it in the forward"


def made_without_memory(make: Callable[[], Made], seed: int) -> tuple[Made, Made | None]:
    """Return what `make` returns under `seed`; and, if it has drawn random numbers, what it returns under another
    seed."""
    torch.manual_seed(seed)
    before = torch.default_generator.get_state()
    with _parameters_on_meta():
        made = make()
        if torch.equal(before, torch.default_generator.get_state()):
            return made, None
        torch.manual_seed(seed ^ 1)
        return made, make()


def demand_known(parts: Iterable[tuple[str, torch.nn.Module]], again: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Raise `ModelRefused` for a tensor that no file has, and that the factory cannot compute: it follows from
    parameters, or differs in a model made `again`. `parts` are modules by their names in the unsplit model."""
    parts = list(parts)
    for name, buffer in _unsaved_buffers(parts):
        if buffer.is_meta:
            raise ModelRefused(
                f"{name} is computed from parameters when the model is made, and is not among the weights: {_WAY_OUT}"
            )
    computed = {**dict(_unsaved_buffers(parts)), **dict(_kept_tensors(parts))}
    for name, tensor in (*_unsaved_buffers(again := list(again)), *_kept_tensors(again)):
        if name in computed and not _same(tensor, computed[name]):
            raise ModelRefused(
                f"{name} is drawn at random when the model is made, and is not among the weights: {_WAY_OUT}"
            )


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the values of `tensor`, which lies as they do, without gaps.

    `empty_like` does the same, but of a tensor on the meta device it imports torch's compiler: seconds and 30 MB.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    dense = layout(shape, strides).extent == tensor.numel()
    return empty(shape, strides if dense else torch.empty(shape, device="meta").stride(), tensor.dtype)


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device that lies as `tensor` does."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which a parameter that a module of this thread gets is on the meta device."""
    thread = get_ident()
    replaced: MutableMapping[torch.Tensor, torch.nn.Parameter] = WeakIdKeyDictionary()

    def replacement(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if parameter.is_meta or is_lazy(parameter) or get_ident() != thread:
            return None
        if parameter not in replaced:  # two modules may be given one
            replaced[parameter] = parameter_like(parameter, meta_like(parameter))
        return replaced[parameter]

    handle = register_module_parameter_registration_hook(replacement)  # type: ignore[arg-type]  # its type forgets the result
    try:
        yield
    finally:
        handle.remove()


def _unsaved_buffers(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict leaves out."""
    for path, module in _modules(parts):
        for key in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers.get(key)) is not None:
                yield joined(path, key), buffer


def _kept_tensors(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that modules keep as plain attributes. One on the meta device, as `weight_norm` makes of parameters,
    is made again before it is used, or torch refuses it there."""
    for path, module in _modules(parts):
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                yield joined(path, key), value


def _modules(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, part in parts:
        yield from part.named_modules(prefix=name)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) if not one.is_floating_point() else torch.allclose(one, other, 0, 0, equal_nan=True)
