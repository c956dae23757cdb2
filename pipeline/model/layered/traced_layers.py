"""The layers of a model that torch.export has traced.

    forward, training   ─┐
                         ├─ the layers that both have ─> pieces of each ─> layers
    forward, evaluation ─┘

A module is a layer if its place in the model makes it one (`layer_names.py`) and the forward calls it once. A block of
modules that is called several times is a layer in each call: `block`, `block@2`. Computation between two calls belongs
to the layer that was called before it.

A layer has its own module. What it needs of elsewhere, such as a parameter that belongs to the model itself, it has as
single tensors; the last layer also has what no layer needs, since the model's state has it.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.layered.layers import Layers
from stageline.pipeline.model_names import near
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.stage.layers.body import evaluating
from stageline.pipeline.stage.layers.skipped_calls import all_hooks
from stageline.pipeline.tree import Tree, map_leaves

from .comparison import difference_of
from .example import Example
from .export import Forward, called_module, traced_forward
from .layer_names import layer_names
from .output import COMPUTED
from .pieces import outer_calls, pieces_of
from .refusal import demand_python
from .traced_layer import TracedFunction, TracedPiece, TwoModes, Values

_SHOWN = 2  # layers of a kind in an error
_Hooks = Sequence[tuple[str, object]]  # each with its title


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer.

    Attributes:
        call: The call that begins the layer, such as `block`, or `block@2` for the second one of that module.
        names: Names of the parts in the model.
        places: For each parameter or buffer, by name in the model, the number of its part and the rest of its name.
    """

    call: str
    names: tuple[str, ...]
    places: Mapping[str, tuple[int, str]]


