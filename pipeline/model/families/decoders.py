"""Decoders with their language modelling head: GPT-2 and Llama, as transformers has them.

GPT2LMHeadModel                 LlamaForCausalLM
transformer.wte, wpe, drop      model.embed_tokens         embeddings; the causal mask, positions, and Llama's rotary
                                                           embeddings, which all blocks need
transformer.h.0, h.1, ...       model.layers.0, 1, ...     blocks
transformer.ln_f                model.norm
lm_head                         lm_head                    the logits

Between blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens, tokens])
and the positions (int64, [rows, tokens]); of Llama also their cosines and sines (float, [rows, tokens, width of a
head]), which get no gradient.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stageline.pipeline.tree import Tree

from .layers import Family, Layer, Layers, StoredNames, library, of_hidden, taken


def _gpt2_layers(model: Any) -> Layers:
    decoder = model.transformer
    embeddings = ("transformer.wte", "transformer.wpe", "transformer.drop")
    blocks = [Layer(f"transformer.h.{number}", partial(_gpt2_block, decoder)) for number in range(len(decoder.h))]
    first = Layer(embeddings, partial(_gpt2_embed, decoder))
    return Layers(model, [first, *blocks, Layer("transformer.ln_f", of_hidden), Layer("lm_head")])


def _llama_layers(model: Any) -> Layers:
    decoder = model.model
    blocks = [Layer(f"model.layers.{number}", partial(_llama_block, decoder)) for number in range(len(decoder.layers))]
    first = Layer(("model.embed_tokens", "model.rotary_emb"), partial(_llama_embed, decoder))
    return Layers(model, [first, *blocks, Layer("model.norm", of_hidden), Layer("lm_head")])


GPT2 = Family(
    "transformers.models.gpt2.modeling_gpt2",
    {"": "GPT2LMHeadModel", "transformer": "GPT2Model"},
    _gpt2_layers,
    StoredNames(base="transformer", unused=r"\.attn\.(masked_)?bias$"),
)

LLAMA = Family(
    "transformers.models.llama.modeling_llama",
    {"": "LlamaForCausalLM", "model": "LlamaModel"},
    _llama_layers,
    StoredNames(base="model", unused=r"rotary_emb\.inv_freq$"),
)


def _gpt2_embed(decoder: Any, inputs: Tree, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> Tree:
    ids, attention_mask, token_types, positions = taken(
        inputs, ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    )
    embedded = wte(ids)
    if positions is None:
        positions = _positions_of(embedded)
    hidden = embedded + wpe(positions)
    if token_types is not None:
        hidden = hidden + wte(token_types)
    return _with_mask(decoder, drop(hidden), embedded, attention_mask, positions, training=wte.training)


def _gpt2_block(decoder: Any, x: Any, block: nn.Module) -> Tree:
    return {**x, "hidden": block(x["hidden"], **_of_block(decoder, x, training=block.training))}


def _llama_embed(decoder: Any, inputs: Tree, embed_tokens: nn.Module, rotary: nn.Module) -> Tree:
    ids, attention_mask, positions = taken(inputs, ("input_ids", "attention_mask", "position_ids"))
    hidden = embed_tokens(ids)
    if positions is None:
        positions = _positions_of(hidden)
    travels = _with_mask(decoder, hidden, hidden, attention_mask, positions, training=embed_tokens.training)
    return {**travels, "rotary": tuple(_with_rows(each, hidden) for each in rotary(hidden, position_ids=positions))}


def _llama_block(decoder: Any, x: Any, block: nn.Module) -> Tree:
    settings = _of_block(decoder, x, training=block.training)
    return {**x, "hidden": block(x["hidden"], position_embeddings=x["rotary"], **settings)}


def _with_mask(
    decoder: Any, hidden: Tensor, embedded: Tensor, attention_mask: Tensor | None, positions: Tensor, *, training: bool
) -> dict[str, Any]:
    """Return what travels from the first layer on: the `hidden` states, the causal mask of the tokens `embedded`, and
    their `positions`, as a view with a row for each row of `hidden`: a prefix cache keeps rows."""
    mask = library(decoder).create_causal_mask(
        config=decoder.config,
        inputs_embeds=embedded,
        attention_mask=attention_mask,
        past_key_values=_cache(decoder, training),
        position_ids=positions,
    )
    return {"hidden": hidden, "mask": mask, "positions": _with_rows(positions, hidden)}


def _with_rows(shared: Tensor, hidden: Tensor) -> Tensor:
    """Return `shared`, [1 or rows, ...], as [rows, ...]: one row stands for each of `hidden`, in memory once."""
    return shared.expand(len(hidden), *shared.shape[1:])


def _positions_of(embedded: Tensor) -> Tensor:
    """Return 0, 1, ... for each token: int64 [1, tokens]."""
    return torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0)


def _of_block(decoder: Any, x: dict[str, Any], *, training: bool) -> dict[str, Any]:
    """Return the arguments of a block, without the hidden states and what only some models have."""
    cache, causal = _cache(decoder, training), getattr(decoder.config, "is_causal", None)
    return {
        "attention_mask": x["mask"],
        "position_ids": x["positions"],
        "past_key_values": cache,
        "use_cache": cache is not None,
        **({} if causal is None else {"is_causal": causal}),
    }


def _cache(decoder: Any, training: bool) -> Any:
    """Return the cache that `use_cache` of a config makes a forward create, though only generating needs it.

    A cache changes how keys and values lie in memory, and bits follow. A block has its part of it to itself, so each
    may have a cache of its own. Where gradients are checkpointed there is none.
    """
    config = decoder.config
    if not config.use_cache or (decoder.gradient_checkpointing and training):
        return None
    return library(decoder).DynamicCache(config=config)
