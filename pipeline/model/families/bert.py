"""BERT for classifying sequences: transformers' BertForSequenceClassification.

bert.embeddings                 embeddings, and the mask that all blocks need
bert.encoder.layer.0, 1, ...    blocks
bert.pooler
classifier, dropout             the logits

Between blocks travel the hidden states (float, [rows, tokens, width]), the mask (None, or [rows, 1, tokens, tokens])
and the positions, if the batch has them.
"""

from functools import partial
from typing import Any

from torch import nn

from stageline.pipeline.tree import Tree

from .family import LAYER_NORMS, POSITIONS, Family, StoredNames, taken
from .layers import Layer, Layers

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def layers(model: Any) -> Layers:
    """Of a BertForSequenceClassification."""
    return Layers(
        model,
        [
            Layer("bert.embeddings", partial(_embed, model.bert)),
            *(Layer(f"bert.encoder.layer.{number}", _block) for number in range(len(model.bert.encoder.layer))),
            Layer("bert.pooler", _pool),
            Layer(("classifier", "dropout"), _classify),
        ],
    )


BERT = Family(
    "transformers.models.bert.modeling_bert",
    {"": "BertForSequenceClassification", "bert": "BertModel", "bert.encoder": "BertEncoder"},
    layers,
    StoredNames(LAYER_NORMS, base="bert", unused=POSITIONS),
)


def _embed(bert: Any, inputs: Tree, embeddings: nn.Module) -> Tree:
    ids, attention_mask, token_types, positions = taken(inputs, _INPUTS)
    hidden = embeddings(input_ids=ids, position_ids=positions, token_type_ids=token_types)
    mask, _ = bert._create_attention_masks(attention_mask, None, hidden, None, None)
    return {"hidden": hidden, "mask": mask, "positions": positions}


def _block(x: Any, block: nn.Module) -> Tree:
    return {**x, "hidden": block(x["hidden"], x["mask"], None, position_ids=x["positions"])}


def _pool(x: Any, pooler: nn.Module) -> Tree:
    return pooler(x["hidden"])  # type: ignore[no-any-return]


def _classify(pooled: Any, classifier: nn.Module, dropout: nn.Module) -> Tree:
    return classifier(dropout(pooled))  # type: ignore[no-any-return]
