"""The rows that an audit looks at: what decoders are to tell of them, and what the one who looks is given."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor, int64

from stageline.pipeline.data import Batch, Source, rows
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, concatenate, map_tensors, tensors

from . import measures as decoders
from .audited_model import side_by_side
from .measures import centred_distances

LEAST = 20  # rows


@dataclass(frozen=True, slots=True)
class SampledRows:
    """`batch`, of whose rows the first `trained` are known to the one who looks. `wanted`, float32 [rows, channels,
    height, width] or [rows, features], is what is decoded; `distances`, float64 [rows, rows], are those of the inputs
    (`centred_distances`); `classes`, int64 [rows], are the targets, None where those are something else."""

    batch: Batch
    trained: int
    wanted: Tensor
    distances: Tensor
    classes: Tensor | None

    @classmethod
    def of(cls, source: Source, count: int, origin: str) -> Self:
        """The first `count` rows of the first epoch, or all. Raises `DataError`, which names `origin`, for too few."""
        batch = _first(source, count)
        inputs, targets = batch
        found = rows(batch)
        if found < LEAST:
            raise DataError(f"{origin} gives {found} rows; an audit needs {LEAST} at least")
        classes = isinstance(targets, Tensor) and targets.dtype is int64 and targets.dim() == 1
        return cls(
            batch,
            found - found // 4,
            decoders.small(_images(inputs)),
            centred_distances(side_by_side(inputs, found, "the audit")),
            targets if classes else None,  # type: ignore[arg-type]
        )

    @property
    def tested(self) -> Tensor:
        """What is decoded of the rows that are not known."""
        return self.wanted[self.trained :]


def _first(source: Source, count: int) -> Batch:
    found: list[Batch] = []
    for step in range(source.steps_per_epoch):
        found.append(source.batch(step))
        if sum(map(rows, found)) >= count:
            break
    inputs, targets = (concatenate([batch[side] for batch in found]) for side in (0, 1))
    return map_tensors(lambda t: t[:count], inputs), map_tensors(lambda t: t[:count], targets)


def _images(inputs: Tree) -> Tensor:
    """float32 [rows, channels, height, width] of a single tensor of images, else [rows, features]."""
    match tensors(inputs):
        case [one] if one.dim() == 4 and one.is_floating_point():
            return one.float()
        case _:
            return side_by_side(inputs, rows(inputs), "the audit")
