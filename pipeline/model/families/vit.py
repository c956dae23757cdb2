"""The vision transformer for classifying images: transformers' ViTForImageClassification.

vit.embeddings             of the patches, and the mask that all blocks need
vit.layers.0, 1, ...       blocks
vit.layernorm
classifier                 the logits

Between blocks travel the hidden states (float, [rows, 1 + patches, width]) and the mask, None unless the batch has one.
"""

from functools import partial
from typing import Any

from torch import nn

from stageline.pipeline.tree import Tree

from .family import Family, StoredNames, library, taken
from .layers import Layer, Layers

_INPUTS = ("pixel_values", "interpolate_pos_encoding", "attention_mask")


def layers(model: Any) -> Layers:
    """Of a ViTForImageClassification."""
    return Layers(
        model,
        [
            Layer("vit.embeddings", partial(_embed, model.vit)),
            *(Layer(f"vit.layers.{number}", _block) for number in range(len(model.vit.layers))),
            Layer("vit.layernorm", _normalize),
            Layer("classifier", _classify),
        ],
    )


VIT = Family(
    "transformers.models.vit.modeling_vit",
    {"": "ViTForImageClassification", "vit": "ViTModel"},
    layers,
    StoredNames(
        (
            (r"encoder\.layer\.", "layers."),
            (r"attention\.query\.", "q_proj."),
            (r"attention\.key\.", "k_proj."),
            (r"attention\.value\.", "v_proj."),
            (r"attention\.output\.dense\.", "attention.o_proj."),
            (r"intermediate\.dense\.", "mlp.fc1."),
            (r"output\.dense\.", "mlp.fc2."),
        ),
        base="vit",
    ),
)


def _embed(vit: Any, inputs: Tree, embeddings: Any) -> Tree:
    pixels, interpolates, attention_mask = taken(inputs, _INPUTS)
    pixels = pixels.to(embeddings.patch_embeddings.projection.weight.dtype)
    hidden = embeddings(pixels, interpolate_pos_encoding=interpolates)
    mask = library(vit).create_bidirectional_mask(
        config=vit.config, inputs_embeds=hidden, attention_mask=attention_mask
    )
    return {"hidden": hidden, "mask": mask}


def _block(x: Any, block: nn.Module) -> Tree:
    return {**x, "hidden": block(x["hidden"], x["mask"])}


def _normalize(x: Any, norm: nn.Module) -> Tree:
    return norm(x["hidden"])  # type: ignore[no-any-return]


def _classify(hidden: Any, classifier: nn.Module) -> Tree:
    return classifier(hidden[:, 0, :])  # type: ignore[no-any-return]
