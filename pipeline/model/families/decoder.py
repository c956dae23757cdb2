"""What the forwards of transformers' decoders make once and give to all their blocks."""

from typing import Any

import torch
from torch import Tensor

from .family import library


def with_mask(
    decoder: Any, hidden: Tensor, embedded: Tensor, attention_mask: Tensor | None, positions: Tensor, *, training: bool
) -> dict[str, Any]:
    """What travels from the first layer on: the `hidden` states, the causal mask of the tokens `embedded`, their
    `positions`, as a view with a row for each row of `hidden`: a prefix cache keeps rows."""
    mask = library(decoder).create_causal_mask(
        config=decoder.config,
        inputs_embeds=embedded,
        attention_mask=attention_mask,
        past_key_values=_cache(decoder, training),
        position_ids=positions,
    )
    return {"hidden": hidden, "mask": mask, "positions": with_rows(positions, hidden)}


def with_rows(shared: Tensor, hidden: Tensor) -> Tensor:
    """`shared`, [1 or rows, ...], as [rows, ...]: one row stands for each of `hidden`, and lies in memory once."""
    return shared.expand(len(hidden), *shared.shape[1:])


def positions_of(embedded: Tensor) -> Tensor:
    """0, 1, ... for each token: int64 [1, tokens]."""
    return torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0)


def of_block(decoder: Any, x: dict[str, Any], *, training: bool) -> dict[str, Any]:
    """The arguments of a block, besides the hidden states and what only some models have."""
    cache, causal = _cache(decoder, training), getattr(decoder.config, "is_causal", None)
    return {
        "attention_mask": x["mask"],
        "position_ids": x["positions"],
        "past_key_values": cache,
        "use_cache": cache is not None,
        **({} if causal is None else {"is_causal": causal}),
    }


def _cache(decoder: Any, training: bool) -> Any:
    """What `use_cache` in the model's config makes its forward create, though only generating needs it.

    It changes how keys and values lie in memory, and bits follow. A block has its part of it to itself, so each may
    have a cache of its own. Where gradients are checkpointed there is none.
    """
    config = decoder.config
    if not config.use_cache or (decoder.gradient_checkpointing and training):
        return None
    return library(decoder).DynamicCache(config=config)
