"""A callback that shows a fit in TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from stageline.workers.runs.metrics.tensorboard import EventFile, writer_class
from stageline.workers.script.calls.calls import StepLoss

from .callback import Callback, Fitted


class TensorBoard(Callback):
    """Writes losses, norms of gradients and evaluations to event files in `folder`.

    Of a line that goes on, what an earlier process has written of the first step that this one is told of, and of
    later ones, is replaced. Raises `TensorBoardMissing`.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._file: EventFile | None = None
        writer_class()  # it is missed at once

    def on_step(self, step: int, loss: StepLoss) -> None:
        self._opened(step).add_step(step, loss.item(), loss.gradient_norm)

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        file = self._opened(step)
        file.add_evaluation(step, found)
        file.flush()

    def on_end(self, fitted: Fitted | None) -> None:
        if self._file is not None:
            self._file.__exit__()
            self._file = None

    def _opened(self, start: int) -> EventFile:
        if self._file is None:
            self._file = EventFile(self._folder, start)
        return self._file
