"""Linear probes: linear functions from features to a target, trained on some rows and measured on others.

classes   multinomial logistic regression   minimizes  mean cross entropy + l2 / 2 * |W|^2     scored by accuracy
numbers   ridge regression                  minimizes  mean squared error + l2 * |W|^2         scored by R^2

Computed in float64, from zeros, on all rows at once: the same rows give the same probe. Features are standardized by
the rows that the probe is trained on. `l2` is the one of `PENALTIES` that is best on a part of these rows that was left
out of the fit; the probe is then trained on all of them. Logistic regression and its penalty: Hastie, Tibshirani and
Friedman, The Elements of Statistical Learning, sections 3.4.1 and 4.4.

Features of a layer are one row of numbers for each sample, however many dimensions the layer has:

[rows]                    [rows, 1]
[rows, features]          as it is
[rows, places, features]  the mean over the places; or the last of them; or all side by side, "flatten"
more dimensions           all side by side; or the mean over all but rows and the last; or the last of dimension 1

Rows are split by their samples. All rows of a sample are in one part, however often the sample was seen, and a sample
is in the same part in every run:

sha256 of the sample's number      0 1 2 3 4 ...  modulo 5: 0 is tested, 1 chooses the penalty, the others are fitted
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .reading import TappedMicrobatch, TapsUnusable, tensors_of

PENALTIES = (1.0, 1e-2, 1e-4)  # the strongest first: of two that are equally good, it is taken
_MOST_STEPS = 200  # of L-BFGS
_PARTS = 5
_TESTED, _CHOSEN = 0, 1


@dataclass(frozen=True, slots=True)
class ProbeRows:
    """Partition of the rows for a probe: bool [rows] each, with every row in exactly one of the three.

    `fitted` rows train the probe, `chosen` rows choose its penalty, `tested` rows measure it.
    """

    fitted: Tensor
    chosen: Tensor
    tested: Tensor

    @property
    def trained(self) -> Tensor:
        """All rows that the final probe is trained on: bool [rows]."""
        return self.fitted | self.chosen


@dataclass(frozen=True, slots=True)
class ProbeScore:
    """Score of a probe on the rows held back, the baseline of one guess for all rows, and the penalty `l2`."""

    score: float
    baseline: float
    l2: float


def probe_classes(features: Tensor, classes: Tensor, rows: ProbeRows) -> ProbeScore:
    """Train a linear probe for classes, and return its accuracy. The baseline is the share of the most frequent class.

    Args:
        features: float64 [rows, features].
        classes: Class of each row, from 0 on: int64 [rows].
        rows: Rows to train and to test on.
    """
    count = int(classes.max()) + 1

    def fit(x: Tensor, y: Tensor, l2: float) -> Callable[[Tensor], Tensor]:
        weights = _logistic(x, y, count, l2)
        return lambda x: (x @ weights[:-1] + weights[-1]).argmax(1)

    frequent = torch.bincount(classes[rows.trained], minlength=count).argmax()
    return _probe(features, classes, rows, fit, _accuracy, frequent)


def probe_numbers(features: Tensor, numbers: Tensor, rows: ProbeRows) -> ProbeScore:
    """Train a linear probe for numbers, and return its R^2: a share of the variance. The baseline is that of the mean.

    Args:
        features: float64 [rows, features].
        numbers: float64 [rows, numbers].
        rows: Rows to train and to test on.
    """

    def fit(x: Tensor, y: Tensor, l2: float) -> Callable[[Tensor], Tensor]:
        mean = y.mean(0)
        weights = _ridge(x, y - mean, l2)
        return lambda x: x @ weights + mean

    return _probe(features, numbers, rows, fit, _explained, numbers[rows.trained].mean(0))


def _probe(
    features: Tensor,
    targets: Tensor,
    rows: ProbeRows,
    fit: Callable[[Tensor, Tensor, float], Callable[[Tensor], Tensor]],
    score: Callable[[Tensor, Tensor], float],
    guess: Tensor,
) -> ProbeScore:
    def scored(l2: float, trained: Tensor, measured: Tensor) -> float:
        scale = _standardizing(features[trained])
        predict = fit(scale(features[trained]), targets[trained], l2)
        return score(predict(scale(features[measured])), targets[measured])

    l2 = max(PENALTIES, key=lambda each: scored(each, rows.fitted, rows.chosen))
    tested = targets[rows.tested]
    baseline = score(guess.expand_as(tested), tested)
    return ProbeScore(scored(l2, rows.trained, rows.tested), baseline, l2)


def _standardizing(trained: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that scales features by their mean and deviation; a feature that does not vary becomes 0."""
    mean, deviation = trained.mean(0), trained.std(0, correction=0)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return lambda x: (x - mean) / deviation


