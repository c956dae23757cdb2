"""Parameters that several stages use: each stage gets a copy of its own, and knows what it shares.

The first stage that uses a parameter keeps it; the modules of later ones are copied as far as they have it, so that the
user's own model stays as it is.
"""

import copy
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, ModuleType

import torch
from torch.fx import Graph

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.features.ties import SharedParameters
from stageline.pipeline.program import Ties
from stageline.pipeline.schedule import Mode
from stageline.pipeline.stage.layers.memory import copied, parameter_like

from .layered.traced_layer import TracedPiece
from .segment import Segment

_REGISTERED = ("_parameters", "_buffers", "_modules")
_PASSED = (type, ModuleType, CodeType, FrameType, *weakref.ProxyTypes, Graph, TracedPiece)  # graphs are given tensors


@dataclass(frozen=True, slots=True)
class _Shared:
    """A parameter and its first name in each stage that uses it, by stage, in ascending order."""

    parameter: torch.nn.Parameter
    names: Mapping[int, str]

    @property
    def title(self) -> str:
        """The parameter's name for all stages: the one in the first stage."""
        return next(iter(self.names.values()))

    @property
    def first(self) -> int:
        """Number of the first stage that uses the parameter."""
        return min(self.names)

    @property
    def last(self) -> int:
        """Number of the last stage that uses the parameter."""
        return max(self.names)


