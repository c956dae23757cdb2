"""The families of models that are known, each as an ordered list of layers. Those of decoders are in `decoders.py`.

Encoders that classify texts: BERT for sequences, LayoutLM for the words of a page, as transformers has them.

BertForSequenceClassification      LayoutLMForTokenClassification
bert.embeddings                    layoutlm.embeddings               embeddings, of boxes too; the mask
bert.encoder.layer.0, 1, ...       layoutlm.encoder.layer.0, 1, ...  blocks
bert.pooler
classifier, dropout                classifier, dropout               the logits; with them layoutlm.pooler, which they
                                                                     do not use

Between BERT's blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens,
tokens]) and the positions, if the batch has them. Between LayoutLM's travel the hidden states and the mask (float,
[rows, 1, 1, words]); boxes (int64, [rows, words, 4]) are needed by the first stage only.

Models that classify images: transformers' vision transformer, and torchvision's residual convolutional nets.

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
from torch import Tensor, nn

from stageline.pipeline.tree import Tree

from .decoders import DECODERS
from .layers import (
    LAYER_NORMS,
    POSITIONS,
    SAME,
    Family,
    Layer,
    Layers,
    StoredNames,
    library,
    masked_block,
    of_hidden,
    taken,
)

_GROUPS = tuple(f"layer{number}" for number in range(1, 5))


def _bert_layers(model: Any) -> Layers:
    bert = model.bert
    blocks = [Layer(f"bert.encoder.layer.{number}", _bert_block) for number in range(len(bert.encoder.layer))]
    first = Layer("bert.embeddings", partial(_bert_embed, bert))
    return Layers(model, [first, *blocks, Layer("bert.pooler", of_hidden), Layer(("classifier", "dropout"), _classify)])


def _layoutlm_layers(model: Any) -> Layers:
    blocks = range(len(model.layoutlm.encoder.layer))
    return Layers(
        model,
        [
            Layer("layoutlm.embeddings", _layoutlm_embed),
            *(Layer(f"layoutlm.encoder.layer.{number}", masked_block) for number in blocks),
            Layer(("classifier", "dropout", "layoutlm.pooler"), _classify_words),
        ],
    )


BERT = Family(
    "transformers.models.bert.modeling_bert",
    {"": "BertForSequenceClassification", "bert": "BertModel", "bert.encoder": "BertEncoder"},
    _bert_layers,
    StoredNames(LAYER_NORMS, base="bert", unused=POSITIONS),
)

LAYOUTLM = Family(
    "transformers.models.layoutlm.modeling_layoutlm",
    {"": "LayoutLMForTokenClassification", "layoutlm": "LayoutLMModel", "layoutlm.encoder": "LayoutLMEncoder"},
    _layoutlm_layers,
    StoredNames(LAYER_NORMS, base="layoutlm", unused=POSITIONS),
)


def _bert_embed(bert: Any, inputs: Tree, embeddings: nn.Module) -> Tree:
    ids, attention_mask, token_types, positions = taken(
        inputs, ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    )
    hidden = embeddings(input_ids=ids, position_ids=positions, token_type_ids=token_types)
    mask, _ = bert._create_attention_masks(attention_mask, None, hidden, None, None)
    return {"hidden": hidden, "mask": mask, "positions": positions}


def _bert_block(x: Any, block: nn.Module) -> Tree:
    return {**x, "hidden": block(x["hidden"], x["mask"], None, position_ids=x["positions"])}


def _classify(pooled: Any, classifier: nn.Module, dropout: nn.Module) -> Tree:
    return classifier(dropout(pooled))  # type: ignore[no-any-return]


def _layoutlm_embed(inputs: Tree, embeddings: Any) -> Tree:
    ids, boxes, attention_mask, token_types, positions = taken(
        inputs, ("input_ids", "bbox", "attention_mask", "token_type_ids", "position_ids")
    )
    if token_types is None:
        token_types = torch.zeros(ids.shape, dtype=torch.long, device=ids.device)
    if boxes is None:
        boxes = torch.zeros((*ids.shape, 4), dtype=torch.long, device=ids.device)
    hidden = embeddings(input_ids=ids, bbox=boxes, position_ids=positions, token_type_ids=token_types)
    if attention_mask is None:
        attention_mask = torch.ones(ids.shape, device=ids.device)
    return {"hidden": hidden, "mask": _additive(attention_mask, embeddings.word_embeddings.weight.dtype)}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where attention goes, and the least number of `dtype` elsewhere."""
    return (1.0 - mask.unsqueeze(1).unsqueeze(2).to(dtype=dtype)) * torch.finfo(dtype).min


def _classify_words(x: Any, classifier: nn.Module, dropout: nn.Module, pooler: nn.Module) -> Tree:
    return classifier(dropout(x["hidden"]))  # type: ignore[no-any-return]


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


def known_layers(model: torch.nn.Module) -> Layers | None:
    """Return the layers of a model of a known family; None for another model.

    Raises:
        ModelRefused: A part of the model has a forward other than that of its family.
    """
    family = _family_of(model)
    return None if family is None else family.layers_of(model)


def stored_names_of(model: object) -> StoredNames:
    """Return the names that files have for the weights of `model`."""
    family = _family_of(model)
    return SAME if family is None else family.stored


def _family_of(model: object) -> Family | None:
    return next((each for each in FAMILIES if each.has(model)), None)


FAMILIES: tuple[Family, ...] = (*DECODERS, BERT, LAYOUTLM, VIT, RESNET)
