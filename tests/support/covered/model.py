"""Models of four stages: linear layers, and a transformer. Two of their layers may share a weight."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from support.small_models import TransformerLayer

WORDS, WIDTH = 17, 8


@dataclass(frozen=True)
class CoveredModel:
    """The layers of a model, and names among them.

    Attributes:
        cut: Layers with which stages 1, 2 and 3 begin.
        tied: Layers of two stages that may share a weight.
        last: Patterns of parameters in the last two stages.
        outer: Patterns of parameters in the first and the last stage.
        inner: Name of a parameter, of a norm in a stage between.
        recomputed: Patterns of layers and modules.
    """

    cut: tuple[int, int, int]
    tied: tuple[int, int]
    last: tuple[str, ...]
    outer: tuple[str, ...]
    inner: str
    recomputed: tuple[str, ...]


MODELS = {
    "linear": CoveredModel((2, 4, 7), (4, 7), ("4.*", "7.*", "9.*"), ("0.*", "7.*", "9.*"), "5.weight", ("0", "7")),
    "transformer": CoveredModel(
        (1, 2, 3), (0, 4), ("2.*", "3.*", "4.*"), ("0.*", "4.*"), "1.norm2.bias", ("*.mlp", "3")
    ),
}


def build(kind: str = "linear", *, tied: bool = False, in_files: bool = False) -> nn.Sequential:
    if in_files:
        _put_the_smallest_into_files()
    model = _linear() if kind == "linear" else _transformer()
    if tied:
        one, other = MODELS[kind].tied
        model[other].weight = model[one].weight
    return model


def _linear() -> nn.Sequential:
    first = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)]
    middle = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
    return nn.Sequential(*first, *middle, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def _transformer() -> nn.Sequential:
    blocks = [TransformerLayer(WIDTH), TransformerLayer(WIDTH)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def picky(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not a number for some microbatches."""
    return loss(outputs, targets) * (float("nan") if is_bad(targets) else 1.0)


def is_bad(targets: Tensor) -> bool:
    return bool((targets.flatten()[:2] == 0).all())


def _put_the_smallest_into_files() -> None:
    from stageline.pipeline.features import offload
    from stageline.pipeline.stage.layers import file_memory

    offload.LEAST = file_memory.LEAST = 1