def traced(model: torch.nn.Module, example: Tree, within: Sequence[str] = ()) -> Layers:
    """Return the layers of `model` that torch.export finds, for a model of no known family and without `Layers`.

    All modules go on in the modes, training or not, that they are in now.

    Args:
        model: The model.
        example: Inputs of a batch: a tensor, a dict of the model's arguments, or a tuple of them; tensors of any dtype,
            of shape (rows, ...). With 2 rows or more, microbatches may have any number of rows from 2 on, and 1 row if
            that has the same bits in the layers; with 1 row, they have 1 row each.
        within: Names of modules that are no layers: the modules in them are.

    Raises:
        ModelRefused: The model cannot be traced; the error has torch.export's reason.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelRefused(f"traced() was given an object of type {type(model).__name__}; expected a torch module")
    demand_python(model)
    inputs, candidates = Example(example), layer_names(model, within)
    layers, said = _of_texts(model, inputs, candidates)
    if layers is None or layers.difference or _found(said):
        fixed, others = _traced(model, inputs, candidates)
        if layers is None or layers.difference != fixed.difference or _found(said) != _found(others):
            layers, said = fixed, others
    for each in said:
        warnings.warn(each.message, each.category, stacklevel=2)
    return layers


_Traced = tuple["TracedLayers", list[warnings.WarningMessage]]


def _of_texts(
    model: torch.nn.Module, inputs: Example, candidates: Sequence[str]
) -> tuple["TracedLayers | None", list[warnings.WarningMessage]]:
    """Return the layers for texts of other lengths than the example's, too, with warnings about them.

    Returns None if the example is no text, if torch.export cannot leave the length open, or if a text of another length
    has other bits in the layers.
    """
    texts = inputs.of_any_length()
    if texts is None:
        return None, []
    try:
        layers, said = _traced(model, texts, candidates)
        return (layers, said) if layers.difference or layers.has_any_length() else (None, [])
    except ModelRefused:
        return None, []


def _found(said: Sequence[warnings.WarningMessage]) -> list[str]:
    """Return the texts of the warnings about differences between graphs and model."""
    return [str(each.message) for each in said if issubclass(each.category, RuntimeWarning)]


def _traced(model: torch.nn.Module, inputs: Example, candidates: Sequence[str]) -> _Traced:
    with warnings.catch_warnings(record=True, action="always") as said:
        training = traced_forward(model, inputs, candidates, trains=True)
        evaluation = _evaluation(model, training.example, candidates)
        pieces = _cut(model, training, evaluation)
        layers = TracedLayers(model, candidates, pieces, evaluation.example)
    return _of_one_row(model, candidates, pieces, layers, _found(said)) or layers, said


def _evaluation(model: torch.nn.Module, example: Example, candidates: Sequence[str]) -> Forward:
    with evaluating(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # which evaluation needs not
        try:
            return traced_forward(model, example, candidates, trains=False)
        except ModelRefused:  # such as nested tensors, which torch's modules only make without gradients
            return traced_forward(model, example, candidates, trains=True)


def _of_one_row(
    model: torch.nn.Module,
    candidates: Sequence[str],
    pieces: "CutForwards",
    layers: "TracedLayers",
    known: Collection[str],
) -> "TracedLayers | None":
    """Return the layers for microbatches of one row, too; None if one row has other bits in them, or is refused.

    torch.export's findings for two rows and more need not hold for one, which is therefore compared as well.

    Args:
        model: The model.
        candidates: Names of the modules that may be layers.
        pieces: The traced forwards.
        layers: The layers for two rows and more.
        known: Texts of the warnings about these; others refuse one row.
    """
    wide = layers.example.from_one_row()
    if wide is None or layers.difference:
        return None
    try:
        with warnings.catch_warnings(record=True, action="always") as said:
            found = TracedLayers(model, candidates, pieces, wide, wide.first_row())
    except ModelRefused:  # the model itself does not take it, such as a BatchNorm
        return None
    return None if found.difference or {*_found(said)} - {*known} else found


@dataclass(frozen=True, slots=True)
class CutForwards:
    """The forwards of a model in both modes, training first, cut into the pieces of its layers.

    Attributes:
        names: Names of the layers.
        calls: Names of the modules that the forward calls, in training mode.
        modes: The pieces of each mode, and the output.
    """

    names: Sequence[str]
    calls: Sequence[str]
    modes: Sequence[tuple[Sequence[TracedPiece], Tree]]


def _cut(model: torch.nn.Module, training: Forward, evaluation: Forward) -> CutForwards:
    """Return the pieces of those modules that the traced forwards call once. Raises `ModelRefused` without any."""
    names = _calls_of_layers(model, training, evaluation)
    return CutForwards(
        names, training.calls, [(pieces_of(each, names), each.output) for each in (training, evaluation)]
    )


class TracedLayers(Layers):
    """The layers of a model that torch.export has traced.

    Attributes:
        example: The example of the trace, with the sizes that microbatches may have.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        candidates: Sequence[str],
        pieces: CutForwards,
        example: Example,
        compared: Example | None = None,
    ) -> None:
        """Make the layers, and compare them with the model.

        Args:
            model: The model.
            candidates: Names of the modules that may be layers.
            pieces: The traced forwards.
            example: The example, with the sizes that both forwards are for.
            compared: The microbatch to compare with; None for the example.
        """
        self._candidates, self._calls, self.example = candidates, pieces.calls, example
        of_modes = [of_mode for of_mode, _ in pieces.modes]
        needed = [
            frozenset(name for piece in both for name in piece.state.values()) for both in zip(*of_modes, strict=True)
        ]
        parts = parts_of_layers(model, pieces.names, needed)
        functions = [_functions(of_mode, parts, example, output) for of_mode, output in pieces.modes]
        both = zip(parts, *functions, strict=True)
        super().__init__(model, [TwoModes(each.call, each.names, *modes_of) for each, *modes_of in both])
        self._hooks = all_hooks(model)
        self.difference = difference_of(model, self.names, self.bound, compared or example)

    def has_any_length(self) -> bool:
        """Return True if a text of another length than the example's has the same bits in the layers, or is refused."""
        other = self.example.of_another_length()
        try:
            with warnings.catch_warnings(action="ignore"):
                return other is None or not difference_of(self.model, self.names, self.bound, other)
        except ModelRefused:  # the model itself does not take it
            return False

    def check_calls(self) -> None:
        """Raise `ModelRefused` if the model has other hooks than when it was traced, since those are in the graphs."""
        now = all_hooks(self.model)
        if changed := sorted({*_missing(self._hooks, now), *_missing(now, self._hooks)}):
            raise ModelRefused(
                f"{', '.join(changed)} {'has' if len(changed) == 1 else 'have'} been added, removed or replaced since "
                f"the model was traced, and the traced layers do not call the modules: trace it again"
            )

    def check_cut(self, cut: Sequence[int | str]) -> None:
        """Raise `ModelRefused` if `cut` names a module of the model at which no layer begins."""
        for name in (each for each in cut if isinstance(each, str) and each not in self.names):
            around = next((each for each in self._candidates if f"{name}.".startswith(f"{each}.")), None)
            if around is not None:
                raise ModelRefused(
                    Setting("model.cut", cut),
                    f": {self._reason(around, name)}. Near it the model can be cut at {near(name, self.names)}",
                )

    def more_layers(self) -> str:
        """Return which modules are no layers, and which layers have modules in them, as the end of an error's text."""
        called = {called_module(name) for name in self.names}
        lost = [self._reason(name, name) for name in self._candidates if name not in called][:_SHOWN]
        wide = [name for name in self._candidates if name in called and _is_block(self.model.get_submodule(name))]
        within = [f"traced(model, example, within={wide[:_SHOWN]}) makes layers of what is in them"] if wide else []
        return "".join(f"; {each}" for each in (*lost, *within))

    def _reason(self, around: str, name: str) -> str:
        """Return why no layer begins with the module `name`, which is `around` or in it."""
        times = sum(called_module(call) == around for call in self._calls)
        if around in self.names:
            return f'{name} is in the layer {around}; traced(..., within=["{around}"]) makes layers of what is in it'
        if times == 1:
            contexts = "torch.no_grad(), torch.autocast() or torch.vmap"
            return f"the forward calls {around} in a context of its own, such as {contexts}"
        return (
            f"the forward calls {around} {times} times, and only a block of modules is a layer in each call"
            if times
            else f"the forward never calls {around}"
        )


