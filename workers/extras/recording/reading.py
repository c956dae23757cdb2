"""Reads what was tapped: what each layer returned, joined with the samples and the targets that it was given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.workers.disk.tensor_file import forms_in, read_tensors
from stageline.workers.runs.folder import RESULT

from . import skipping
from .tapped_files import ABOUT, FOLDER, SAMPLES, TARGETS, TapLayer, TapPlace, TapsAbout, place_of, stage_folder

Activations = Tensor | dict[str, Tensor]  # of a layer that returns one tensor; by their places in what it returns
_SHOWN = 3  # missing files that an error names


class TapsUnusable(StagelineError):
    """Error that tapped outputs cannot be read, joined, or used for a probe.

    Mend: Bring the damaged or missing file back, or leave the layer out with `--layers`.

    Example: layer head returned no tensor of numbers with a fraction whose dimension 0 counts rows: leave it out with
    --layers
    """

    error_code = "SL213"


class NoTaps(TapsUnusable):
    """Error that a folder has no tapped outputs, or not those that were asked for.

    Mend: Name the folder of a run whose plan has `[taps]`, or one of the layers that the message lists.

    Example: layer head was not tapped; encoder.4, encoder.5 were
    """

    error_code = "SL214"
    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class TappedMicrobatch:
    """Output of one layer for one microbatch.

    Attributes:
        step: Training step, or number of the evaluated batch.
        microbatch: Number of the microbatch in the step.
        evaluation: True if the microbatch was evaluated, not trained on.
        activations: Tensor if the layer returns one; otherwise a dict of its tensors by their places, such as "[0]" or
            "['mask']".
        samples: Numbers of the rows in the data, int64 [rows]; None if the source did not tell them.
        targets: Targets in the form of `activations`; None if there are none.
    """

    step: int
    microbatch: int
    evaluation: bool
    activations: Activations
    samples: Tensor | None
    targets: Activations | None

    @property
    def place(self) -> str:
        """Name of the microbatch, for people."""
        return str(TapPlace(self.evaluation, self.step, self.microbatch))


@dataclass(frozen=True, slots=True)
class TappedLayer:
    """Output of one layer for all rows that were tapped, in the order of steps.

    Attributes:
        name: Name of the layer.
        activations: As in `TappedMicrobatch`, with shape [rows, ...]; of tensors in a dict, those whose dimension 0
            counts rows.
        samples: Numbers of the rows in the data, int64 [rows]; None if the source did not tell them.
        targets: As in `TappedMicrobatch`, with shape [rows, ...].
        steps: Training step of each row, or number of its evaluated batch, int64 [rows].
        microbatches: Microbatch of each row, int64 [rows].
    """

    name: str
    activations: Activations
    samples: Tensor | None
    targets: Activations | None
    steps: Tensor
    microbatches: Tensor


def read_taps(run: str | Path) -> "Taps":
    """Return the tapped outputs of a run. Tensors are read when they are asked for.

    Args:
        run: Folder of the run.

    Raises:
        NoTaps: The folder has no tapped outputs.
        TapsUnusable: A file is damaged or missing.
    """
    folder = Path(run) / FOLDER
    try:
        found = msgspec.json.decode((folder / ABOUT).read_bytes(), type=TapsAbout)
    except FileNotFoundError:
        where = f"{run} has no {FOLDER}/{ABOUT}" if Path(run).is_dir() else f"there is no folder {run}"
        raise NoTaps(
            f'{where}: name the folder of a run whose plan has [taps], such as layers = ["encoder.layer.4*"]'
        ) from None
    except OSError as error:
        raise TapsUnusable(f"{folder / ABOUT} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise TapsUnusable(f"{folder / ABOUT} is damaged: {error}") from error
    return Taps(Path(run), found)


class Taps:
    """Tapped outputs of a run.

    A run that has not finished is read as far as all of its workers have written.

    Attributes:
        run: Folder of the run.
        layers: Names of the tapped layers, in the model's order.
        every: Number of steps from one that was tapped to the next.
        unwritten: Number of microbatches that are left out since a worker has not written them yet.
    """

    def __init__(self, run: Path, about: TapsAbout) -> None:
        """List the files in the folder `run`. Raises `TapsUnusable` if the run has finished and files are missing."""
        self.run = run
        self.layers = tuple(layer.name for layer in about.layers)
        self.every = about.every
        self._folder = run / FOLDER
        self._of = {layer.name: layer for layer in about.layers}
        self._folders = [stage_folder(self._folder, stage) for stage in sorted({each.stage for each in about.layers})]
        self._places, self.unwritten = self._joined()

    def __repr__(self) -> str:
        """Return the run's folder and the numbers of layers and microbatches."""
        return f"Taps({self.run}, {len(self.layers)} layers, {len(self._places)} microbatches)"

    def microbatches(self, layer: str, *, evaluation: bool = False) -> Iterator[TappedMicrobatch]:
        """Yield the output of `layer`, microbatch by microbatch, in the order of steps.

        Args:
            layer: Name of a tapped layer.
            evaluation: Yield evaluated batches, not training steps.

        Raises:
            NoTaps: The layer was not tapped.
            TapsUnusable: A file cannot be read, or its rows are not those of the samples.
        """
        if layer not in self._of:
            raise NoTaps(f"layer {layer} was not tapped; {', '.join(self.layers)} were")
        for place in self._places:
            if place.evaluated is evaluation:
                yield self._microbatch(self._of[layer], place)

    def read(self, layer: str, *, evaluation: bool = False) -> TappedLayer:
        """Return all rows of `layer`.

        Args:
            layer: Name of a tapped layer.
            evaluation: Return rows of evaluated batches, not of training steps.

        Raises:
            NoTaps: The layer was not tapped, or nothing of it was stored.
            TapsUnusable: A file cannot be read, or shapes differ from microbatch to microbatch.
        """
        return joined(layer, list(self.microbatches(layer, evaluation=evaluation)))

    def count(self, *, evaluation: bool = False) -> int:
        """Return how many microbatches can be read: of training steps, or with `evaluation` of evaluated batches."""
        return sum(place.evaluated is evaluation for place in self._places)

    def _microbatch(self, layer: TapLayer, place: TapPlace) -> TappedMicrobatch:
        path = stage_folder(self._folder, layer.stage) / place.file
        found = _under(layer.name, _read(path, lambda name: _is_of(name, layer.name)))
        if found is None:
            raise TapsUnusable(
                f"{path} has nothing of layer {layer.name}: it returned no tensor, or another run wrote the file"
            )
        samples, targets = self._known[place]
        _demand_rows(path, found, samples, targets)
        return TappedMicrobatch(place.step, place.microbatch, place.evaluated, found, samples, targets)

    @cached_property
    def _known(self) -> Mapping[TapPlace, tuple[Tensor | None, Activations | None]]:
        """Samples and targets of each microbatch."""
        read = {place: _read(self._folder / SAMPLES / place.file) for place in self._places}
        return {place: (found.get(SAMPLES), _under(TARGETS, found)) for place, found in read.items()}

    def _joined(self) -> tuple[list[TapPlace], int]:
        """Return the microbatches that have all their files, and the number of other microbatches.

        Raises:
            TapsUnusable: Files are missing although the run has finished.
        """
        folders = [self._folder / SAMPLES, *self._folders]
        there = {folder: _places_in(folder) for folder in folders}
        every = set().union(*there.values()) - self._skipped()
        missing = [folder / place.file for place in sorted(every) for folder in folders if place not in there[folder]]
        if missing and (self.run / RESULT).exists():
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise TapsUnusable(
                f"files are missing: {', '.join(map(str, missing[:_SHOWN]))}{more}. If workers ran on other machines, "
                f"copy what is in the folder {FOLDER} of each into {self._folder}"
            )
        whole = sorted(place for place in every if all(place in found for found in there.values()))
        return whole, len(every) - len(whole)

    def _skipped(self) -> set[TapPlace]:
        """Return the bad microbatches that were left out of the training."""
        names = (path.name.split("-") for path in (self.run / skipping.FOLDER).glob("stage-*/[0-9]*"))
        return {TapPlace(False, int(step), int(microbatch)) for step, microbatch in names}


