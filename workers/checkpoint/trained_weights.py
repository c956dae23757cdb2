"""Trained weights of a run that is over, and those of its best evaluation.

Weights at the end lie in the run's folder, one file for each stage, under the unsplit model's names; those of the best
evaluation are a checkpoint's:

    stage-0.safetensors                         its part of the model's state_dict
    averages-0.safetensors                      where weights are averaged: the averages of its trained parameters
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from torch import Tensor

from stageline.pipeline.digest import TensorDigest, tensor_digests
from stageline.pipeline.retry import Note, persist
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.tensor_file import Unsaveable, publish_tensors, read_tensors

from .directory import SnapshotFailed
from .saved import is_saved, read_saved
from .snapshot import AVERAGES, WEIGHTS
from .source import CheckpointSource, source_in

_WEIGHTS_OF_RUN = {  # the files of a finished run, and why there may be none
    "stage-*.safetensors": "a run writes them at its end, on the machines of its workers. `stageline run ls` shows "
    "which runs have finished; `stageline train --resume` goes on with one",
    "averages-*.safetensors": "the run averaged no weights, which optimizer.ema_decay says",
}


def save_weights(
    stages: Mapping[int, Stage],
    folder: Path,
    note: Note = lambda fault: None,
    wait: Callable[[float], object] = sleep,
) -> dict[str, TensorDigest]:
    """Write `stage-N.safetensors` and averages for each stage, and return the weights' digests.

    Args:
        stages: Stages of the worker.
        folder: Folder of the run.
        note: Called with a fault that may pass, after which writing is tried again.
        wait: Waits a number of seconds before another attempt; its errors are raised.

    Raises:
        SnapshotFailed: The weights cannot be written, or do not read back equal.
    """
    digests: dict[str, TensorDigest] = {}
    for index, stage in stages.items():
        state, averages = _on_host(stage.state_dict()), _on_host(stage.averages)
        if index != stage.index:  # another replica, whose weights are those of the first
            digests |= tensor_digests(state)
            continue
        further = {averages_file(folder, index): averages}
        files = {weights_file(folder, index): state, **{file: found for file, found in further.items() if found}}
        for file, tensors in files.items():
            persist(partial(_write, file, index, tensors), f"write {file}", note, now=monotonic, wait=wait)
        digests |= tensor_digests(state)
    return digests


def weights_file(folder: Path, stage: int) -> Path:
    """Return the path of a stage's trained weights."""
    return folder / f"stage-{stage}.safetensors"


def averages_file(folder: Path, stage: int) -> Path:
    """Return the path of the averages of a stage's trained parameters."""
    return folder / f"averages-{stage}.safetensors"


def _on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def _write(file: Path, stage: int, state: Mapping[str, Tensor]) -> None:
    try:
        publish_tensors(file, state)
    except (OSError, Unsaveable) as error:
        raise SnapshotFailed(f"the trained weights of stage {stage} cannot be kept in {file}: {error}") from error


def load_weights(folder: str | Path, *, ema: bool = False, best: bool = False) -> dict[str, Tensor]:
    """Return the trained model's state dict from a finished run's folder, or that of its best evaluation.

    A run on several machines leaves the stages of each machine's workers there.

    Args:
        folder: Folder of the run, or of what `Line.save` or `fit(best=...)` has saved.
        ema: Averages stand for the trained parameters.
        best: Take the checkpoint of the best evaluation, which a plan keeps with `evaluation.keep_best` and a script
            with `fit(best=...)`; the run need not have finished.

    Returns:
        Tensors on the CPU in the model's dtypes, under the unsplit model's names.

    Raises:
        FileNotFoundError: The folder has no weights, or no averages.
        StagelineError: The run keeps no best checkpoint (the text names the key that does), or it is damaged.

    Example:
        model.load_state_dict(load_weights("runs/digits-20260131-235959-1f0c"))
    """
    found: dict[str, Tensor] = {}
    for files in _files_of(Path(folder), ema=ema, best=best):
        found |= {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    return found


def _files_of(folder: Path, *, ema: bool, best: bool) -> Iterator[list[Path]]:
    if best:
        return _files_of_checkpoint(*source_in(folder).best_checkpoint(), ema=ema)
    if is_saved(folder):
        return _files_of_checkpoint(source_in(folder), read_saved(folder).step, ema=ema)
    return _files_at_end(folder, ema=ema)


def _files_at_end(folder: Path, *, ema: bool) -> Iterator[list[Path]]:
    for pattern, lacking in [*_WEIGHTS_OF_RUN.items()][: 1 + ema]:
        files = sorted(folder.glob(pattern))
        if not files:
            raise FileNotFoundError(f"{folder} holds no {pattern}: {lacking}")
        yield files


def _files_of_checkpoint(source: CheckpointSource, step: int, *, ema: bool) -> Iterator[list[Path]]:
    """Yield the files of the checkpoint of `step` with weights, then those with averages."""
    snapshots = source.verified(step)
    yield [each / WEIGHTS for each in snapshots]
    if ema:
        files = [*filter(Path.exists, (each / AVERAGES for each in snapshots))]
        if not files:
            lacking = _WEIGHTS_OF_RUN["averages-*.safetensors"]
            raise FileNotFoundError(f"the checkpoint of step {step} in {source.folder} has no averages: {lacking}")
        yield files