def _logistic(x: Tensor, y: Tensor, classes: int, l2: float) -> Tensor:
    """Return the weights of a logistic regression, float64 [features + 1, classes]; the last row is the biases.

    Biases are not penalized.
    """
    weights = torch.zeros(x.shape[1] + 1, classes, dtype=x.dtype, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=_MOST_STEPS, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        solver.zero_grad()
        value = cross_entropy(x @ weights[:-1] + weights[-1], y) + l2 / 2 * weights[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(objective)  # type: ignore[no-untyped-call]
    return weights.detach()


def _ridge(x: Tensor, y: Tensor, l2: float) -> Tensor:
    """Return the weights of a ridge regression, float64 [features, numbers].

    With more features than rows, a system of as many equations as rows is solved in place of one for the features.
    """
    count, width = x.shape
    wide = width > count
    products = x @ x.T if wide else x.T @ x
    penalty = l2 * torch.eye(len(products), dtype=x.dtype)
    found: Tensor = torch.linalg.solve(products / count + penalty, (y if wide else x.T @ y) / count)
    return x.T @ found if wide else found


def _accuracy(found: Tensor, wanted: Tensor) -> float:
    return (found == wanted).double().mean().item()


def _explained(found: Tensor, wanted: Tensor) -> float:
    """Return the share of the variance that `found` explains, of all numbers together; 0 if there is no variance."""
    variance = (wanted - wanted.mean(0)).square().sum()
    return (1 - (wanted - found).square().sum() / variance).item() if variance > 0 else 0.0


class Pool(StrEnum):
    """Treatment of the dimensions between rows and the last."""

    MEAN = "mean"
    FLATTEN = "flatten"
    LAST = "last"


def features_of(layer: str, part: TappedMicrobatch, pool: Pool | None) -> Tensor:
    """Return the features of a layer, float64 [rows, features]: its floating-point tensors side by side.

    Args:
        layer: Name of the layer, for errors.
        part: Output of the layer for a microbatch.
        pool: Treatment of further dimensions; None chooses by the number of dimensions.

    Raises:
        TapsUnusable: The layer returned no floating-point tensor with rows, or a number is not finite.
    """
    rows = next((each.shape[0] for each in tensors_of(part.activations) if each.dim()), 0)
    usable = [each for each in tensors_of(part.activations) if each.is_floating_point() and each.shape[:1] == (rows,)]
    if not usable:
        raise TapsUnusable(
            f"layer {layer} returned no tensor of numbers with a fraction whose dimension 0 counts rows: leave it out "
            "with --layers"
        )
    found = torch.cat([pooled(each.double(), pool) for each in usable], dim=1)
    if not found.isfinite().all():
        raise TapsUnusable(
            f"layer {layer} returned numbers that are not finite for {part.place}: no probe can be trained on them; "
            "leave it out with --layers"
        )
    return found


def pooled(tensor: Tensor, pool: Pool | None) -> Tensor:
    """Return `tensor`, of shape [rows, ...], as [rows, features]. By default, `pool` follows from the dimensions."""
    if tensor.dim() <= 2:
        return tensor if tensor.dim() == 2 else tensor[:, None]
    match pool or (Pool.MEAN if tensor.dim() == 3 else Pool.FLATTEN):
        case Pool.MEAN:
            return tensor.mean(tuple(range(1, tensor.dim() - 1)))
        case Pool.LAST:
            return tensor[:, -1].flatten(1)
        case Pool.FLATTEN:
            return tensor.flatten(1)


def split_rows(samples: Tensor) -> ProbeRows:
    """Return the rows to train and to test on. All rows of a sample are in one part, the same in every run.

    Args:
        samples: Number of each row's sample, int64 [rows].
    """
    numbers, places = distinct(samples)
    part = torch.tensor([_part(number) for number in numbers], dtype=torch.int64)[places]
    tested, chosen = part == _TESTED, part == _CHOSEN
    return ProbeRows(~(tested | chosen), chosen, tested)


def distinct(values: Tensor) -> tuple[list[int], Tensor]:
    """Return the distinct numbers of `values`, int64 [rows], ascending; and each row's index among them."""
    found, places = torch.unique(values, return_inverse=True)
    return found.tolist(), places


def _part(sample: int) -> int:
    return int.from_bytes(sha256(str(sample).encode()).digest()[:8], "little") % _PARTS
