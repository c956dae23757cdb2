"""`train` runs a plan from a script: `stageline train` as a function.

result = train("examples/digits", "run.epochs=5")
model.load_state_dict(result.state_dict())
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stageline.pipeline.model.own_schedule import read_plan
from stageline.workers.checkpoint.trained_weights import load_weights
from stageline.workers.errors import RunFailed
from stageline.workers.launch import template
from stageline.workers.launch.launch import prepare_launch, run_launch
from stageline.workers.launch.template import libraries_of
from stageline.workers.runs.folder import Facts, Result
from stageline.workers.runs.owner import StartingRun


@dataclass(frozen=True, slots=True)
class Trained:
    """Finished run.

    Attributes:
        result: Result, as `stageline train --json` prints it.
        folder: Folder with the run's files.
    """

    result: Result
    folder: Path

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return the trained weights under the unsplit model's names, on the CPU; with `ema`, their averages.

        Raises:
            FileNotFoundError: The run keeps no averages; its plan has no `optimizer.ema_decay`.
        """
        return load_weights(self.folder, ema=ema)


def train(config: str | Path, *sets: str, on_status: Callable[[Facts], None] = lambda facts: None) -> Trained:
    """Run a plan to its end on this machine; the broker and every worker are processes of their own.

    Call it in the main thread: it handles signals during the run.

    Args:
        config: Plan file, or the folder of a `stageline.toml`.
        *sets: Keys that override the plan's: "run.steps=20".
        on_status: Called with the broker's status (schema status/1) several times a second.

    Returns:
        The result and the folder of the run.

    Raises:
        PlanRefused: The plan is wrong. No process has been started.
        ModelRefused: The model, loss or optimizer cannot be used. No process has been started.
        DataError: The data cannot be used. No process has been started.
        RunFailed: The run began and failed.

    Example:
        trained = train("examples/digits", "run.epochs=5")
        model.load_state_dict(trained.state_dict())
    """
    plan = read_plan(config, sets=sets, environment=os.environ)
    arguments = [str(config), *(argument for each in sets for argument in ("--set", each))]
    with template.Template() as processes:
        processes.preload(libraries_of(plan))
        with StartingRun(plan, None) as starting:
            launch = prepare_launch(plan, arguments, processes, run=starting.id)
        ended = run_launch(launch, arguments, on_status, processes)
    if ended.result is None:
        raise RunFailed(ended.reason, ended.code, launch.folder)
    return Trained(ended.result, launch.folder)
