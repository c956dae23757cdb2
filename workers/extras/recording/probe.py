"""Trains a linear probe on each tapped layer of a run: at which layer can the target be told by a linear function?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.model_names import matches, near, unmatched

from .linear_probe import Pool, ProbeRows, ProbeScore, distinct, features_of, probe_classes, probe_numbers, split_rows
from .reading import (
    Activations,
    NoTaps,
    TappedMicrobatch,
    Taps,
    TapsUnusable,
    demand_some,
    samples_of_all,
    targets_of_all,
)

FEW = 30  # rows to test on, below which a score is coarse


class ProbeRefused(StagelineError):
    """Error that no probe can be trained on the tapped outputs.

    Mend: Store targets, or more steps (`taps.every`), as the message says.

    Example: no targets were stored: a probe learns to tell them from what a layer returned
    """

    error_code = "SL216"


@dataclass(frozen=True, slots=True)
class ProbeChoice:
    """Choice of the layers, rows and targets that are probed.

    Attributes:
        layers: Patterns of layer names; empty for all tapped layers.
        target: Name of a part of the targets; None if they are one tensor.
        pool: Treatment of dimensions; None chooses by the number of dimensions of a layer's output.
        evaluation: Use rows of evaluated batches, not of training steps; None uses training steps if any were tapped.
    """

    layers: Sequence[str] = ()
    target: str | None = None
    pool: Pool | None = None
    evaluation: bool | None = None


class LayerProbe(msgspec.Struct, frozen=True):
    """Probe of one layer with `features` features, and its scores on the rows that are held back."""

    layer: str
    features: int
    l2: float
    score: float
    baseline: float


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the probes of a run, schema probe/1.

    `score` names the scores: "accuracy" is the share of rows whose class is right, "r2" the share of the variance.
    `samples` counts the distinct samples of the rows; None if the source did not tell them.
    """

    schema: str = "probe/1"
    run: str
    rows: str
    score: str
    classes: int | None
    train_rows: int
    test_rows: int
    samples: int | None
    layers: tuple[LayerProbe, ...]
    warnings: tuple[str, ...]

    @property
    def best(self) -> LayerProbe:
        """Layer with the best score; of equally good ones the first."""
        return max(self.layers, key=lambda each: each.score)


def probe(taps: Taps, choice: ProbeChoice, began: Callable[[str], object] = lambda layer: None) -> ProbeReport:
    """Train a probe on each layer, one after the other.

    Args:
        taps: Tapped outputs of a run.
        choice: Layers, rows and targets.
        began: Called with each layer's name before its turn.

    Raises:
        NoTaps: No layer that was asked for was tapped.
        TapsUnusable: Tapped outputs cannot be read or joined.
        ProbeRefused: No probe can be trained on these targets or rows.
    """
    layers, evaluation = _layers(taps, choice.layers), _rows_to_use(taps, choice.evaluation)
    task: _Task | None = None
    found: list[LayerProbe] = []
    for layer in layers:
        began(layer)
        parts = [part for part in taps.microbatches(layer, evaluation=evaluation) if not _is_empty(part)]
        task = task or _task(layer, parts, choice.target)
        features = _features(layer, parts, choice.pool)
        score = task.score(features)
        found.append(LayerProbe(layer, features.shape[1], score.l2, score.score, score.baseline))
    if task is None:
        raise NoTaps("no layer was tapped")
    return ProbeReport(
        run=taps.run.name,
        rows="evaluation" if evaluation else "training",
        score="r2" if task.classes is None else "accuracy",
        classes=task.classes,
        train_rows=int(task.rows.trained.sum()),
        test_rows=int(task.rows.tested.sum()),
        samples=task.samples,
        layers=tuple(found),
        warnings=tuple(_warnings(task, found, taps.unwritten)),
    )


@dataclass(frozen=True, slots=True)
class _Task:
    """Target of all layers' probes, with `classes` classes; None for numbers."""

    targets: Tensor
    classes: int | None
    rows: ProbeRows
    samples: int | None

    def score(self, features: Tensor) -> ProbeScore:
        """Return the score of a probe on `features`, float64 [rows, features]."""
        probe_them = probe_numbers if self.classes is None else probe_classes
        return probe_them(features, self.targets, self.rows)


