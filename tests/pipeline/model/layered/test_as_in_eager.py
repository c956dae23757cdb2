"""A traced decoder of transformers has the bits of a plain call, also where the library does otherwise if traced."""

from typing import Any

import pytest
import torch
from torch import nn

from stageline import ModelRefused, traced
from stageline.pipeline.model.layered.as_in_eager import as_in_eager

pytestmark = pytest.mark.slow  # transformers takes seconds to import, and a decoder to trace

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "use_cache": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # whose keys a plain call does not repeat
IDS = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).train()


class Packed(nn.Module):
    """Its positions are those of two samples in each row, though `torch.arange` has made them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, ids: torch.Tensor) -> Any:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        positions[:, 3:].sub_(3)
        return self.inner(ids, position_ids=positions).logits


@pytest.mark.parametrize("example", [IDS, {"input_ids": IDS}], ids=["a tensor", "a dict"])
def test_groups_of_heads_without_a_mask_have_the_bits_of_a_plain_call(example: Any) -> None:
    assert traced(llama(), example).difference == ""


def test_positions_that_the_forward_has_written_to_are_looked_at() -> None:
    layers = traced(model := Packed(), IDS)
    assert layers.difference == ""
    x: Any = IDS
    for layer in layers.bound:
        x = layer(x)
    assert torch.equal(x, model(IDS))
    assert not torch.equal(x, model.inner(IDS).logits)


def test_nothing_of_transformers_is_changed_afterwards() -> None:
    from transformers import masking_utils

    former = vars(masking_utils).copy()
    with as_in_eager():
        assert vars(masking_utils) != former
    with pytest.raises(ModelRefused):
        traced(llama(), {"no_argument": IDS})
    assert vars(masking_utils) == former
