"""Decoders of transformers train and evaluate as plain `model(**inputs)` does, to the bit, with each layer a stage."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stageline import Line
from stageline.pipeline.model.layered.decoders import DECODERS
from support.whole_models import ADAM, WORDS, WholeModel, logits_of, mean_loss, split, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MICROBATCHES, ROWS, TOKENS, BLOCKS = 3, 2, 5, 7, 3
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 4}
MIXED = {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
OF_CLASS: dict[str, dict[str, Any]] = {
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "Cohere2ForCausalLM": MIXED,
    "DeepseekV3ForCausalLM": LATENT,
    "Dots1ForCausalLM": {**MIXED, **LATENT, "num_key_value_heads": 2, "n_shared_experts": 1},
    "Exaone4ForCausalLM": MIXED,
    "Gemma2ForCausalLM": {**MIXED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3ForCausalLM": {**MIXED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "GemmaForCausalLM": {"head_dim": 8},
    "GPTNeoForCausalLM": {
        "num_layers": BLOCKS,
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
        "window_size": 4,
    },
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GptOssForCausalLM": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "GraniteForCausalLM": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "HeliumForCausalLM": {"head_dim": 4},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 4},
    "MinistralForCausalLM": {**MIXED, "head_dim": 4},
    "MistralForCausalLM": WINDOW,
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "Olmo3ForCausalLM": MIXED,
    "OlmoeForCausalLM": EXPERTS,
    "Qwen2ForCausalLM": {**MIXED, "use_sliding_window": True},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 8},
    "Qwen3ForCausalLM": {**MIXED, "use_sliding_window": True, "head_dim": 8},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 8},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1]},
    "Starcoder2ForCausalLM": WINDOW,
}
RATES = (
    *("attention_dropout", "hidden_dropout", "embedding_dropout", "residual_dropout", "activation_dropout", "dropout"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "embed_dropout", "resid_dropout"),
)
FAMILIES = {family.class_name: family for family in DECODERS}
STACKED = (  # files have each expert's matrices by itself, and the model has those of all experts in one
    *("DeepseekV3ForCausalLM", "Dots1ForCausalLM", "Glm4MoeForCausalLM", "GraniteMoeForCausalLM"),
    *("MixtralForCausalLM", "OlmoeForCausalLM", "PhimoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
)
QUICK = ("GPT2LMHeadModel", "Gemma3ForCausalLM")


def built(name: str, dropout: float) -> Any:
    made = getattr(importlib.import_module(FAMILIES[name].module), name)
    config = made.config_class(**{**SIZES, **OF_CLASS.get(name, {})})
    for rate in RATES:
        if hasattr(config, rate):
            setattr(config, rate, dropout)
    return made(config)


def tokens(generator: torch.Generator, *, masked: bool) -> tuple[Any, Tensor]:
    """Of every third batch, no row is padded."""
    ids = torch.randint(3, WORDS, (ROWS, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=generator)
    if float(torch.rand((), generator=generator)) < 0.3:
        lengths[:] = TOKENS
    padding = (torch.arange(TOKENS) < lengths).long()
    return {"input_ids": ids, **({"attention_mask": padding} if masked else {})}, ids.roll(-1, 1)


def whole_model(name: str, dropout: float = 0.0, *, masked: bool = False) -> WholeModel:
    model = built(name, dropout)
    names = tuple(FAMILIES[name].layers_of(model).names)
    return WholeModel(partial(built, name, dropout), partial(tokens, masked=masked), names, {})


def slow_but(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("name", slow_but(QUICK))
def test_a_decoder_trains_and_evaluates_as_it_does_unsplit(name: str, dropout: float, masked: bool) -> None:
    whole = whole_model(name, dropout, masked=masked)
    state, losses = train_whole(whole, STEPS, MICROBATCHES)
    cut = list(range(1, len(whole.seeded)))
    with Line(
        whole.made(), cut=cut, loss=mean_loss, optimizer=ADAM, microbatches=MICROBATCHES, workers="inline"
    ) as line:
        found = [line.step(x, y).item() for x, y in whole.batches(STEPS)]
        scores = line.predict(x := whole.batches(1)[0][0])
    trained = line.state_dict()
    assert found == losses
    assert trained.keys() == state.keys()
    assert [key for key, value in state.items() if not torch.equal(trained[key], value)] == []
    model = whole.made().eval()
    model.load_state_dict(trained)
    with torch.no_grad():
        assert torch.equal(scores, torch.cat([logits_of(model, part) for part in split(x, MICROBATCHES)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in STACKED])
def test_each_stage_finds_its_weights_in_a_folder_that_save_pretrained_wrote(name: str, tmp_path: Path) -> None:
    whole = whole_model(name)
    state, losses = train_whole(whole, 1, MICROBATCHES)
    whole.made().save_pretrained(tmp_path)
    options = {"loss": mean_loss, "optimizer": ADAM, "microbatches": MICROBATCHES, "workers": "inline"}
    with Line(whole.build, cut=[2], weights=tmp_path, **options) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(1)] == losses
    assert all(torch.equal(line.state_dict()[key], value) for key, value in state.items())
