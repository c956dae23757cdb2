"""LayoutLM for classifying the words of a page: transformers' LayoutLMForTokenClassification.

layoutlm.embeddings                 of words and of their boxes; the mask that all blocks need
layoutlm.encoder.layer.0, 1, ...    blocks
classifier, dropout                 the logits; with them layoutlm.pooler, which they do not use

Between blocks travel the hidden states (float, [rows, words, width]) and the mask (float, [rows, 1, 1, words]). Boxes
(int64, [rows, words, 4]) are needed by the first stage only.
"""

from typing import Any

import torch
from torch import Tensor, nn

from stageline.pipeline.tree import Tree

from .family import LAYER_NORMS, POSITIONS, Family, StoredNames, taken
from .layers import Layer, Layers

_INPUTS = ("input_ids", "bbox", "attention_mask", "token_type_ids", "position_ids")


def layers(model: Any) -> Layers:
    """Of a LayoutLMForTokenClassification."""
    return Layers(
        model,
        [
            Layer("layoutlm.embeddings", _embed),
            *(Layer(f"layoutlm.encoder.layer.{number}", _block) for number in range(len(model.layoutlm.encoder.layer))),
            Layer(("classifier", "dropout", "layoutlm.pooler"), _classify),
        ],
    )


LAYOUTLM = Family(
    "transformers.models.layoutlm.modeling_layoutlm",
    {"": "LayoutLMForTokenClassification", "layoutlm": "LayoutLMModel", "layoutlm.encoder": "LayoutLMEncoder"},
    layers,
    StoredNames(LAYER_NORMS, base="layoutlm", unused=POSITIONS),
)


def _embed(inputs: Tree, embeddings: Any) -> Tree:
    ids, boxes, attention_mask, token_types, positions = taken(inputs, _INPUTS)
    if token_types is None:
        token_types = torch.zeros(ids.shape, dtype=torch.long, device=ids.device)
    if boxes is None:
        boxes = torch.zeros((*ids.shape, 4), dtype=torch.long, device=ids.device)
    hidden = embeddings(input_ids=ids, bbox=boxes, position_ids=positions, token_type_ids=token_types)
    if attention_mask is None:
        attention_mask = torch.ones(ids.shape, device=ids.device)
    return {"hidden": hidden, "mask": _additive(attention_mask, embeddings.word_embeddings.weight.dtype)}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention goes, and the least number of `dtype` elsewhere."""
    return (1.0 - mask.unsqueeze(1).unsqueeze(2).to(dtype=dtype)) * torch.finfo(dtype).min


def _block(x: Any, block: nn.Module) -> Tree:
    return {**x, "hidden": block(x["hidden"], x["mask"])}


def _classify(x: Any, classifier: nn.Module, dropout: nn.Module, pooler: nn.Module) -> Tree:
    return classifier(dropout(x["hidden"]))  # type: ignore[no-any-return]
