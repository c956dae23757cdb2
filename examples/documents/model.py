"""LayoutLM, which says of each word of a page what it is. Every machine has this file; none has to have the pages."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LayoutLMConfig, LayoutLMForTokenClassification

CUT = ["layoutlm.encoder.layer.2"]  # the second block of layers: two of four, and the classifier


def build(width: int = 64, layers: int = 4) -> LayoutLMForTokenClassification:
    """Ids int64 [rows, words], boxes int64 [rows, words, 4], mask int64 [rows, words] -> logits [rows, words, 6]."""
    config = LayoutLMConfig(
        vocab_size=32,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=64,
        num_labels=6,
    )
    return LayoutLMForTokenClassification(config).train()


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over rows of the mean over their words, which are those with a label from 0 on."""
    each = cross_entropy(logits.movedim(2, 1), labels, reduction="none")  # 0 where the label is -100
    return (each.sum(1) / (labels >= 0).sum(1)).mean()


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of a page's words that are known for what they are; mean over rows."""
    words = labels >= 0
    return (((logits.argmax(2) == labels) & words).sum(1) / words.sum(1)).to(torch.float32).mean()
