"""Ten layers in four stages, with dropout; two of them may share a weight."""

from torch import Tensor, nn
from torch.nn import functional

CUT = [2, 4, 7]
TIED = (4, 7)  # layers, of the last two stages


def build(*, tied: bool = False, in_files: bool = False) -> nn.Sequential:
    if in_files:
        _put_the_smallest_into_files()
    first = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.25)]
    model = nn.Sequential(
        *first, nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    if tied:
        one, other = TIED
        model[other].weight = model[one].weight
    return model


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def picky(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not a number for some microbatches."""
    return loss(outputs, targets) * (float("nan") if is_bad(targets) else 1.0)


def is_bad(targets: Tensor) -> bool:
    return bool((targets == 0).all())


def _put_the_smallest_into_files() -> None:
    from stageline.pipeline.features import offload
    from stageline.pipeline.stage.layers import file_memory

    offload.LEAST = file_memory.LEAST = 1
