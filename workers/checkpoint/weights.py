"""Trained weights on disk: one safetensors file for each stage, under the unsplit model's names.

stage-0.safetensors      its part of the model's state_dict
averages-0.safetensors   where weights are averaged: the averages of its trained parameters, if it has any
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from torch import Tensor

from stageline.pipeline.digest import TensorDigest, tensor_digests
from stageline.pipeline.retry import Note, persist
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish
from stageline.workers.disk.tensor_file import Unsaveable, read_tensors, write_tensors

from .directory import SnapshotFailed


def save_weights(
    stages: Mapping[int, Stage],
    folder: Path,
    note: Note = lambda fault: None,
    wait: Callable[[float], object] = sleep,
) -> dict[str, TensorDigest]:
    """Writes `stage-N.safetensors` for each stage into `folder`, and its averages; returns the weights' digests.

    After a fault that may pass, writes again, and `wait`s before that; `note` gets the fault meanwhile. Raises
    `SnapshotFailed` if they cannot be written, or read back as they are, and what `wait` raises.
    """
    digests: dict[str, TensorDigest] = {}
    for index, stage in stages.items():
        state, averages = _on_host(stage.state_dict()), _on_host(stage.averages)
        if index != stage.index:  # another replica, whose weights are those of the first
            digests |= tensor_digests(state)
            continue
        files = {weights_file(folder, index): state, **({averages_file(folder, index): averages} if averages else {})}
        for file, tensors in files.items():
            persist(partial(_write, file, index, tensors), f"write {file}", note, now=monotonic, wait=wait)
        digests |= tensor_digests(state)
    return digests


def weights_file(folder: Path, stage: int) -> Path:
    return folder / f"stage-{stage}.safetensors"


def averages_file(folder: Path, stage: int) -> Path:
    return folder / f"averages-{stage}.safetensors"


def _on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def _write(file: Path, stage: int, state: Mapping[str, Tensor]) -> None:
    draft = draft_of(file)
    try:
        make_folder(file.parent)
        write_tensors(draft, state)
        publish(draft, file)
    except (OSError, Unsaveable) as error:
        raise SnapshotFailed(f"the trained weights of stage {stage} cannot be kept in {file}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def load_weights(folder: str | Path, *, ema: bool = False) -> dict[str, Tensor]:
    """The trained model's state dict from a finished run's folder: tensors on the CPU, of the dtypes that the model
    has, under the unsplit model's names. With `ema`, averages stand for the parameters that were trained.

    A run on several machines leaves the stages of each machine's workers there. Raises `FileNotFoundError`.
    """
    files = sorted(Path(folder).glob("stage-*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no stage-*.safetensors: a run writes them at its end, on the machines of its workers. "
            f"`stageline run ls` shows which runs have finished; `stageline train --resume` goes on with one"
        )
    averages = sorted(Path(folder).glob("averages-*.safetensors")) if ema else []
    if ema and not averages:
        raise FileNotFoundError(
            f"{folder} holds no averages-*.safetensors: the run averaged no weights, which optimizer.ema_decay says"
        )
    return {name: tensor for file in (*files, *averages) for name, tensor in read_tensors(file).items()}