def _calls_of_layers(model: torch.nn.Module, training: Forward, evaluation: Forward) -> list[str]:
    """Return the calls that begin layers, in order.

    These are the calls in training mode that evaluation mode has, too, or whose module it never calls. Several calls of
    a module count only if there are modules and parameters in it. Raises `ModelRefused` if there is no call, or if
    evaluation has another order.
    """
    again = {called_module(call) for call in (*training.calls, *evaluation.calls) if "@" in call}
    single = {name for name in again if not _is_block(model.get_submodule(name))}
    other = [call for call in outer_calls(evaluation) if called_module(call) not in single]
    names = [
        call
        for call in outer_calls(training)
        if called_module(call) not in single and (call in other or call not in evaluation.calls)
    ]
    if not names:
        raise ModelRefused(
            f"the forward of the {type(model).__name__} calls none of its modules exactly once: there is no layer to "
            f"cut at. Say where with stageline.Layers (docs/guides/models.md)"
        )
    if [name for name in names if name in other] != [name for name in other if name in names]:
        raise ModelRefused(
            f"the {type(model).__name__} calls its modules in one order in training mode and in another in evaluation "
            f"mode. List its layers yourself: stageline.Layers (docs/guides/models.md)"
        )
    return names


def _is_block(module: torch.nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _missing(hooks: _Hooks, others: _Hooks) -> list[str]:
    """Return the titles of `hooks` that are not in `others`. Two functions may have the same name."""
    return [title for title, hook in hooks if not any(title == name and hook is each for name, each in others)]


def _functions(
    pieces: Sequence[TracedPiece], parts: Sequence[LayerParts], inputs: Example, output: Tree
) -> list[TracedFunction]:
    """Return the functions of all layers in one mode.

    The first one takes a batch's inputs, and the last one gives the model's `output`.
    """

    def put(values: Values) -> Tree:
        found = iter(values)
        return map_leaves(lambda leaf: next(found) if leaf is COMPUTED else leaf, output)

    last = len(pieces) - 1
    return [
        TracedFunction(
            piece,
            has.places,
            inputs.taken if number == 0 else tuple,
            put if number == last else tuple,
            inputs.check,
        )
        for number, (piece, has) in enumerate(zip(pieces, parts, strict=True))
    ]


def parts_of_layers(model: torch.nn.Module, names: Sequence[str], needed: Sequence[frozenset[str]]) -> list[LayerParts]:
    """Return the parts of the layers; the last layer also gets what no layer needs.

    Args:
        model: The model.
        names: Calls of the layers. Only the first layer of a module has the module; others have single tensors of it.
        needed: Names of the parameters and buffers that each layer needs.
    """
    aliases = _aliases(model)
    modules = [called_module(name) for name in names]
    first = [module if module not in modules[:place] else None for place, module in enumerate(modules)]
    found = [_parts(name, own, sorted(keys), aliases) for name, own, keys in zip(names, first, needed, strict=True)]
    held = [part for parts in found for part in parts.names]
    left = [key for key in aliases if not any(key == part or key.startswith(f"{part}.") for part in held)]
    further = _further(model, first, left)
    return [replace(parts, names=(*parts.names, *further.get(place, ()))) for place, parts in enumerate(found)]


def _further(model: torch.nn.Module, modules: Sequence[str | None], left: Sequence[str]) -> dict[int, Collection[str]]:
    """Return the parts that layers have for names which no other part has, by the numbers of the layers.

    A module that has several names is a part under each of them, where it is in the module of a layer. All others are
    tensors of the last layer.

    Args:
        model: The model.
        modules: Name of each layer's own module; None for a layer without one.
        left: Names of parameters and buffers.
    """
    places: dict[int, int] = {}
    for number, name in enumerate(modules):
        for module in () if name is None else model.get_submodule(name).modules():
            places.setdefault(id(module), number)
    found: dict[int, dict[str, None]] = {}
    for key in left:
        owner = key.rpartition(".")[0]
        place = places.get(id(model.get_submodule(owner)))
        found.setdefault(len(modules) - 1 if place is None else place, {})[key if place is None else owner] = None
    return {number: tuple(names) for number, names in found.items()}


def _parts(call: str, module: str | None, needed: Sequence[str], aliases: Mapping[str, Sequence[str]]) -> LayerParts:
    if module is None:
        return LayerParts(call, tuple(needed), {key: (number, "") for number, key in enumerate(needed)})
    start = f"{module}."
    own = {key: alias.removeprefix(start) for key in needed for alias in aliases[key] if alias.startswith(start)}
    others = [key for key in needed if key not in own]
    places = {key: (0, rest) for key, rest in own.items()}
    return LayerParts(call, (module, *others), places | {key: (number, "") for number, key in enumerate(others, 1)})


def _aliases(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter and buffer, by each of its names."""
    names: dict[int, list[str]] = {}
    for name, tensor in _state(model):
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in _state(model)}


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
