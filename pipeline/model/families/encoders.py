"""Encoders that classify texts: BERT for sequences, LayoutLM for the words of a page, as transformers has them.

BertForSequenceClassification      LayoutLMForTokenClassification
bert.embeddings                    layoutlm.embeddings               embeddings, of boxes too; the mask
bert.encoder.layer.0, 1, ...       layoutlm.encoder.layer.0, 1, ...  blocks
bert.pooler
classifier, dropout                classifier, dropout               the logits; with them layoutlm.pooler, which they
                                                                     do not use

Between BERT's blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens,
tokens]) and the positions, if the batch has them. Between LayoutLM's travel the hidden states and the mask (float,
[rows, 1, 1, words]); boxes (int64, [rows, words, 4]) are needed by the first stage only.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stageline.pipeline.tree import Tree

from .layers import LAYER_NORMS, POSITIONS, Family, Layer, Layers, StoredNames, masked_block, of_hidden, taken


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
