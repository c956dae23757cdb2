"""Measures how much crosses a cut: decoders of inputs, distance correlation, and label leakage.

Decoders compute inputs from what crosses. They are trained on rows whose inputs are known, and measured on the others:

    linear    ridge regression; the penalty is the best of `PENALTIES` on a fifth of the rows that it is trained on
    conv      Linear, twice (upsample, convolution, ReLU), convolution: trained by Adam on the squared error; for inputs
              that are no images, a network of two linear layers. A fifth of the rows chooses the number of epochs, too

Images are decoded at 32 x 32 pixels at most. Many features are first reduced to their `MOST_FEATURES` main components.

Distance correlation tells how much two sets of numbers for the same rows depend on each other, in any way:

    a_ij = |x_i - x_j|    A_ij = a_ij - mean of row i - mean of column j + mean of all    (B of y likewise)
    dCor(x, y)^2 = mean(A B) / sqrt(mean(A A) mean(B B))

Szekely, Rizzo and Bakirov, Measuring and testing dependence by correlation of distances, Ann. Statist. 35 (2007).
The value is 0 for independent variables, and 1 if one is a similar image of the other. For a finite sample of many
dimensions it is far above 0 by chance (Szekely and Rizzo, J. Multivariate Analysis 117, 2013), so it is compared with
the value of pairs that do not belong together.

Labels are told from gradients at a cut by two scores, measured by the area under the ROC curve:

    norm         |g_i|: rows of a rare, or not yet learned, class have larger gradients
    direction    cos(g_i, g_h), h one row whose label is known: rows of its class have gradients that point its way

Li et al., Label leakage and protection in two-party split learning, ICLR 2022, arXiv 2102.08504, has labels 0 and 1.
With more classes, each is told from all others, and the mean over classes counts. Guessing gives 0.5.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, mse_loss, normalize

PENALTIES = (10.0, 1.0, 1e-1, 1e-2, 1e-4)
MOST_FEATURES = 256
LARGEST = 32  # pixels
EPOCHS, PATIENCE, ROWS_AT_ONCE, RATE = 60, 10, 32, 2e-3
FARTHEST = 10.0  # standard deviations


def small(inputs: Tensor) -> Tensor:
    """Return the inputs as they are decoded: images with at most 32 x 32 pixels.

    Images are [rows, channels, height, width]; other inputs keep their shape. The result is float32.
    """
    if inputs.dim() != 4:
        return inputs.float()
    height, width = inputs.shape[2:]
    return adaptive_avg_pool2d(inputs.float(), (min(LARGEST, height), min(LARGEST, width)))


def scaled(features: Tensor, trained: int) -> Tensor:
    """Return `features` standardized by the first `trained` rows, and reduced to their main components.

    The result is float32 [rows, features]. A feature that is constant in those rows is 0 in all rows, and no value is
    farther than `FARTHEST` from the mean: a unit that hardly varies in those rows would make the decoders fail for a
    row in which it does.
    """
    mean, deviation = features[:trained].mean(0), features[:trained].std(0, correction=0)
    least = 1e-6 * deviation.max().clamp(min=1e-30)
    standard = ((features - mean) / deviation.clamp(min=least)).clamp(-FARTHEST, FARTHEST)
    found: Tensor = torch.where(deviation > least, standard, 0.0)
    if found.shape[1] <= MOST_FEATURES:
        return found
    _, _, axes = torch.linalg.svd(found[:trained], full_matrices=False)
    projected: Tensor = found @ axes[:MOST_FEATURES].T
    return projected / projected[:trained].std().clamp(min=1e-12)


def decoded_linearly(features: Tensor, inputs: Tensor, trained: int) -> Tensor:
    """Return the inputs of the rows after the first `trained`, decoded by a ridge regression on the first ones.

    Args:
        features: Values that cross the cut, float32 [rows, features].
        inputs: Inputs, float32 [rows, ...]. Only the first `trained` are used.
        trained: Number of rows whose inputs are known.

    Returns:
        float32 [rows - trained, ...], with the row shape of `inputs`.
    """
    wanted = inputs.flatten(1)
    fitted = trained - trained // 5

    def predict(count: int, until: int, penalty: float) -> Tensor:
        x, mean = features[:count].double(), wanted[:count].mean(0)
        products = x.T @ x / count + penalty * torch.eye(x.shape[1], dtype=x.dtype)
        weights = torch.linalg.solve(products, x.T @ (wanted[:count] - mean).double() / count)
        told: Tensor = (features[count:until].double() @ weights).float() + mean
        return told

    def missed(penalty: float) -> float:
        return float(mse_loss(predict(fitted, trained, penalty), wanted[fitted:trained]))

    found = predict(trained, len(wanted), min(PENALTIES, key=missed))
    return found.reshape(-1, *inputs.shape[1:])


def decoded_by_network(features: Tensor, inputs: Tensor, trained: int, seed: int = 0) -> Tensor:
    """Return the inputs of the rows after the first `trained`, decoded by a small network trained on the first ones.

    The network is trained for as many epochs as are best for the last fifth of the trained rows when it learns from the
    others. The default random generator is left as it was.

    Args:
        features: Values that cross the cut, float32 [rows, features].
        inputs: Inputs, float32 [rows, ...]. Only the first `trained` are used.
        trained: Number of rows whose inputs are known.
        seed: Seed of the network.

    Returns:
        float32 [rows - trained, ...], with the row shape of `inputs`.
    """
    with torch.random.fork_rng(devices=[]):
        mean, known = inputs[:trained].mean(0), features[:trained]
        wanted = inputs[:trained] - mean
        epochs = _best_epochs(known, wanted, trained - trained // 5, seed)
        *_, network = islice(_epochs(known, wanted, seed), epochs + 1)
        return mean + _told(network, features[trained:], inputs.shape[1:])


def _best_epochs(features: Tensor, wanted: Tensor, fitted: int, seed: int) -> int:
    """Return the number of epochs with the least error. Stop after `PATIENCE` epochs that were not better."""
    missed: list[float] = []
    for network in _epochs(features[:fitted], wanted[:fitted], seed):
        missed.append(float(mse_loss(_told(network, features[fitted:], wanted.shape[1:]), wanted[fitted:])))
        if len(missed) - missed.index(min(missed)) > PATIENCE:
            break
    return missed.index(min(missed))


def _epochs(features: Tensor, wanted: Tensor, seed: int) -> Iterator[nn.Module]:
    """Yield the network before its training, and after each epoch."""
    torch.manual_seed(seed)
    network = _network(features.shape[1], wanted.shape[1:])
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    yield network
    for _ in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(features)), ROWS_AT_ONCE):
            _learn(network, optimizer, features[rows], wanted[rows])
        yield network


@torch.enable_grad()
def _learn(network: nn.Module, optimizer: torch.optim.Optimizer, features: Tensor, wanted: Tensor) -> None:
    loss = mse_loss(network(features).reshape(wanted.shape), wanted)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@torch.no_grad()
def _told(network: nn.Module, features: Tensor, shape: torch.Size) -> Tensor:
    found: Tensor = network(features).reshape(-1, *shape)
    return found


def explained(found: Tensor, wanted: Tensor, guess: Tensor) -> float:
    """Return R^2: the share of the squared distance from `guess` that `found` removes.

    1 is all of it; a value below 0 is worse than the guess. Without any distance the result is 0.

    Args:
        found: Decoded values.
        wanted: True values, of the same shape.
        guess: Values to compare with, broadcast to that shape.
    """
    missed, total = (wanted - found).square().sum(), (wanted - guess).square().sum()
    return float(1 - missed / total) if total > 0 else 0.0


def _network(features: int, shape: torch.Size) -> nn.Sequential:
    if len(shape) != 3:
        return nn.Sequential(nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, shape.numel()))
    channels, height, width = shape
    low = (32, max(1, height // 4), max(1, width // 4))
    return nn.Sequential(
        nn.Linear(features, low[0] * low[1] * low[2]),
        nn.ReLU(),
        nn.Unflatten(1, low),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Upsample(size=(height, width)),
        nn.Conv2d(32, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, channels, 3, padding=1),
    )


def distance_correlation(x: Tensor, y: Tensor) -> float:
    """Return the distance correlation of `x` and `y`, from 0 to 1; 0 if one of them does not vary.

    `x` is [rows, m], `y` is [rows, n], both of any floating dtype.
    """
    return correlation(centred_distances(x), centred_distances(y))


def centred_distances(rows: Tensor) -> Tensor:
    """Return the centred distances A of `rows`, [rows, m]: float64 [rows, rows]."""
    distances = torch.cdist(rows.float() - rows.float().mean(0), rows.float() - rows.float().mean(0)).double()
    distances.fill_diagonal_(0)  # as it is but for rounding
    return distances - distances.mean(0) - distances.mean(1, keepdim=True) + distances.mean()


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the distance correlation of two results of `centred_distances`, from 0 to 1."""
    scale = ((a * a).mean() * (b * b).mean()).sqrt()
    return float(((a * b).mean().clamp(min=0) / scale).sqrt()) if scale > 0 else 0.0


