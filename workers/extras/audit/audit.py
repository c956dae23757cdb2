"""Audit of each cut of a plan's model: what it gives away after some steps of training, with and without a defence.

The one who looks is given what crosses the cut for all rows, the inputs of three quarters of them, and the label of one
row of each class: a server with data of its own and the client's part of the model, for example. What can be told of
the other rows is measured.

Pictures are PNG files, written by the standard library alone (W3C Recommendation PNG, third edition, 2025).
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import msgspec
from torch import Tensor, int64, nn

from stageline.pipeline.data import Batch, Source, rows
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.model.load import load_source
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Tree, concatenate, map_tensors, tensors

from . import measures as decoders
from .audited_model import AuditedModel, side_by_side
from .crossing import AddNoise, ClipRows, EqualNormGradients, codecs_at
from .measures import by_chance, centred_distances, correlation, told_by_direction, told_by_norm

EDGE = 2  # pixels between two images of a sheet
LEAST = 20  # rows
SHOWN = 8  # images in a line of a picture

Picture = Tensor  # uint8 [height, width, 3]
Found = Callable[["CutAudit", Picture | None], object]


@dataclass(frozen=True, slots=True)
class AuditChoice:
    """`cuts`: the numbers of the layers that would begin the second part (none: all). `steps` of training come first;
    `sampled` rows are then looked at. `noise` is `AddNoise.share`; `clip` the part of the median norm of rows, before
    the training, that `ClipRows` leaves."""

    cuts: tuple[int, ...] = ()
    steps: int = 0
    sampled: int = 512
    defended: bool = False
    noise: float = 1.0
    clip: float = 0.5


class CutAudit(msgspec.Struct, frozen=True):
    """Findings on one cut. `layer` is the last before the cut, `features` the numbers of a row that cross it.

    `dependence` is the distance correlation, `by_chance` that of pairs that do not belong together; `linear` and
    `network` are R^2 of decoders; `by_norm` and `by_direction` areas under the ROC curve, None without classes. `score`
    is what the rows held out are measured by, after the training; None without any. `codec` is that of activations,
    `codec_back` that of gradients.
    """

    cut: int
    layer: str
    features: int
    defence: str
    dependence: float
    by_chance: float
    linear: float
    network: float
    by_norm: float | None
    by_direction: float | None
    score: float | None
    codec: str = "lossless"
    codec_back: str = "lossless"


class AuditReport(msgspec.Struct, frozen=True):
    """Findings on all cuts; decoders were trained on `trained` rows and measured on `tested`. `measure` names
    `CutAudit.score`, None if no rows are held out."""

    schema: str
    steps: int
    trained: int
    tested: int
    measure: str | None
    cuts: list[CutAudit]


def png(pixels: Tensor) -> bytes:
    """The file of an image, uint8 [height, width, 3] for red, green and blue."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + bytes(line.contiguous().flatten().tolist()) for line in pixels)  # 0: not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, three colours
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    )


def sheet(lines: list[Tensor], size: int = 64) -> Tensor:
    """Images in lines, each [images, 1 or 3 channels, height, width] from 0 to 1, as one: uint8 [height, width, 3],
    white between them. Each image is enlarged by the whole number that brings it nearest to `size` pixels."""
    count, _, height, width = lines[0].shape
    times = max(1, round(size / max(height, width)))
    tall, wide = height * times + EDGE, width * times + EDGE
    found = lines[0].new_full((tall * len(lines) + EDGE, wide * count + EDGE, 3), 255.0)
    for row, images in enumerate(lines):
        for column, image in enumerate(images):
            large = image.repeat_interleave(times, 1).repeat_interleave(times, 2).clamp(0, 1).expand(3, -1, -1)
            top, left = EDGE + row * tall, EDGE + column * wide
            found[top : top + tall - EDGE, left : left + wide - EDGE] = large.permute(1, 2, 0) * 255
    return found.round().byte()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


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
        """Return what is decoded of the rows that are not known."""
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


