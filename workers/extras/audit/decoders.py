"""Decoders: compute inputs from what crosses a cut, as one could who has such pairs for some rows, and measure others.

    linear    ridge regression; the penalty is the best of `PENALTIES` on a fifth of the rows that it is trained on
    conv      Linear, twice (upsample, convolution, ReLU), convolution: trained by Adam on the squared error; for inputs
              that are no images, a network of two linear layers. For how many epochs, a fifth of the rows says, too

Images are decoded at 32 x 32 pixels at most. Many features are first reduced to their `MOST_FEATURES` main components.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, mse_loss

PENALTIES = (10.0, 1.0, 1e-1, 1e-2, 1e-4)
MOST_FEATURES = 256
LARGEST = 32  # pixels
EPOCHS, PATIENCE, ROWS_AT_ONCE, RATE = 60, 10, 32, 2e-3
FARTHEST = 10.0  # standard deviations


def small(inputs: Tensor) -> Tensor:
    """What is decoded: images, [rows, channels, height, width], at 32 x 32 pixels at most; other inputs as they are."""
    if inputs.dim() != 4:
        return inputs.float()
    height, width = inputs.shape[2:]
    return adaptive_avg_pool2d(inputs.float(), (min(LARGEST, height), min(LARGEST, width)))


def scaled(features: Tensor, trained: int) -> Tensor:
    """float32 [rows, features]: standardized by the first `trained` rows, and reduced to their main components.

    A feature that is constant in those rows is 0 in all, and none is farther than `FARTHEST` from the mean: a unit that
    hardly varies in them would make the decoders fail for a row in which it does.
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
    """The inputs of the rows after the first `trained`, told by a ridge regression on those. Both float32 [rows, ...];
    the result as `inputs`."""
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
    """The same by a small network, seeded, trained for as many epochs as are best for the last fifth of the trained
    rows when it learns from the others. The default generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        mean, known = inputs[:trained].mean(0), features[:trained]
        wanted = inputs[:trained] - mean
        epochs = _best_epochs(known, wanted, trained - trained // 5, seed)
        *_, network = islice(_epochs(known, wanted, seed), epochs + 1)
        return mean + _told(network, features[trained:], inputs.shape[1:])


def _best_epochs(features: Tensor, wanted: Tensor, fitted: int, seed: int) -> int:
    """Gives up after `PATIENCE` epochs that were not better."""
    missed: list[float] = []
    for network in _epochs(features[:fitted], wanted[:fitted], seed):
        missed.append(float(mse_loss(_told(network, features[fitted:], wanted.shape[1:]), wanted[fitted:])))
        if len(missed) - missed.index(min(missed)) > PATIENCE:
            break
    return missed.index(min(missed))


def _epochs(features: Tensor, wanted: Tensor, seed: int) -> Iterator[nn.Module]:
    """The network before its training, and after each epoch."""
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
    """R^2: the share of the squared distance from `guess` that `found` removes; 1 is all, below 0 is worse than the
    guess."""
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
