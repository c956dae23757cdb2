"""Llama with its language modelling head: transformers' LlamaForCausalLM.

model.embed_tokens            embeddings; the causal mask, positions and rotary embeddings, which all blocks need
model.layers.0, layers.1, ... blocks
model.norm
lm_head                       the logits

Between blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens, tokens]),
the positions (int64, [1 or rows, tokens]) and their cosines and sines (float, [1 or rows, tokens, width of a head]),
which get no gradient; computed as with use_cache=False.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from stageline.pipeline.tree import Tree

from .family import Family, library, taken
from .layers import Layer, Layers

_INPUTS = ("input_ids", "attention_mask", "position_ids")


def layers(model: Any) -> Layers:
    """Of a LlamaForCausalLM."""
    return Layers(
        model,
        [
            Layer(("model.embed_tokens", "model.rotary_emb"), partial(_embed, model.model)),
            *(Layer(f"model.layers.{number}", _block) for number in range(len(model.model.layers))),
            Layer("model.norm", _normalize),
            Layer("lm_head"),
        ],
    )


LLAMA = Family("transformers.models.llama.modeling_llama", {"": "LlamaForCausalLM", "model": "LlamaModel"}, layers)


def _embed(model: Any, inputs: Tree, embed_tokens: nn.Module, rotary: nn.Module) -> Tree:
    ids, attention_mask, positions = taken(inputs, _INPUTS)
    hidden = embed_tokens(ids)
    if positions is None:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
    mask = library(model).create_causal_mask(
        config=model.config,
        inputs_embeds=hidden,
        attention_mask=attention_mask,
        past_key_values=None,
        position_ids=positions,
    )
    return {"hidden": hidden, "mask": mask, "positions": positions, "rotary": rotary(hidden, position_ids=positions)}


def _block(x: Any, block: nn.Module) -> Tree:
    hidden = block(
        x["hidden"],
        attention_mask=x["mask"],
        position_embeddings=x["rotary"],
        position_ids=x["positions"],
        past_key_values=None,
        use_cache=False,
    )
    return {**x, "hidden": hidden}


def _normalize(x: Any, norm: nn.Module) -> Tree:
    return norm(x["hidden"])  # type: ignore[no-any-return]
