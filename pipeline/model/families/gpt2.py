"""GPT-2 with its language modelling head: transformers' GPT2LMHeadModel.

transformer.wte, wpe, drop     embeddings; the causal mask, and positions, which all blocks need
transformer.h.0, h.1, ...      blocks
transformer.ln_f
lm_head                        the logits

Between blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens, tokens])
and the positions (int64, [rows, tokens]).
"""

from functools import partial
from typing import Any

from torch import nn

from stageline.pipeline.tree import Tree

from .decoder import of_block, positions_of, with_mask
from .family import Family, StoredNames, taken
from .layers import Layer, Layers

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def layers(model: Any) -> Layers:
    """Of a GPT2LMHeadModel."""
    embeddings = ("transformer.wte", "transformer.wpe", "transformer.drop")
    return Layers(
        model,
        [
            Layer(embeddings, partial(_embed, model.transformer)),
            *(
                Layer(f"transformer.h.{number}", partial(_block, model.transformer))
                for number in range(len(model.transformer.h))
            ),
            Layer("transformer.ln_f", _normalize),
            Layer("lm_head"),
        ],
    )


GPT2 = Family(
    "transformers.models.gpt2.modeling_gpt2",
    {"": "GPT2LMHeadModel", "transformer": "GPT2Model"},
    layers,
    StoredNames(base="transformer", unused=r"\.attn\.(masked_)?bias$"),
)


def _embed(transformer: Any, inputs: Tree, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> Tree:
    ids, attention_mask, token_types, positions = taken(inputs, _INPUTS)
    embedded = wte(ids)
    if positions is None:
        positions = positions_of(embedded)
    hidden = embedded + wpe(positions)
    if token_types is not None:
        hidden = hidden + wte(token_types)
    return with_mask(transformer, drop(hidden), embedded, attention_mask, positions, training=wte.training)


def _block(transformer: Any, x: Any, block: nn.Module) -> Tree:
    return {**x, "hidden": block(x["hidden"], **of_block(transformer, x, training=block.training))}


def _normalize(x: Any, norm: nn.Module) -> Tree:
    return norm(x["hidden"])  # type: ignore[no-any-return]
