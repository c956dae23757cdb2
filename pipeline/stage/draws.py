"""Refusal of random numbers that are drawn for activations of which each process has a part.

All processes of a group seed their generators alike: what they draw for different columns would be the same.

    colwise layer -> | dropout: refused | -> rowwise layer -> dropout: all processes draw the same for the same numbers
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stageline.pipeline.errors import StageError

from .layers.passage import default_generators

Styled = Mapping[str, tuple[torch.nn.Module, str]]  # a module and its style, by the module's name


class SplitDraw(StageError):
    """Error that a layer drew random numbers for an activation that a group of processes splits.

    Mend: Set that dropout to 0, or move it behind the layer with split rows.

    Example: random numbers were drawn for what layer 2 returns, whose columns are split over the processes: each would
    draw the same. Set that dropout to 0, or move it behind the layer with split rows
    """

    error_code = "SL208"


class DrawWatch:
    """A watch over random generators, which raises `SplitDraw` if a layer draws for a split activation."""

    def __init__(self, layers: Sequence[torch.nn.Module], styled: Styled, device: torch.device) -> None:
        """Register hooks on the layers and modules.

        The generators are compared where an activation becomes split, where it is whole again, and around each layer,
        before which they are seeded.

        Args:
            layers: The stage's layers.
            styled: Modules that are split, with their styles ("colwise" or "rowwise"), by name.
            device: Device whose generators are watched.
        """
        self._generators = default_generators(device)
        self._split_by = ""  # the module whose output is split now
        self._states: list[torch.Tensor] = []
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._layer_begins if place else self._stage_begins)
            layer.register_forward_hook(self._still_split)
        for name, (module, style) in styled.items():
            if style == "colwise":
                module.register_forward_hook(partial(self._becomes_split, name))
            else:
                module.register_forward_pre_hook(self._becomes_whole)

    def _stage_begins(self, *_: Any) -> None:
        self._split_by = ""

    def _layer_begins(self, *_: Any) -> None:
        if self._split_by:
            self._states = self._now()

    def _still_split(self, *_: Any) -> None:
        if self._split_by and not _alike(self._states, self._now()):
            raise SplitDraw(
                f"random numbers were drawn for what {self._split_by} returns, whose columns are split over the "
                "processes: each would draw the same. Set that dropout to 0, or move it behind the layer with split "
                "rows"
            )

    def _becomes_split(self, name: str, *_: Any) -> None:
        self._still_split()
        self._split_by, self._states = name, self._now()

    def _becomes_whole(self, *_: Any) -> None:
        self._still_split()
        self._split_by = ""

    def _now(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _alike(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
