"""What gradients at a cut tell of labels: the area under the ROC curve of two scores.

    norm         |g_i|: rows of a rare, or not yet learned, class have larger gradients
    direction    cos(g_i, g_h), h one row whose label is known: rows of its class have gradients that point its way

Li et al., Label leakage and protection in two-party split learning, ICLR 2022, arXiv 2102.08504. There labels are 0 and
1. With more classes, each is told from all others, and the mean over classes counts. 0.5 is what guessing gives.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize


def told_by_norm(gradients: Tensor, labels: Tensor) -> float | None:
    """`gradients` [rows, features], `labels` int64 [rows]. The larger of the area and 1 less it, since the one who
    looks may know which class has the larger norms; None if no class can be told from others."""
    norms = gradients.double().norm(dim=1)
    return _mean_over_classes(labels, lambda mine: _either(area(norms, mine)))


def told_by_direction(gradients: Tensor, labels: Tensor) -> float | None:
    """The same by the cosine with the gradient of the first row of each class, which is not scored."""
    directions = normalize(gradients.double(), dim=1)

    def of_class(mine: Tensor) -> float:
        known = int(mine.int().argmax())
        others = torch.arange(len(mine)) != known
        return area((directions @ directions[known])[others], mine[others])

    return _mean_over_classes(labels, of_class, least=2)


def area(scores: Tensor, positive: Tensor) -> float:
    """The area under the ROC curve: how often a `positive` row (bool [rows]) has a higher score than another, equal
    scores counting half."""
    ranks = scores.argsort().argsort().double()
    _, places = torch.unique(scores, return_inverse=True)
    count = torch.bincount(places).double()
    ranks = (torch.zeros_like(count).index_add_(0, places, ranks) / count)[places] + 1  # equal scores, equal ranks
    ours, theirs = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - ours * (ours + 1) / 2) / (ours * theirs))


def _either(found: float) -> float:
    return max(found, 1 - found)


def _mean_over_classes(labels: Tensor, told: Callable[[Tensor], float], least: int = 1) -> float | None:
    """Of the classes with `least` rows, and as many of other classes."""
    masks = [labels == each for each in torch.unique(labels)]
    found = [told(mine) for mine in masks if mine.sum() >= least and (~mine).any()]
    return sum(found) / len(found) if found else None
