"""What a `Line` needs of a run, wherever its workers are: calls go in, replies come out."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from torch import Tensor

from stageline.pipeline.tree import Tree
from stageline.workers.runtime.calls import CallKind
from stageline.workers.script.calls.batch_record import BatchRecord

from .calls.calls import Replies
from .calls.page import Timetable


class ScriptRun(Protocol):
    """A run that a script drives. Its methods are for the script's thread alone."""

    size: int  # how many workers it has
    batches: BatchRecord | None  # what its steps were trained on; None if it cannot be resumed
    cannot_save: str  # why it saves no checkpoints; "" if it does

    @property
    def folder(self) -> Path | None:
        """Of its files; None if it has none."""

    @property
    def position(self) -> int:
        """The number of training steps that have been called."""

    def submit(
        self,
        kind: CallKind,
        inputs: Tree = None,
        targets: Tree = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        ema: bool = False,
    ) -> "Future[Replies]":
        """Calls the workers, in order; what they reply. The tensors must not be written to afterwards. With `ema`,
        averages stand for weights.

        Raises `RunFailed` if the run is over.
        """

    def close(self) -> None:
        """Ends the run well: every call is carried out, the weights are kept. Raises `RunFailed` if that fails."""

    def save(self, folder: Path, call: Callable[[str], Replies]) -> None:
        """Saves a checkpoint; `call` has the workers write it into the folder that it is given. Raises `NotSaved`."""

    def waits_for(self) -> str:
        """What the run has waited for longer than a moment; "" for nothing. For any thread; it may take seconds."""

    def news(self) -> list[str]:
        """What has happened to the workers since the last call, as lines for people. For any thread."""

    def workers(self) -> list[str]:
        """What each worker is and does, one line for each; none once they have ended."""

    def timetable(self) -> Timetable:
        """Of the newest step whose times are known; as it is planned while there is none."""

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The weights of a run that was closed, or their averages, under the unsplit model's names."""

    def abort(self, reason: str, *, knows_failure: bool = False, interrupted: bool = False) -> None:
        """Ends the run as it is; what has been saved stays. If it has failed, that is said, unless the script knows.
        `interrupted`: by Ctrl-C, so that another one may come."""

    def discard(self) -> None:
        """Ends the run as it is; nothing of it is of use any more, and nothing is said of it."""
