"""Files of the known families have other names than the models, by rules that are those of transformers."""

import pytest

from stageline.pipeline.model.layered.decoders import GPT2, LLAMA
from stageline.pipeline.model.layered.families import BERT, RESNET, VIT


@pytest.mark.parametrize(
    ("family", "stored", "model"),
    [
        (VIT, "vit.encoder.layer.11.attention.attention.key.bias", "vit.layers.11.attention.k_proj.bias"),
        (VIT, "vit.encoder.layer.0.attention.output.dense.weight", "vit.layers.0.attention.o_proj.weight"),
        (VIT, "encoder.layer.0.output.dense.weight", "vit.layers.0.mlp.fc2.weight"),
        (GPT2, "h.0.attn.c_attn.bias", "transformer.h.0.attn.c_attn.bias"),
        (BERT, "bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"),
        (RESNET, "layer1.0.conv1.weight", "layer1.0.conv1.weight"),
    ],
)
def test_a_name_in_a_file_is_found_in_the_model(family, stored, model):
    assert family.stored.in_model(stored, {model}) == model
    assert family.stored.in_model(model, {model}) == model


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (GPT2, "transformer.h.0.attn.bias"),
        (GPT2, "h.11.attn.masked_bias"),
        (LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (BERT, "bert.embeddings.position_ids"),
    ],
)
def test_what_older_files_have_and_the_model_computes_is_left_out(family, name):
    assert family.stored.in_model(name, set()) is None
    assert family.stored.in_model(name, {name}) == name


@pytest.mark.parametrize(("family", "name"), [(GPT2, "h.0.attn.c_atn.bias"), (RESNET, "classifier.weight")])
def test_a_name_that_is_not_known_stays_as_the_file_has_it(family, name):
    assert family.stored.in_model(name, {"transformer.h.0.attn.c_attn.bias"}) == name
