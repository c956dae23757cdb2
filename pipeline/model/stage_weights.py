"""Weights of a stage: where they are, and how they get into the stage's modules.

made without memory       [meta]  [meta]  [meta]
check                     names, shapes and dtypes, of the headers of the files alone
load                      memory of their own, filled from the files; then set by each module's load_state_dict

The model is made with parameters that take no memory: they are on torch's meta device; all else is computed.

a parameter                         shape, dtype and strides, until its stage's weights are read from a file
rotary frequencies, position ids    their values: a buffer, or a tensor that a module keeps, is what the factory makes
a buffer computed of a parameter    on the meta device too: see `demand_known`
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.tensor_files import (
    Form,
    Twins,
    files_by_name,
    forms_in,
    listed,
    misformed,
    misnamed,
    read_into,
    sources,
)
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.stage.layers.layer import joined, state_of
from stageline.pipeline.stage.layers.memory import empty, layout, parameter_like

from .layered.layers import StoredNames

Made = TypeVar("Made")
_WAY_OUT = "register it as a persistent buffer, which the weights have, or compute it in the forward"
Parts = Sequence[tuple[str, torch.nn.Module]]  # modules of the unsplit model, by their names there


def made_without_memory(make: Callable[[], Made], seed: int) -> tuple[Made, Made | None]:
    """Return what `make` returns under `seed`, with parameters on the meta device; and a second such model or None.

    The second model is made under another seed, if `make` has drawn random numbers.
    """
    torch.manual_seed(seed)
    before = torch.default_generator.get_state()
    with _parameters_on_meta():
        made = make()
        if torch.equal(before, torch.default_generator.get_state()):
            return made, None
        torch.manual_seed(seed ^ 1)
        return made, make()


def demand_known(parts: Iterable[tuple[str, torch.nn.Module]], again: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Raise `ModelRefused` for a tensor that no file has and that the factory cannot compute.

    Such a tensor follows from parameters, or differs between the two models.

    Args:
        parts: Modules of the model by their names in the unsplit model.
        again: Modules of a model that was made again, under another seed.
    """
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
    """Return memory for the values of `tensor`, with the same strides but without gaps.

    `empty_like` does the same, but for a tensor on the meta device it imports torch's compiler: seconds and 30 MB.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    dense = layout(shape, strides).extent == tensor.numel()
    return empty(shape, strides if dense else torch.empty(shape, device="meta").stride(), tensor.dtype)


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the shape, strides and dtype of `tensor`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module of this thread gets in the context on the meta device."""
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
    """Yield the buffers that a state dict leaves out, by name."""
    for path, module in _modules(parts):
        for key in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers.get(key)) is not None:
                yield joined(path, key), buffer