def with_own_copies(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments, each with parameters of its own. Raises `ModelRefused` for modules that cannot be copied."""
    found = list(_shared(segments))
    trained = [each for each in found if each.parameter.requires_grad]
    users = {stage for each in trained for stage in each.names}
    return [
        _with_copies(
            part,
            {id(each.parameter): each for each in found if each.first < part.index in each.names},
            _of_stage(part.index, trained) if part.index in users else SharedParameters(),
        )
        for part in segments
    ]


def ties_of(segments: Sequence[Segment], mode: Mode = "sync") -> Ties:
    """Return the pairs of neighbours among the stages that share parameters.

    Raises:
        ModelRefused: There are such pairs in asynchronous mode.
    """
    sharing = [part for part in segments if part.shared]
    ties = tuple((part, later) for part, later in pairwise(sharing) if part.shared.above)
    if ties and mode == "async":
        raise ModelRefused(_why_not_in_async(segments))
    return tuple((part.index, later.index) for part, later in ties)


def _why_not_in_async(segments: Sequence[Segment]) -> str:
    later, title = next((part, title) for part in segments for title in sorted(part.shared.below & {*part.shared.own}))
    first = next(part for part in segments if title in part.shared.own)
    uses = [(part, part.shared.own[title]) for part in (first, later)]
    told = " and ".join(f"{name} of layer {part.layer_with(name)}" for part, name in uses)
    return (
        f"stages {first.index} and {later.index} share a parameter, {told}, and in asynchronous mode each stage "
        f'updates at a time of its own: use schedule.mode = "sync", or cut so that both layers are in one stage'
    )


def _shared(segments: Sequence[Segment]) -> Iterator[_Shared]:
    users: dict[int, dict[int, str]] = {}
    parameters: dict[int, torch.nn.Parameter] = {}
    for part in segments:
        for name, state in part.state:
            if isinstance(state, torch.nn.Parameter):
                parameters[id(state)] = state
                users.setdefault(id(state), {}).setdefault(part.index, name)
    return (_Shared(parameters[key], names) for key, names in users.items() if len(names) > 1)


def _of_stage(stage: int, trained: Sequence[_Shared]) -> SharedParameters:
    return SharedParameters(
        own={each.title: each.names[stage] for each in trained if stage in each.names},
        above=frozenset(each.title for each in trained if each.first <= stage < each.last),
        below=frozenset(each.title for each in trained if each.first < stage <= each.last),
    )


def _with_copies(part: Segment, borrowed: Mapping[int, _Shared], shared: SharedParameters) -> Segment:
    if not borrowed:
        return replace(part, shared=shared)
    own = {key: _copy_of(each.parameter) for key, each in borrowed.items()}
    copies: dict[int, torch.nn.Module] = {}
    layers = tuple(_with(own, layer, copies) for layer in part.layers)
    _refuse_references(part, borrowed, copies)
    return replace(
        part,
        layers=layers,
        shared=shared,
        copies={name: borrowed[id(each)].title for name, each in part.variables.items() if id(each) in borrowed},
    )


def _refuse_references(part: Segment, borrowed: Mapping[int, _Shared], copies: Mapping[int, torch.nn.Module]) -> None:
    """Raise `ModelRefused` for a module that would go on using a borrowed parameter in place of the stage's copy."""
    references = References({key: each.parameter for key, each in borrowed.items()})
    for path, module in _modules_with_attributes(part, copies):
        if found := references.first(module):
            attribute, key = found
            shared = borrowed[key]
            raise ModelRefused(
                f"stages {shared.first} and {part.index} share a parameter, {shared.title}, and stage {part.index} "
                f"gets a copy of it; but {attribute} of {path}, of type {type(module).__name__}, leads to the "
                f"original. Look "
                f"it up where it is used, as self.name in the forward; a hook has the module as its argument. Or cut "
                f"so that one stage has both uses (docs/guides/models.md)"
            )


def _modules_with_attributes(
    part: Segment, copies: Mapping[int, torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules whose attributes may lead to a borrowed parameter, with their names.

    These are the modules of the model, and the copied layers made of several of them. The function of another layer may
    know the whole model, as those of the families do, which take its settings from it.
    """
    for name, module in part.parts:
        yield from module.named_modules(prefix=name)
    yield from ((name, each) for name, each in zip(part.names, part.layers, strict=True) if id(each) in copies)


def _copy_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    data = parameter.detach()
    return parameter_like(parameter, torch.empty_like(data) if data.is_meta else copied(data))


def _with(
    own: Mapping[int, torch.nn.Parameter], module: torch.nn.Module, copies: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    """Return `module` if it has none of the parameters; else a copy of it with its `own`, which shares the rest.

    A module has one copy, which is kept in `copies`.
    """
    if id(module) in copies or not any(id(each) in own for each in module.parameters()):
        return copies.get(id(module), module)
    if "forward" in vars(module):
        raise ModelRefused(
            f"a parameter of this {type(module).__name__} belongs to an earlier stage too, so this stage needs a copy "
            f"of it, and its forward was replaced: cut so that one stage has both, or replace it in its class"
        )
    made = copies[id(module)] = copy.copy(module)
    made._parameters = {
        key: None if each is None else own.get(id(each), each) for key, each in module._parameters.items()
    }
    made._buffers = dict(module._buffers)
    made._modules = {key: None if each is None else _with(own, each, copies) for key, each in module._modules.items()}
    return made


class References:
    """References to `originals` from modules, other than by registration: a copy of a module would go on using them.

        self.weight = weight             registered: the copy has its own
        self.again = [weight]            in a list, tuple, dict or set, or in any other object
        self.act = self._act             a bound method, a partial, what a function encloses: each refers to a module
        self.turned = weight.data.T      a tensor in the same memory
        LSTM()._flat_weights             torch itself does it

    Modules are given one after the other, and an object to which several refer is searched once. Global names of a
    function's file are not searched, nor are objects behind weak proxies.

    Args:
        originals: Parameters by their ids.
    """

    def __init__(self, originals: Mapping[int, torch.Tensor]) -> None:
        """Prepare the search for `originals`, parameters by their ids."""
        self._originals = originals
        self._places = {address: key for key, each in originals.items() if (address := _address(each))}
        self._seen: dict[int, object] = {}  # keeps what it has: an id is that of one object while it lives

    def first(self, module: torch.nn.Module) -> tuple[str, int] | None:
        """Return the first attribute of `module` from which an original can be reached, and the original's id.

        Returns None if there is no such attribute. Registered parameters, buffers and modules do not count.
        """
        for attribute, value in vars(module).items():
            if attribute not in _REGISTERED:
                for tensor in self._tensors(value):
                    if (key := self._original(tensor)) is not None:
                        return attribute, key
        return None

    def _tensors(self, value: object) -> Iterator[torch.Tensor]:
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if id(each) in self._seen or issubclass(type(each), _PASSED):  # isinstance fails with a dead weak proxy
                continue
            self._seen[id(each)] = each
            if isinstance(each, torch.Tensor):
                yield each
            else:
                waiting.extend(_referents(each))

    def _original(self, tensor: torch.Tensor) -> int | None:
        return id(tensor) if id(tensor) in self._originals else self._places.get(_address(tensor))


def _referents(value: object) -> list[object]:
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return [value()] if isinstance(value, weakref.ref) else gc.get_referents(value)


def _address(tensor: torch.Tensor) -> int:
    """Return the address at which the tensor's memory begins; 0 if it has none."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain and not tensor.is_meta else 0
