"""TensorBoard event files of a run's losses, metrics and learning rates, written by torch's `SummaryWriter`."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stageline.pipeline.errors import ExitCode, StagelineError


class TensorBoardMissing(StagelineError):
    """Error that the package tensorboard is not installed.

    Mend: Install it with `pip install "stageline[tensorboard]"`.

    Example: the package tensorboard is not installed, or not whole (No module named 'tensorboard'); install it with:
    pip install "stageline[tensorboard]"
    """

    error_code = "SL507"
    exit_code = ExitCode.USAGE


def writer_class() -> Any:
    """Return torch's `SummaryWriter`. Raises `TensorBoardMissing`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TensorBoardMissing(
            f"the package tensorboard is not installed, or not whole ({error}); install it with: "
            'pip install "stageline[tensorboard]"'
        ) from error
    return SummaryWriter


class EventFile(AbstractContextManager["EventFile"]):
    """TensorBoard event file. Scalars: "train/loss" and "train/gradient_norm" by training step.

    "train/learning_rate/0" is by group, "evaluation/loss" and "evaluation/accuracy" by the number of trained steps.
    """

    def __init__(self, folder: Path, start: int) -> None:
        """Open a file in `folder`; TensorBoard drops entries of earlier files from step `start` on.

        Raises `TensorBoardMissing`.
        """
        self._writer = writer_class()(folder, purge_step=start)

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.end()

    def end(self, *, failed: bool = False) -> None:
        """Close the file; it does not say if the run has `failed`."""
        self._writer.close()

    def flush(self) -> None:
        """Write all entries, so that they can be read."""
        self._writer.flush()

    def add_step(
        self,
        step: int,
        loss: float | None,
        gradient_norm: float | None = None,
        learning_rates: Iterable[float] = (),
        time: float | None = None,
    ) -> None:
        """Add a training step; `time` is in seconds since the epoch, None for now."""
        rates = {f"learning_rate/{group}": rate for group, rate in enumerate(learning_rates)}
        self._add("train", step, {"loss": loss, "gradient_norm": gradient_norm, **rates}, time)

    def add_evaluation(self, step: int, values: Mapping[str, float | None], time: float | None = None) -> None:
        """Add an evaluation after `step` training steps; `time` as in `add_step`."""
        self._add("evaluation", step, values, time)

    def _add(self, part: str, step: int, values: Mapping[str, float | None], time: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{part}/{name}", value, step, walltime=time)
