"""Runs a plan from a script: what `stageline train` does, as a function.

result = train("examples/digits", "run.epochs=5")
model.load_state_dict(result.state_dict())
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan import read_plan
from stageline.workers.checkpoint.weights import load_weights
from stageline.workers.launch.launch import go, ready
from stageline.workers.launch.supervisor import Facts
from stageline.workers.runs.result import Result


class RunFailed(StagelineError):
    """The run did not finish; `code` is what `stageline train` would exit with, `folder` holds the logs."""

    def __init__(self, reason: str, code: int, folder: Path) -> None:
        super().__init__(f"{reason} (the logs are in {folder})")
        self.code = code
        self.folder = folder


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run: `result` is what `stageline train --json` prints, `folder` is where it left its files."""

    result: Result
    folder: Path

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights under the unsplit model's names."""
        return load_weights(self.folder)


def train(config: str | Path, *sets: str, on_status: Callable[[Facts], None] = lambda facts: None) -> Trained:
    """Runs the plan `config`, with `sets` such as "run.steps=20" on top, to its end: broker and workers as processes.

    `on_status` hears the broker's `status/1` several times a second. For the main thread only, since it minds signals.
    Raises `PlanRefused` or `ModelRefused` before anything is started, `RunFailed` afterwards.
    """
    launch = ready(read_plan(config, sets=sets, environment=os.environ))
    words = [str(config), *(word for each in sets for word in ("--set", each))]
    ended = go(launch, words, on_status)
    if ended.result is None:
        raise RunFailed(ended.reason, ended.code, launch.folder)
    return Trained(ended.result, launch.folder)
