"""Llama with its language modelling head: transformers' LlamaForCausalLM.

model.embed_tokens            embeddings; the causal mask, positions and rotary embeddings, which all blocks need
model.layers.0, layers.1, ... blocks
model.norm
lm_head                       the logits

Between blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens, tokens]),
the positions (int64, [rows, tokens]) and their cosines and sines (float, [rows, tokens, width of a head]),
which get no gradient.
"""

from functools import partial
from typing import Any

from torch import nn

from stageline.pipeline.tree import Tree

from .decoder import of_block, positions_of, with_mask, with_rows
from .family import Family, StoredNames, taken
from .layers import Layer, Layers

_INPUTS = ("input_ids", "attention_mask", "position_ids")


def layers(model: Any) -> Layers:
    """Of a LlamaForCausalLM."""
    return Layers(
        model,
        [
            Layer(("model.embed_tokens", "model.rotary_emb"), partial(_embed, model.model)),
            *(
                Layer(f"model.layers.{number}", partial(_block, model.model))
                for number in range(len(model.model.layers))
            ),
            Layer("model.norm", _normalize),
            Layer("lm_head"),
        ],
    )


LLAMA = Family(
    "transformers.models.llama.modeling_llama",
    {"": "LlamaForCausalLM", "model": "LlamaModel"},
    layers,
    StoredNames(base="model", unused=r"rotary_emb\.inv_freq$"),
)


def _embed(model: Any, inputs: Tree, embed_tokens: nn.Module, rotary: nn.Module) -> Tree:
    ids, attention_mask, positions = taken(inputs, _INPUTS)
    hidden = embed_tokens(ids)
    if positions is None:
        positions = positions_of(hidden)
    travels = with_mask(model, hidden, hidden, attention_mask, positions, training=embed_tokens.training)
    return {**travels, "rotary": tuple(with_rows(each, hidden) for each in rotary(hidden, position_ids=positions))}


def _block(model: Any, x: Any, block: nn.Module) -> Tree:
    hidden = block(x["hidden"], position_embeddings=x["rotary"], **of_block(model, x, training=block.training))
    return {**x, "hidden": hidden}


def _normalize(x: Any, norm: nn.Module) -> Tree:
    return norm(x["hidden"])  # type: ignore[no-any-return]