def joined(layer: str, parts: Sequence[TappedMicrobatch]) -> TappedLayer:
    """Return the microbatches `parts` of `layer` as one.

    Raises:
        NoTaps: There is no microbatch.
        TapsUnusable: Shapes differ from microbatch to microbatch.
    """
    demand_some(layer, parts)
    rows = [_rows(part) for part in parts]
    activations = [_of_rows(part, count) for part, count in zip(parts, rows, strict=True)]
    return TappedLayer(
        layer,
        _concatenated(layer, activations),
        samples_of_all(parts),
        targets_of_all(parts),
        torch.cat([torch.full((count,), part.step) for part, count in zip(parts, rows, strict=True)]),
        torch.cat([torch.full((count,), part.microbatch) for part, count in zip(parts, rows, strict=True)]),
    )


def demand_some(layer: str, parts: Sequence[TappedMicrobatch]) -> None:
    """Raise `NoTaps` if `parts`, the microbatches of `layer`, is empty."""
    if not parts:
        raise NoTaps(f"nothing of layer {layer} was stored there: no such step was reached, or taps.evaluation is off")


def samples_of_all(parts: Sequence[TappedMicrobatch]) -> Tensor | None:
    """Return the sample numbers of all rows, int64 [rows]; None if a microbatch has none."""
    found = [part.samples for part in parts if part.samples is not None]
    return torch.cat(found) if len(found) == len(parts) else None


