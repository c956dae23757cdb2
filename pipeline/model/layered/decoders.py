"""transformers' decoders with a language modelling head, as lists of layers that follow the library's own forward.

The models differ in what they do before their blocks and after them: masks of a window, several rotary embeddings,
factors of embeddings and logits. Their forwards do it here too, each with stand-ins for the parts of other layers:

first layer     the decoder's forward; in the place of each block stands what notes its arguments and changes nothing
block           the block, called with the arguments that were noted
norm            the normalization
head            the model's forward, in which the decoder returns the normalized hidden states; gives the logits

Between blocks travel the hidden states (float, [rows, tokens, width]) and the arguments of all blocks: the mask (None,
or [rows, 1, tokens, tokens]), the positions (int64, [rows, tokens]), cosines and sines of rotary embeddings (float,
[rows, tokens, width of a head]), which get no gradient, and plain values. An argument that all blocks share travels
once.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from stageline.pipeline.tree import Tree, map_tensors

from .layers import Family, Layer, Layers, StoredNames, library, of_hidden, taken

_COMPUTED = r"rotary_emb\.inv_freq$|\.(attn|attention)\.((masked_)?bias|causal_mask)$"  # in older files
_A_CACHE = "a cache"  # stands for the argument that is a cache: each block makes one of its own


@dataclass(frozen=True, slots=True)
class Decoder:
    """Names of the parts of a model, and of what it takes.

    Attributes:
        base: Name of the decoder in the model.
        blocks: Name of the blocks in the decoder.
        norm: Name of the last normalization in the decoder.
        head: Name of the head in the model.
        inputs: Names of what the model takes, the token numbers first.
        tuples: True if a block returns a tuple, whose first part are the hidden states.
    """

    base: str = "model"
    blocks: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "position_ids")
    tuples: bool = False

    def family(self, module: str, model: str, decoder: str, renamed: tuple[tuple[str, str], ...] = ()) -> Family:
        """Return the family of a class of models.

        Args:
            module: Name of the library's module, such as `llama`.
            model: Name of the class.
            decoder: Name of the class of the decoder.
            renamed: Names that files have for weights, as `StoredNames` takes them.
        """
        return Family(
            f"transformers.models.{module}.modeling_{module}",
            {"": model, self.base: decoder},
            self.layers_of,
            StoredNames(renamed, self.base, _COMPUTED),
        )

    def layers_of(self, model: Any) -> Layers:
        """Return the layers of `model`."""
        decoder = getattr(model, self.base)
        blocks = list(getattr(decoder, self.blocks))
        own = [name for name, _ in decoder.named_children() if name not in (self.blocks, self.norm)]
        settings, kinds = _without_parts(decoder), [_without_parts(block) for block in blocks]
        return Layers(
            model,
            [
                Layer([f"{self.base}.{name}" for name in own], partial(_before_blocks, self, settings, kinds, own)),
                *(
                    Layer(f"{self.base}.{self.blocks}.{number}", partial(_block, settings, number))
                    for number in range(len(blocks))
                ),
                Layer(f"{self.base}.{self.norm}", of_hidden),
                Layer(self.head, partial(_logits, self, _without_parts(model))),
            ],
        )


def _without_parts(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with its settings, and without its parameters, buffers and modules."""
    made = copy.copy(module)
    vars(made).update(_modules={}, _parameters={}, _buffers={})
    return made


def _with_parts(settings: nn.Module, parts: Mapping[str, Any], *, training: bool) -> nn.Module:
    """Return a copy of `settings`, as `_without_parts` returns them, that has `parts` as attributes."""
    made = copy.copy(settings)
    vars(made).update(parts, training=training)
    return made


class _StandIn:
    """A block's place in a decoder's forward: it notes its arguments, and returns the hidden states as they are."""

    def __init__(self, block: nn.Module, returned: Callable[[Tensor], Any], calls: list[dict[str, Any]]) -> None:
        self._block, self._returned, self._calls = block, returned, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note the arguments by the names that the block's forward has for them."""
        self._calls.append({**dict(zip(_argument_names(type(self._block).forward), args, strict=False)), **kwargs})
        return self._returned(hidden)


@cache
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[2:]  # after self and the hidden states


def _before_blocks(
    kind: Decoder, settings: Any, blocks: Sequence[nn.Module], own: Sequence[str], inputs: Tree, *parts: nn.Module
) -> Tree:
    calls: list[dict[str, Any]] = []
    returned = _in_tuple if kind.tuples else _same
    stand_ins = [_StandIn(block, returned, calls) for block in blocks]
    all_parts = {**dict(zip(own, parts, strict=True)), kind.blocks: stand_ins, kind.norm: _same}
    decoder = _with_parts(settings, all_parts, training=parts[0].training)
    given = dict(zip(kind.inputs, taken(inputs, kind.inputs), strict=True))
    hidden = type(decoder).forward(decoder, **given)[0]
    return {"hidden": hidden, **_arguments(calls, library(settings).Cache, len(hidden))}


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _in_tuple(hidden: Tensor) -> tuple[Tensor, None]:
    return hidden, None