def _layers(taps: Taps, patterns: Sequence[str]) -> list[str]:
    if wrong := unmatched(patterns, taps.layers):
        raise NoTaps(f'no tapped layer matches "{wrong[0]}"; there are {near(wrong[0], taps.layers)}')
    return [layer for layer in taps.layers if not patterns or matches(layer, patterns)]


def _rows_to_use(taps: Taps, evaluation: bool | None) -> bool:
    return not taps.count() if evaluation is None else evaluation


def _is_empty(part: TappedMicrobatch) -> bool:
    return part.samples is not None and not len(part.samples)


def _task(layer: str, parts: Sequence[TappedMicrobatch], name: str | None) -> _Task:
    demand_some(layer, parts)
    known, samples = targets_of_all(parts), samples_of_all(parts)
    if known is None:
        raise ProbeRefused("no targets were stored: a probe learns to tell them from what a layer returned")
    targets, classes = _classes_or_numbers(_target(known, name))
    numbers = torch.arange(len(targets)) if samples is None else samples
    count, rows = len(distinct(numbers)[0]), split_rows(numbers)
    for part, use in ((rows.fitted, "train on"), (rows.chosen, "choose the penalty with"), (rows.tested, "test on")):
        if not part.any():
            raise ProbeRefused(
                f"{count} samples are too few: none is left to {use}. Store more steps (taps.every), or train for more"
            )
    return _Task(targets, classes, rows, None if samples is None else count)


def _target(targets: Activations, name: str | None) -> Tensor:
    if isinstance(targets, Tensor) and name is None:
        return targets
    known = {"": targets} if isinstance(targets, Tensor) else targets
    asked = next((place for place in (name, f"[{name}]", f"[{name!r}]") if place in known), None)
    if asked is not None:
        return known[asked]
    places = ", ".join(known) if not isinstance(targets, Tensor) else "one tensor, without a name"
    wrong = f'--target "{name}" is none of them' if name is not None else "say which with --target"
    raise ProbeRefused(f"the targets are {places}: {wrong}")


def _classes_or_numbers(targets: Tensor) -> tuple[Tensor, int | None]:
    """Return classes from 0 on, int64 [rows], and their count; or numbers, float64 [rows, numbers], and None."""
    form = f"the targets are {str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"
    flat = targets.flatten(1) if targets.dim() > 1 else targets[:, None]
    if targets.is_floating_point():
        if not flat.isfinite().all():
            raise ProbeRefused(f"{form}, and some are not finite")
        if bool((flat == flat[:1]).all()):
            raise ProbeRefused(f"{form}, and the same for all rows: there is nothing to tell")
        return flat.double(), None
    if targets.is_complex() or flat.shape[1] != 1:
        raise ProbeRefused(f"{form}; expected one class for each row, int64 [rows], or numbers with a fraction")
    values, classes = distinct(flat[:, 0].to(torch.int64))
    if len(values) < 2:
        raise ProbeRefused(f"all {len(flat)} rows have the class {values[0]}: a probe needs two at least")
    return classes, len(values)


def _features(layer: str, parts: Sequence[TappedMicrobatch], pool: Pool | None) -> Tensor:
    found = [features_of(layer, part, pool) for part in parts]
    widths = sorted({each.shape[1] for each in found})
    if len(widths) > 1:
        raise TapsUnusable(
            f"layer {layer} returned {widths[0]} numbers for some rows and {widths[-1]} for others: use --pool mean or "
            "--pool last"
        )
    return torch.cat(found)


def _warnings(task: _Task, found: Sequence[LayerProbe], unwritten: int) -> list[str]:
    train, test = int(task.rows.trained.sum()), int(task.rows.tested.sum())
    wide = [each.layer for each in found if each.features > train]
    warnings = []
    if task.samples is None:
        warnings.append(
            "the source does not tell which samples its rows are (a method samples(step)): one that was seen twice may "
            "be trained on and tested on"
        )
    if wide:
        warnings.append(
            f"{len(wide)} of {len(found)} layers have more features than there are rows to train on, {train}: scores "
            f"may be low for lack of rows ({', '.join(wide[:3])}{', ...' if len(wide) > 3 else ''})"
        )
    if test < FEW:
        warnings.append(f"{test} rows to test on are few: a score moves by {1 / test:.0%} with each")
    if unwritten:
        warnings.append(f"the run has not finished: {unwritten} microbatches are not yet written by all workers")
    return warnings