def targets_of_all(parts: Sequence[TappedMicrobatch]) -> Activations | None:
    """Return the targets of all rows; None if a microbatch has none. Raises `TapsUnusable` if shapes differ."""
    found = [part.targets for part in parts if part.targets is not None]
    return _concatenated("the targets", found) if len(found) == len(parts) else None


def tensors_of(activations: Activations) -> list[Tensor]:
    """Return the tensors of `activations`, in the order of their places."""
    return [activations] if isinstance(activations, Tensor) else list(activations.values())


def _rows(part: TappedMicrobatch) -> int:
    """Return the number of rows of a microbatch: by its samples, or else its targets, or else its layer's output."""
    known = [] if part.samples is None else [part.samples]
    known += [] if part.targets is None else tensors_of(part.targets)
    return next((each.shape[0] for each in (*known, *tensors_of(part.activations)) if each.dim()), 0)


def _of_rows(part: TappedMicrobatch, rows: int) -> Activations:
    if isinstance(part.activations, Tensor):
        return part.activations
    return {name: each for name, each in part.activations.items() if each.shape[:1] == (rows,)}


def _concatenated(name: str, trees: Sequence[Activations]) -> Activations:
    """Return `trees` concatenated along dimension 0; of dicts, only the places that all have."""
    single = [each for each in trees if isinstance(each, Tensor)]
    if single and len(single) == len(trees):
        return _cat(name, single)
    several = [{"": each} if isinstance(each, Tensor) else each for each in trees]
    common = [place for place in several[0] if all(place in each for each in several)]
    return {place: _cat(f"{name}{place}", [each[place] for each in several]) for place in common}


def _cat(name: str, tensors: list[Tensor]) -> Tensor:
    try:
        return torch.cat(tensors)
    except RuntimeError as error:
        forms = list(dict.fromkeys(str(list(each.shape)) for each in tensors))
        raise TapsUnusable(
            f"{name}: shapes differ from microbatch to microbatch, {' and '.join(forms[:2])}; read them one by one, "
            "with microbatches()"
        ) from error


def _demand_rows(path: Path, found: Activations, samples: Tensor | None, targets: Activations | None) -> None:
    """Raise `TapsUnusable` if a layer's single tensor has other rows than its samples and targets."""
    counts = [] if samples is None else [samples.shape[0]]
    counts += [] if targets is None else [each.shape[0] for each in tensors_of(targets) if each.dim()]
    if len(set(counts)) > 1:
        raise TapsUnusable(f"{path.parent.parent / SAMPLES / path.name} has {' and '.join(map(str, counts))} rows")
    if counts and isinstance(found, Tensor) and found.shape[:1] != (counts[0],):
        raise TapsUnusable(
            f"{path} has a tensor of shape {list(found.shape)} for a microbatch of {counts[0]} rows: only what has "
            "rows in dimension 0 can be joined with samples. The file can be opened as it is, with safetensors"
        )


def _under(name: str, found: Mapping[str, Tensor]) -> Activations | None:
    """Return the tensors named `name`, or by a place in its tree; None if there are none."""
    if name in found:
        return found[name]
    return {key.removeprefix(name): each for key, each in sorted(found.items()) if _is_of(key, name)} or None


def _is_of(tensor: str, name: str) -> bool:
    return tensor == name or tensor.startswith(f"{name}[")


def _read(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    try:
        names = [name for name in forms_in(path) if wanted(name)]
        return read_tensors(path, names, packed=True)
    except OSError as error:
        raise TapsUnusable(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TapsUnusable(
            f"{path} is damaged: {error}. Without it, and the file of that name in each other folder of "
            f"{path.parent.parent}, the rest can be read"
        ) from error


def _places_in(folder: Path) -> set[TapPlace]:
    try:
        return {place for place in map(place_of, folder.iterdir()) if place is not None}
    except FileNotFoundError:
        raise TapsUnusable(
            f"{folder} is not there: its worker has not begun, or ran on another machine; then copy what is in the "
            f"folder {FOLDER} of its run into {folder.parent}"
        ) from None
    except OSError as error:
        raise TapsUnusable(f"{folder} cannot be read: {error.strerror}") from error
