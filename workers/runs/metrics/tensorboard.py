"""Event files for TensorBoard, written by torch's own writer. It needs the package tensorboard."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec import UNSET

from stageline.pipeline.errors import ExitCode, StagelineError

from .lines import EvaluationMetrics, MetricsLine


class TensorBoardMissing(StagelineError):
    """The package tensorboard is not installed."""

    exit_code = ExitCode.USAGE


def writer_class() -> Any:
    """torch's `SummaryWriter`. Raises `TensorBoardMissing`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TensorBoardMissing(
            f"the package tensorboard is not installed, or not whole ({error}); install it with: "
            'pip install "stageline[tensorboard]"'
        ) from error
    return SummaryWriter


class EventFile(AbstractContextManager["EventFile"]):
    """In `folder`, from step `start` on: TensorBoard drops what earlier files there have from that step on.

    Scalars: "train/loss" and "train/gradient_norm" by training step, "train/learning_rate/0" by group,
    "evaluation/loss" and "evaluation/accuracy" by how many steps were trained. Raises `TensorBoardMissing`.
    """

    def __init__(self, folder: Path, start: int) -> None:
        self._writer = writer_class()(folder, purge_step=start)

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def flush(self) -> None:
        """What was written can be read."""
        self._writer.flush()

    def add(self, line: MetricsLine) -> None:
        """A line of a run's metrics."""
        if isinstance(line, EvaluationMetrics):
            self.add_evaluation(line.step, line.values, line.time)
            return
        norm = None if line.gradient_norm is UNSET else line.gradient_norm
        self.add_step(line.step, line.loss, norm, line.learning_rates, line.time)

    def add_step(
        self,
        step: int,
        loss: float | None,
        gradient_norm: float | None = None,
        learning_rates: Iterable[float] = (),
        time: float | None = None,
    ) -> None:
        """`time` is in seconds since the epoch; None: now."""
        rates = {f"learning_rate/{group}": rate for group, rate in enumerate(learning_rates)}
        self._add("train", step, {"loss": loss, "gradient_norm": gradient_norm, **rates}, time)

    def add_evaluation(self, step: int, values: Mapping[str, float | None], time: float | None = None) -> None:
        """After `step` training steps."""
        self._add("evaluation", step, values, time)

    def _add(self, part: str, step: int, values: Mapping[str, float | None], time: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{part}/{name}", value, step, walltime=time)