def _kept_tensors(parts: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that modules keep as plain attributes, by name.

    A tensor on the meta device, as `weight_norm` makes of parameters, is left out: it is made again before it is used,
    or torch refuses it there.
    """
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


@dataclass(frozen=True, slots=True)
class StageWeights:
    """The files that have the weights of a stage.

    Attributes:
        key: The plan's key that names the files.
        path: Path of a file or a folder.
        index: Number of the stage.
        known: Names of all weights of the model.
        twins: Names that share a parameter.
        names: Names that files have for the model's weights.
    """

    key: str
    path: Path
    index: int
    known: frozenset[str]
    twins: Twins
    names: StoredNames

    def check(self, parts: Parts) -> None:
        """Raise `ModelRefused` if tensors that `parts` need are missing or have another form. Reads headers alone."""
        self._located(variables_of(parts))

    def load(self, parts: Parts) -> None:
        """Read the tensors that `parts` need, and set them. Raises `ModelRefused`, and then nothing is set."""
        late = self._late(parts)
        wanted = {**variables_of(parts), **late}
        located = self._located(wanted)
        targets = {source: memory_like(wanted[name]) for name, (_, source) in located.items()}
        try:
            for file in dict.fromkeys(file for file, _ in located.values()):
                read_into(file, {source: targets[source] for at, source in located.values() if at == file})
        except ModelRefused as refused:
            raise self._refused(str(refused)) from refused
        for name, (module, key) in unset_buffers(parts).items():
            module._buffers[key] = late.get(name)  # a place, which load_state_dict fills
        set_state(parts, wanted, {name: targets[source] for name, (_, source) in located.items()})

    def unload(self, parts: Parts) -> None:
        """Put the weights of `parts` back on the meta device, as they were before `load`."""
        former = variables_of(parts)
        set_state(parts, former, {name: meta_like(tensor) for name, tensor in former.items()})

    def _late(self, parts: Parts) -> dict[str, torch.Tensor]:
        """Return tensors without values for the buffers that `parts` register as None and the files have."""
        try:
            stored = self._stored()
            forms = _forms({name: stored[name] for name in unset_buffers(parts) if name in stored})
        except ModelRefused as refused:
            raise self._refused(str(refused)) from refused
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forms.items()}

    def _located(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, tuple[Path, str]]:
        """Return the file of each wanted entry, and its name there, by name in the model. Raises `ModelRefused`."""
        try:
            stored = self._stored()
            if faults := list(misnamed(wanted, stored, self.twins, self.known)):
                raise ModelRefused(listed(faults))
            located = {name: stored[source] for name, source in sources(wanted, stored, self.twins).items()}
            self._demand_shards(located)
            if faults := list(misformed(wanted, _forms(located))):
                raise ModelRefused(listed(faults))
        except ModelRefused as refused:
            raise self._refused(str(refused)) from refused
        return located

    def _stored(self) -> dict[str, tuple[Path, str]]:
        """Return the file of each entry, and its name there, by name in the model. Raises `ModelRefused`."""
        found: dict[str, tuple[Path, str]] = {}
        for source, file in files_by_name(self.path).items():
            name = self.names.in_model(source, self.known)
            if name in found:
                raise ModelRefused(f"{found[name][1]} and {source} are both the model's {name}: leave one out")
            if name is not None:
                found[name] = file, source
        return found

    def _demand_shards(self, located: Mapping[str, tuple[Path, str]]) -> None:
        """Raise `ModelRefused` if a file of the stage's entries is missing. Files of other stages may be missing."""
        for name, (file, _) in located.items():
            if not file.exists():
                more = sum(other == file for other, _ in located.values()) - 1
                raise ModelRefused(
                    f"the shard {file.name} is not there, which has {name}{f' and {more} more' if more else ''}"
                )

    def _refused(self, reason: str) -> ModelRefused:
        return ModelRefused(Setting(self.key), f' = "{self.path}", for stage {self.index}: {reason}')


def variables_of(parts: Parts) -> dict[str, torch.Tensor]:
    """Return the entries of the state dict of `parts`: the parameters and buffers themselves, by name.

    Raises:
        ModelRefused: An entry is no tensor.
    """
    found = {joined(name, key): value for name, part in parts for key, value in part.state_dict(keep_vars=True).items()}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ModelRefused(
                f"{name} is of type {type(value).__name__}, not a tensor: files of weights have tensors alone"
            )
    return found


def unset_buffers(parts: Parts) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the buffers that are registered as None and belong to the state dict, by name: the module and its key.

    A forward may have given such a buffer a tensor, which is then in files of weights.
    """
    return {
        joined(name, joined(path, key)): (module, key)
        for name, part in parts
        for path, module in part.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is None and key not in module._non_persistent_buffers_set
    }


def twins_of(variables: Mapping[str, torch.Tensor], copies: Mapping[str, str]) -> Twins:
    """Return, for each name of a parameter with several names, all its names, in order.

    Args:
        variables: Parameters and buffers by name.
        copies: For each name of a stage's copy, the name in the first stage.
    """
    names: dict[int, list[str]] = {}
    for name in variables:
        names.setdefault(id(variables[copies.get(name, name)]), []).append(name)
    return {name: shared for shared in names.values() if len(shared) > 1 for name in shared}


def set_state(parts: Parts, former: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Put `values` in the place of the parameters and buffers `former`. Names that share a tensor go on sharing it.

    Args:
        parts: Modules of the unsplit model, by their names there.
        former: Present parameters and buffers, by name.
        values: New tensors, by name.
    """
    made: dict[int, torch.Tensor] = {}
    for name, old in former.items():
        if id(old) not in made:
            made[id(old)] = parameter_like(old, values[name]) if isinstance(old, torch.nn.Parameter) else values[name]
    state = {name: made[id(old)] for name, old in former.items()}
    for name, part in parts:
        part.load_state_dict(state_of(part, name, state), assign=True)


def _forms(located: Mapping[str, tuple[Path, str]]) -> dict[str, Form]:
    """Return shape and dtype of each located entry; raise `ModelRefused` for a file that lacks what its index names."""
    found: dict[str, Form] = {}
    for file in dict.fromkeys(file for file, _ in located.values()):
        names = {name: source for name, (at, source) in located.items() if at == file}
        forms = forms_in(file, set(names.values()))
        if absent := [source for source in names.values() if source not in forms]:
            raise ModelRefused(f"{file.name} has no {absent[0]}, which the index names there")
        found |= {name: forms[source] for name, source in names.items()}
    return found
