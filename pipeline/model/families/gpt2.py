"""GPT-2 with its language modelling head: transformers' GPT2LMHeadModel.

transformer.wte, wpe, drop     embeddings; the causal mask, and positions, which all blocks need
transformer.h.0, h.1, ...      blocks
transformer.ln_f
lm_head                        the logits

Between blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens, tokens])
and the positions (int64, [1 or rows, tokens]); computed as with use_cache=False.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from stageline.pipeline.tree import Tree

from .family import Family, library, taken
from .layers import Layer, Layers

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def layers(model: Any) -> Layers:
    """Of a GPT2LMHeadModel."""
    embeddings = ("transformer.wte", "transformer.wpe", "transformer.drop")
    return Layers(
        model,
        [
            Layer(embeddings, partial(_embed, model.transformer)),
            *(Layer(f"transformer.h.{number}", _block) for number in range(len(model.transformer.h))),
            Layer("transformer.ln_f", _normalize),
            Layer("lm_head"),
        ],
    )


GPT2 = Family("transformers.models.gpt2.modeling_gpt2", {"": "GPT2LMHeadModel", "transformer": "GPT2Model"}, layers)


def _embed(transformer: Any, inputs: Tree, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> Tree:
    ids, attention_mask, token_types, positions = taken(inputs, _INPUTS)
    embedded = wte(ids)
    if positions is None:
        positions = torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0)
    hidden = embedded + wpe(positions)
    mask = library(transformer).create_causal_mask(
        config=transformer.config,
        inputs_embeds=embedded,
        attention_mask=attention_mask,
        past_key_values=None,
        position_ids=positions,
    )
    if token_types is not None:
        hidden = hidden + wte(token_types)
    return {"hidden": drop(hidden), "mask": mask, "positions": positions}


def _block(x: Any, block: nn.Module) -> Tree:
    hidden = block(x["hidden"], None, x["mask"], None, use_cache=False, position_ids=x["positions"])
    return {**x, "hidden": hidden}


def _normalize(x: Any, norm: nn.Module) -> Tree:
    return norm(x["hidden"])  # type: ignore[no-any-return]