def by_chance(a: Tensor, b: Tensor) -> float:
    """Return the correlation of pairs that do not belong together: each row of one with the next row of the other."""
    return correlation(a, b.roll((1, 1), (0, 1)))


def told_by_norm(gradients: Tensor, labels: Tensor) -> float | None:
    """Return how well the norms of gradients tell labels: an area under the ROC curve, the mean over classes.

    Of each class, the larger of the area and 1 minus the area counts: an observer may know which class has the larger
    norms. None if no class can be told from others.

    Args:
        gradients: Gradients at the cut, [rows, features].
        labels: Class of each row, int64 [rows].
    """
    norms = gradients.double().norm(dim=1)
    return _mean_over_classes(labels, lambda mine: _either(area(norms, mine)))


def told_by_direction(gradients: Tensor, labels: Tensor) -> float | None:
    """Return how well the directions of gradients tell labels: an area under the ROC curve, the mean over classes.

    Rows are scored by the cosine with the gradient of the first row of a class, which itself is not scored. None if no
    class can be told from others.

    Args:
        gradients: Gradients at the cut, [rows, features].
        labels: Class of each row, int64 [rows].
    """
    directions = normalize(gradients.double(), dim=1)

    def of_class(mine: Tensor) -> float:
        known = int(mine.int().argmax())
        others = torch.arange(len(mine)) != known
        return area((directions @ directions[known])[others], mine[others])

    return _mean_over_classes(labels, of_class, least=2)


def area(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the ROC curve: how often a positive row has a higher score than another row.

    Equal scores count half.

    Args:
        scores: Score of each row, [rows].
        positive: True for positive rows, bool [rows].
    """
    ranks = scores.argsort().argsort().double()
    _, places = torch.unique(scores, return_inverse=True)
    count = torch.bincount(places).double()
    ranks = (torch.zeros_like(count).index_add_(0, places, ranks) / count)[places] + 1  # equal scores, equal ranks
    ours, theirs = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - ours * (ours + 1) / 2) / (ours * theirs))


def _either(found: float) -> float:
    return max(found, 1 - found)


def _mean_over_classes(labels: Tensor, told: Callable[[Tensor], float], least: int = 1) -> float | None:
    """Return the mean of `told` over the classes with at least `least` rows; None if there is no such class.

    Classes without rows of another class are left out, too.
    """
    masks = [labels == each for each in torch.unique(labels)]
    found = [told(mine) for mine in masks if mine.sum() >= least and (~mine).any()]
    return sum(found) / len(found) if found else None
