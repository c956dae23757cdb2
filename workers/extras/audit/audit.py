"""Audit of each cut of a plan's model: what it gives away after some steps of training, with and without a defence.

The audit takes the place of an observer who sees what crosses the cut for all rows, and who knows the inputs of three
quarters of them and the label of one row of each class. Such an observer is, for example, a server with data of its
own and the client's part of the model. The audit measures what this observer can tell of the other rows.

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
from .audited_model import AddNoise, AuditedModel, ClipRows, EqualNormGradients, codecs_at, side_by_side
from .measures import by_chance, centred_distances, correlation, told_by_direction, told_by_norm

EDGE = 2  # pixels between two images of a sheet
LEAST = 20  # rows
SHOWN = 8  # images in a line of a picture

Picture = Tensor  # uint8 [height, width, 3]
Found = Callable[["CutAudit", Picture | None], object]


@dataclass(frozen=True, slots=True)
class AuditChoice:
    """Choice of what is audited.

    Attributes:
        cuts: Numbers of the layers that would begin the second part; empty for all.
        steps: Steps of training before the audit.
        sampled: Number of rows that are looked at.
        defended: Audit each cut with each defence, too.
        noise: `AddNoise.share`.
        clip: Part of the median norm of rows before the training that `ClipRows` leaves.
    """

    cuts: tuple[int, ...] = ()
    steps: int = 0
    sampled: int = 512
    defended: bool = False
    noise: float = 1.0
    clip: float = 0.5


class CutAudit(msgspec.Struct, frozen=True):
    """Findings on one cut. `layer` is the last before the cut, `features` the number of values of a row that cross it.

    `dependence` is the distance correlation, `by_chance` the correlation of pairs that do not belong together. `linear`
    and `network` are R^2 of decoders. `by_norm` and `by_direction` are areas under the ROC curve, None without classes.
    `score` is the metric or loss of the rows held out after the training, None without any. `codec` is the codec of
    activations, `codec_back` that of gradients.
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
    """Findings on all cuts; decoders were trained on `trained` rows and measured on `tested` rows.

    `measure` names the metric or loss of `CutAudit.score`; None if no rows are held out.
    """

    schema: str
    steps: int
    trained: int
    tested: int
    measure: str | None
    cuts: list[CutAudit]


def png(pixels: Tensor) -> bytes:
    """Return the PNG file of an image, uint8 [height, width, 3] for red, green and blue."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + bytes(line.contiguous().flatten().tolist()) for line in pixels)  # 0: not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, three colours
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    )


def sheet(lines: list[Tensor], size: int = 64) -> Tensor:
    """Return images in lines as one image: uint8 [height, width, 3], with white between them.

    Each image is enlarged by the whole number that brings it nearest to `size` pixels.

    Args:
        lines: Images of each line, [images, 1 or 3 channels, height, width], from 0 to 1.
        size: Wanted size of an image, in pixels.
    """
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
    """Rows for an audit. The first `trained` rows of `batch` are known to the observer of the cut.

    `wanted` is what is decoded, float32 [rows, channels, height, width] or [rows, features]. `distances` are those of
    the inputs by `centred_distances`, float64 [rows, rows]. `classes` are the targets, int64 [rows]; None if targets
    are not classes.
    """

    batch: Batch
    trained: int
    wanted: Tensor
    distances: Tensor
    classes: Tensor | None

    @classmethod
    def of(cls, source: Source, count: int, origin: str) -> Self:
        """Return the first `count` rows of the first epoch, or all if there are fewer.

        Args:
            source: Source of the data.
            count: Number of rows.
            origin: Name of the source, for errors.

        Raises:
            DataError: There are fewer than `LEAST` rows.
        """
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
        """Values to decode, of the rows that are not known."""
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
    """Return a single tensor of images as float32 [rows, channels, height, width], other inputs as [rows, features]."""
    match tensors(inputs):
        case [one] if one.dim() == 4 and one.is_floating_point():
            return one.float()
        case _:
            return side_by_side(inputs, rows(inputs), "the audit")


def audit(plan: Plan, choice: AuditChoice, found: Found = lambda cut, picture: None) -> AuditReport:
    """Audit the cuts of `plan`, and return the findings on all of them.

    Args:
        plan: Plan whose model is trained and audited on this machine.
        choice: Cuts, steps, rows and defences.
        found: Called with the findings on each cut and a picture: the originals, the images that the linear decoder
            gives, and those that the network gives. The picture is None if inputs are not images.

    Raises:
        ModelRefused: The model cannot be trained or measured, or has no such cut.
        DataError: The data cannot be read, or have too few rows.
        PlanRefused: The model cannot be cut as the plan says.
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
    """Return the plan with the model in one stage: the audit cuts the model itself."""
    model = plan.model.model_copy(update={"cut": None, "stages": None, "balance": "parameters", "stage_memory": None})
    return plan.model_copy(update={"model": model, "workers": (), "stage": None})


def _trained(
    plan: Plan, whole: Plan, source: Source, sample: SampledRows, choice: AuditChoice
) -> Iterator[tuple[AuditedModel, str]]:
    """Yield the trained model cut at each place, without a defence and with each defence, and the defence's name.

    Without defence and codec, the place of the cut changes nothing of what the model learns. Then it is trained once
    for all cuts.
    """
    plain = AuditedModel.of(whole)
    if not plan.queues.lossy:
        plain.train(source, choice.steps)
    for cut, codecs in codecs_at(plan, _cuts(choice, plain.layers)).items():
        for name, defence in _defences(whole, cut, sample, choice):
            if defence is None and not plan.queues.lossy:
                yield plain.cut_before(cut), name
            else:
                model = AuditedModel.of(whole).cut_before(cut, defence, codecs)
                model.train(source, choice.steps)
                yield model, name


def _cuts(choice: AuditChoice, layers: int) -> tuple[int, ...]:
    if wrong := [cut for cut in choice.cuts if not 0 < cut < layers]:
        raise ModelRefused(f"there is no cut before layer {wrong[0]}: layers 1 to {layers - 1} may begin a stage")
    return choice.cuts or tuple(range(1, layers))


def _defences(plan: Plan, cut: int, sample: SampledRows, choice: AuditChoice) -> list[tuple[str, nn.Module | None]]:
    """Return defences by name; the first is none. Norms are measured before the training."""
    if not choice.defended:
        return [("none", None)]
    norm = choice.clip * float(AuditedModel.of(plan).cut_before(cut).features(sample.batch[0]).norm(dim=1).median())
    return [
        ("none", None),
        (f"noise {choice.noise:g}", AddNoise(choice.noise)),
        (f"clip {norm:.3g}", ClipRows(norm)),
        ("equal norms", EqualNormGradients()),
    ]


def _told(
    model: AuditedModel, defence: str, sample: SampledRows, score: float | None
) -> tuple[CutAudit, Picture | None]:
    """Return the findings on the rows that are not known, and the picture of them."""
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
