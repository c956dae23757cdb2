"""Models that classify images: transformers' vision transformer, and torchvision's residual convolutional nets.

ViTForImageClassification      ResNet, which resnet18 and resnext50_32x4d are, too
vit.embeddings                 conv1, bn1, relu, maxpool            of the patches, and the mask that all blocks need
vit.layers.0, 1, ...           layer1.0, layer1.1, layer2.0, ...    blocks
vit.layernorm                  avgpool
classifier                     fc                                   the logits

Between blocks of the transformer travel the hidden states (float, [rows, 1 + patches, width]) and the mask, None unless
the batch has one; between those of the nets, one tensor: float, [rows, channels, height, width].
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from stageline.pipeline.tree import Tree

from .layers import Family, Layer, Layers, StoredNames, library, masked_block, of_hidden, taken

_GROUPS = tuple(f"layer{number}" for number in range(1, 5))


def _vit_layers(model: Any) -> Layers:
    blocks = [Layer(f"vit.layers.{number}", masked_block) for number in range(len(model.vit.layers))]
    first = Layer("vit.embeddings", partial(_vit_embed, model.vit))
    return Layers(
        model, [first, *blocks, Layer("vit.layernorm", of_hidden), Layer("classifier", _classify_first_token)]
    )


def _resnet_layers(model: Any) -> Layers:
    blocks = [Layer(f"{group}.{number}") for group in _GROUPS for number in range(len(getattr(model, group)))]
    first = Layer(("conv1", "bn1", "relu", "maxpool"), _resnet_stem)
    return Layers(model, [first, *blocks, Layer("avgpool", _resnet_pool), Layer("fc")])


VIT = Family(
    "transformers.models.vit.modeling_vit",
    {"": "ViTForImageClassification", "vit": "ViTModel"},
    _vit_layers,
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

RESNET = Family("torchvision.models.resnet", {"": "ResNet", **dict.fromkeys(_GROUPS, "Sequential")}, _resnet_layers)


def _vit_embed(vit: Any, inputs: Tree, embeddings: Any) -> Tree:
    pixels, interpolates, attention_mask = taken(inputs, ("pixel_values", "interpolate_pos_encoding", "attention_mask"))
    pixels = pixels.to(embeddings.patch_embeddings.projection.weight.dtype)
    hidden = embeddings(pixels, interpolate_pos_encoding=interpolates)
    mask = library(vit).create_bidirectional_mask(
        config=vit.config, inputs_embeds=hidden, attention_mask=attention_mask
    )
    return {"hidden": hidden, "mask": mask}


def _classify_first_token(hidden: Any, classifier: nn.Module) -> Tree:
    return classifier(hidden[:, 0, :])  # type: ignore[no-any-return]


def _resnet_stem(x: Any, conv: nn.Module, norm: nn.Module, relu: nn.Module, pool: nn.Module) -> Tree:
    return pool(relu(norm(conv(x))))  # type: ignore[no-any-return]


def _resnet_pool(x: Any, pool: nn.Module) -> Tree:
    return torch.flatten(pool(x), 1)