def _arguments(calls: Sequence[Mapping[str, Any]], caches: type, rows: int) -> dict[str, Any]:
    """Return the arguments of all blocks: `given`, the different values of each, and `which` of them a block has.

    A tensor with one row gets a view with a row for each of the `rows`, since a prefix cache keeps rows.
    """

    def travels(value: Any) -> Any:
        if isinstance(value, caches):
            return _A_CACHE
        return map_tensors(lambda each: each.expand(rows, *each.shape[1:]) if each.shape[:1] == (1,) else each, value)

    different = {name: {id(call[name]): call[name] for call in calls} for name in (calls[0] if calls else ())}
    return {
        "given": {name: [travels(value) for value in values.values()] for name, values in different.items()},
        "which": {
            name: [list(values).index(id(call[name])) for call in calls]
            for name, values in different.items()
            if len(values) > 1
        },
    }


def _block(settings: Any, number: int, x: Any, block: nn.Module) -> Tree:
    which = x["which"]
    given = {name: values[which[name][number] if name in which else 0] for name, values in x["given"].items()}
    found = block(x["hidden"], **{name: _own_cache(settings, value) for name, value in given.items()})
    return {**x, "hidden": found if isinstance(found, Tensor) else found[0]}


def _own_cache(settings: Any, value: Any) -> Any:
    """Return `value`, or a new cache if it stands for one.

    `use_cache` of a config makes a forward create a cache, though only generating needs it. A cache changes how keys
    and values lie in memory, and bits follow. A block has its part of it to itself, so each may have a cache of its
    own. Where gradients are checkpointed there is none.
    """
    return library(settings).DynamicCache(config=settings.config) if isinstance(value, str) else value


def _logits(kind: Decoder, settings: Any, hidden: Any, head: nn.Module) -> Tree:
    parts = {kind.head: head, kind.base: partial(_decoded, hidden)}
    model = _with_parts(settings, parts, training=head.training)
    return type(model).forward(model, return_dict=True).logits  # type: ignore[no-any-return]


class _Decoded(tuple[Tensor]):
    """A decoder's output of hidden states only."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Return None for every other part of the output."""


def _decoded(hidden: Tensor, *_: object, **__: object) -> _Decoded:
    return _Decoded((hidden,))


_GPT = Decoder("transformer", "h", "ln_f", tuples=True)
_GPT2_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")

GPT2 = replace(_GPT, tuples=False, inputs=_GPT2_INPUTS).family("gpt2", "GPT2LMHeadModel", "GPT2Model")

# The library's modules, and what the names of their classes begin with, as LlamaModel and LlamaForCausalLM do.
_LIKE_LLAMA = {
    "llama": "Llama",
    "apertus": "Apertus",
    "arcee": "Arcee",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "deepseek_v3": "DeepseekV3",
    "dots1": "Dots1",
    "exaone4": "Exaone4",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "granitemoe": "GraniteMoe",
    "helium": "Helium",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "persimmon": "Persimmon",
    "phi": "Phi",
    "phi3": "Phi3",
    "phimoe": "Phimoe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
_NEOX_NAMES = ((r"^embed_out\.", "lm_head."),)
_NORMS = {"persimmon": "final_layernorm", "phi": "final_layernorm"}

LLAMA, *_OTHERS = (
    Decoder(norm=_NORMS.get(module, "norm")).family(module, f"{name}ForCausalLM", f"{name}Model")
    for module, name in _LIKE_LLAMA.items()
)

DECODERS: tuple[Family, ...] = (
    GPT2,
    LLAMA,
    *_OTHERS,
    Decoder().family("gemma3", "Gemma3ForCausalLM", "Gemma3TextModel"),
    Decoder("gpt_neox", norm="final_layer_norm").family("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXModel", _NEOX_NAMES),
    Decoder(norm="layer_norm").family("xglm", "XGLMForCausalLM", "XGLMModel"),
    replace(_GPT, inputs=("input_ids", "attention_mask")).family("bloom", "BloomForCausalLM", "BloomModel"),
    *(
        _GPT.family(module, f"{name}ForCausalLM", f"{name}Model")
        for module, name in (("codegen", "CodeGen"), ("falcon", "Falcon"), ("gptj", "GPTJ"), ("gpt_neo", "GPTNeo"))
    ),
)