def audit(plan: Plan, choice: AuditChoice, found: Found = lambda cut, picture: None) -> AuditReport:
    """Audit the cuts of `plan`. `found` is told each with its picture: the originals, what the linear decoder told of
    them, and what the network did; None where inputs are no images.

    Raises `ModelRefused`, `DataError` or `PlanRefused` for what cannot be trained or measured.
    """
    whole = _in_one_stage(plan)
    source = load_source(whole)
    sample = SampledRows.of(source, choice.sampled, plan.data.origin)
    scored = source.held_out() is not None
    results = []
    for model, defence in _trained(plan, whole, source, sample, choice):
        told, picture = _told(model, defence, sample, model.score() if scored else None)
        results.append(told)
        found(told, picture)
    measure = next(iter(plan.metric_names), "loss") if scored else None
    return AuditReport("audit/1", choice.steps, sample.trained, len(sample.tested), measure, results)


def _in_one_stage(plan: Plan) -> Plan:
    """Return the plan with the model in one stage: the audit cuts it itself."""
    model = plan.model.model_copy(update={"cut": None, "stages": None, "balance": "parameters", "stage_memory": None})
    return plan.model_copy(update={"model": model, "workers": (), "stage": None})


def _trained(
    plan: Plan, whole: Plan, source: Source, sample: SampledRows, choice: AuditChoice
) -> Iterator[tuple[AuditedModel, str]]:
    """The model cut at each place, without a defence and with each, and the defence's name. Where it is cut changes
    nothing of what it learns with neither defence nor codec: then it is trained once for all cuts."""
    plain = AuditedModel(whole)
    if not plan.queues.lossy:
        plain.train(source, choice.steps)
    for cut, codecs in codecs_at(plan, _cuts(choice, plain.layers)).items():
        for name, defence in _defences(whole, cut, sample, choice):
            if defence is None and not plan.queues.lossy:
                yield plain.cut_before(cut), name
            else:
                model = AuditedModel(whole).cut_before(cut, defence, codecs)
                model.train(source, choice.steps)
                yield model, name


def _cuts(choice: AuditChoice, layers: int) -> tuple[int, ...]:
    if wrong := [cut for cut in choice.cuts if not 0 < cut < layers]:
        raise ModelRefused(f"there is no cut before layer {wrong[0]}: layers 1 to {layers - 1} may begin a stage")
    return choice.cuts or tuple(range(1, layers))


def _defences(plan: Plan, cut: int, sample: SampledRows, choice: AuditChoice) -> list[tuple[str, nn.Module | None]]:
    """Return defences by name; the first is none. Norms are those before the training."""
    if not choice.defended:
        return [("none", None)]
    norm = choice.clip * float(AuditedModel(plan).cut_before(cut).features(sample.batch[0]).norm(dim=1).median())
    return [
        ("none", None),
        (f"noise {choice.noise:g}", AddNoise(choice.noise)),
        (f"clip {norm:.3g}", ClipRows(norm)),
        ("equal norms", EqualNormGradients()),
    ]


def _told(
    model: AuditedModel, defence: str, sample: SampledRows, score: float | None
) -> tuple[CutAudit, Picture | None]:
    """Return what is told of the rows that are not known, and the picture of that."""
    crossing, gradients = model.crossing(sample.batch)
    distances = sample.distances, centred_distances(crossing)
    features = decoders.scaled(crossing, sample.trained)
    linear = decoders.decoded_linearly(features, sample.wanted, sample.trained)
    network = decoders.decoded_by_network(features, sample.wanted, sample.trained)
    guess, classes = sample.wanted[: sample.trained].mean(0), sample.classes
    told = CutAudit(
        cut=model.cut,
        layer=model.layer,
        features=crossing.shape[1],
        defence=defence,
        dependence=correlation(*distances),
        by_chance=by_chance(*distances),
        linear=decoders.explained(linear, sample.tested, guess),
        network=decoders.explained(network, sample.tested, guess),
        by_norm=None if classes is None else told_by_norm(gradients, classes),
        by_direction=None if classes is None else told_by_direction(gradients, classes),
        score=score,
        codec=model.codecs.forward,
        codec_back=model.codecs.backward,
    )
    return told, _picture(sample.tested, linear, network)


def _picture(tested: Tensor, linear: Tensor, network: Tensor) -> Picture | None:
    if tested.dim() != 4 or tested.shape[1] not in (1, 3):
        return None
    low, high = tested.min(), tested.max()
    return sheet([(each[:SHOWN] - low) / (high - low).clamp(min=1e-12) for each in (tested, linear, network)])
