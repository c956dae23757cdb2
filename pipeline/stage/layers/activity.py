"""What a stage does, or did last: for people who ask why a worker waits, or which layer failed."""

from collections.abc import Sequence

LOSS, OPTIMIZER, LR_SCHEDULER = "the loss", "the optimizer", "the learning rate scheduler"  # in place of a layer's name
GRADIENTS = "the gradients"  # likewise


class Activity:
    """`at` is the name of the layer that ran last, or what else of a stage with these `layers` did."""

    __slots__ = ("_layers", "at")

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = frozenset(layers)
        self.at = next(iter(layers), LOSS)

    def __str__(self) -> str:
        """ "layer 3", "the loss"."""
        return f"layer {self.at}" if self.at in self._layers else self.at
