"""Distance correlation: how much two sets of numbers for the same rows depend on each other, in any way.

    a_ij = |x_i - x_j|    A_ij = a_ij - mean of row i - mean of column j + mean of all    (B of y likewise)
    dCor(x, y)^2 = mean(A B) / sqrt(mean(A A) mean(B B))

Szekely, Rizzo and Bakirov, Measuring and testing dependence by correlation of distances, Ann. Statist. 35 (2007).
0 of independent variables, 1 where one is a similar image of the other. Of a finite sample of many dimensions it is far
above 0 by chance (Szekely and Rizzo, J. Multivariate Analysis 117, 2013). So it is compared with that of pairs that
do not belong together.
"""

import torch
from torch import Tensor


def distance_correlation(x: Tensor, y: Tensor) -> float:
    """Of `x`, [rows, m], and `y`, [rows, n], of any floating dtype: from 0 to 1. 0 if one does not vary."""
    return correlation(centred_distances(x), centred_distances(y))


def centred_distances(rows: Tensor) -> Tensor:
    """A of rows [rows, m]: float64 [rows, rows]."""
    distances = torch.cdist(rows.float() - rows.float().mean(0), rows.float() - rows.float().mean(0)).double()
    distances.fill_diagonal_(0)  # as it is but for rounding
    return distances - distances.mean(0) - distances.mean(1, keepdim=True) + distances.mean()


def correlation(a: Tensor, b: Tensor) -> float:
    """The distance correlation, of what `centred_distances` gives."""
    scale = ((a * a).mean() * (b * b).mean()).sqrt()
    return float(((a * b).mean().clamp(min=0) / scale).sqrt()) if scale > 0 else 0.0


def by_chance(a: Tensor, b: Tensor) -> float:
    """The same of pairs that do not belong together: each row of one with the next row of the other."""
    return correlation(a, b.roll((1, 1), (0, 1)))
