"""The weights of a model in several files, by the unsplit model's names; each tensor is read when it is wanted.

a run's folder         the snapshots of a checkpoint, or stage-N.safetensors of a finished run that wrote none
a saved folder         the snapshots in it
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.workers.checkpoint.snapshot import AVERAGES, WEIGHTS, SnapshotDamaged
from stageline.workers.checkpoint.source import CheckpointSource, NoCheckpoint, source_in
from stageline.workers.checkpoint.trained_weights import averages_file, weights_file
from stageline.workers.disk.tensor_file import forms_in, read_tensors
from stageline.workers.runs import folder as runs

Form = tuple[torch.dtype, tuple[int, ...]]

_ATTEMPTS = 10  # to read a checkpoint before it is deleted


class WeightsUnusable(StagelineError):
    """Error that weights cannot be read or written.

    Mend: Name the folder of a run that has the weights, another target, or the form that the message expects.

    Example: weights.pt is there already, and is not overwritten: name another place, or remove it
    """

    error_code = "SL211"
    exit_code = ExitCode.USAGE


class RunMovedOn(WeightsUnusable):
    """Error that a run that goes on deleted the snapshot that was being read.

    Mend: Run the command again: it takes the newest checkpoint.

    Example: the run has moved on and deleted runs/a/checkpoints/stage-1/40, which was being read: it has newer
    checkpoints
    """

    error_code = "SL406"

    def __init__(self, snapshot: Path) -> None:
        """Create the error for the folder of the deleted `snapshot`."""
        super().__init__(f"the run has moved on and deleted {snapshot}, which was being read: it has newer checkpoints")


@dataclass(frozen=True)
class StoredWeights:
    """Weights of one model in `files`, one for each part, in order. Entries in `averages` replace theirs.

    `title` names the weights for people; weights of a run are those after `step` steps.
    """

    title: str
    files: tuple[Path, ...]
    step: int | None = None
    averages: tuple[Path, ...] = ()

    @cached_property
    def places(self) -> Mapping[str, Path]:
        """File of each entry. Raises `WeightsUnusable`."""
        places = {name: file for file, forms in self._forms.items() for name in forms}
        return {**places, **{name: file for file in self.averages for name in _forms_in(file)}}

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """Dtype and shape of each entry. Raises `WeightsUnusable`."""
        return {name: form for forms in self._forms.values() for name, form in forms.items()}

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the entries `names`, row-major and in memory of their own. Raises `WeightsUnusable`, `MemoryError`."""
        found: dict[str, torch.Tensor] = {}
        for file in dict.fromkeys(self.places[name] for name in names):
            found |= self.read_from(file, [name for name in names if self.places[name] == file])
        return {name: found[name] for name in names}

    def read_from(self, file: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the entries `names` of `file`, row-major. Raises `WeightsUnusable`, `MemoryError`."""
        try:
            return read_tensors(file, set(names), packed=True)
        except (OSError, ValueError) as error:
            raise _unreadable(file, error) from error

    def size(self, name: str) -> int:
        """Return the number of bytes of an entry."""
        dtype, shape = self.forms[name]
        return torch.Size(shape).numel() * dtype.itemsize

    def names_in(self, file: Path) -> list[str]:
        """Return the names of the entries in one of `files`."""
        return list(self._forms[file])

    def averages_in(self, file: Path) -> dict[str, torch.Tensor]:
        """Return all entries of one of the `averages`. Raises `WeightsUnusable`, `MemoryError`."""
        return self.read_from(file, list(_forms_in(file)))

    def files_with(self, name: str) -> list[Path]:
        """Return the files that have an entry called `name`."""
        return [file for file, forms in self._forms.items() if name in forms]

    @cached_property
    def _forms(self) -> Mapping[Path, Mapping[str, Form]]:
        return {file: _forms_in(file) for file in self.files}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and bits."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(_bytes(one), _bytes(other))


def weights_in(folder: Path, step: int | None, *, ema: bool = False, best: bool = False) -> StoredWeights:
    """Return the verified weights of a checkpoint, or those that a finished run without snapshots ended with.

    Args:
        folder: Folder of the run.
        step: Step of the checkpoint; None takes the newest that all stages have.
        ema: Return the averages of the weights.
        best: Take the checkpoint of the best evaluation, without a `step`.

    Raises:
        WeightsUnusable: There are no averages.
        NoCheckpoint: There is no such checkpoint.
        SnapshotDamaged: A snapshot is damaged.
        RunMovedOn: The run has deleted the checkpoint meanwhile.
        OSError: A fault that may pass.
    """
    source = source_in(folder)
    if best:
        source, step = source.best_checkpoint()
    if step is None and (not source.present or _set_at_end(source)):
        return _finished(folder, ema=ema)
    found = source.step_of(step)
    source.demand_all(found)
    for stage in source.first_replicas:
        if wrong := source.snapshots.verify(stage, found):
            snapshot = source.snapshots.path(stage, found)
            raise SnapshotDamaged(snapshot, wrong) if snapshot.exists() else RunMovedOn(snapshot)
    folders = [source.snapshots.path(stage, found) for stage in source.first_replicas]
    files, averages = ([each / name for each in folders] for name in (WEIGHTS, AVERAGES))
    return _stored(f"run {source.run} after {found} steps", found, files, averages, ema=ema)


def _set_at_end(source: CheckpointSource) -> bool:
    """Return True if a script's last weights are here, which it may have set after the last checkpoint."""
    files = (weights_file(source.folder, stage) for stage in source.first_replicas)
    return source.plan.scripted and runs.result_in(source.folder) is not None and all(map(Path.exists, files))


def take_weights(
    folder: Path,
    step: int | None,
    use: Callable[[StoredWeights], object],
    tell: Callable[[str], object],
    *,
    ema: bool = False,
    best: bool = False,
) -> StoredWeights:
    """Call `use` with the weights that `weights_in` finds, and return them.

    If `step` is None and the run deletes the newest checkpoint, or the best, while it is used, `use` is called again
    with the newest or best one by then, up to ten times in all. Errors of `weights_in` and `use` are raised.

    Args:
        folder: Folder of the run.
        step: Step of the checkpoint; None takes the newest that all stages have.
        use: Reads the weights.
        tell: Called with a line for people if a checkpoint was deleted.
        ema: Take the averages of the weights.
        best: Take the checkpoint of the best evaluation, without a `step`.
    """
    for _ in range(_ATTEMPTS - 1) if step is None else ():
        try:
            use(weights := weights_in(folder, None, ema=ema, best=best))
        except RunMovedOn as gone:
            tell(f"{gone}. The {'best' if best else 'newest'} of them is taken")
        else:
            return weights
    use(weights := weights_in(folder, step, ema=ema, best=best))
    return weights


def _stored(of: str, step: int | None, files: Sequence[Path], averages: Sequence[Path], *, ema: bool) -> StoredWeights:
    """Return the weights of `of` at `step`; with `ema` their averages, which not every stage has.

    Raises:
        WeightsUnusable: No stage has averages.
    """
    if not ema:
        return StoredWeights(f"the weights of {of}", tuple(files), step)
    found = tuple(filter(Path.exists, averages))
    if not found:
        raise WeightsUnusable(
            f"{of} has no averages of its weights: a plan has them with optimizer.ema_decay, after the first step"
        )
    return StoredWeights(f"the averages of the weights of {of}", tuple(files), step, found)


def _finished(folder: Path, *, ema: bool) -> StoredWeights:
    stages = source_in(folder).first_replicas
    files, averages = ([of(folder, stage) for stage in stages] for of in (weights_file, averages_file))
    if lacking := [str(file) for file in files if not file.exists()]:
        raise NoCheckpoint(
            f"{folder} has no snapshot, and not the weights of a finished run: {', '.join(lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} not there. A run writes them at its end, on the machines of its "
            "workers"
        )
    result = runs.result_in(folder)
    steps = None if result is None else result.steps
    after = "" if steps is None else f" after {steps} steps"
    return _stored(f"run {folder.resolve().name}{after}", steps, files, averages, ema=ema)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _forms_in(file: Path) -> Mapping[str, Form]:
    try:
        return forms_in(file)
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> WeightsUnusable:
    snapshot = file.parent
    if file.name in (WEIGHTS, AVERAGES) and snapshot.parent.exists() and not snapshot.exists():
        return RunMovedOn(snapshot)
    return WeightsUnusable(f"{file} cannot be read: {error}")
