"""Scripts whose processes are forks: a plan that names closures of the script, and what a plain loop makes of them."""

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.plan import Plan, from_mapping
from stageline.pipeline.process.child import Fork
from stageline.workers.runs.folder import LaunchOutcome
from stageline.workers.script.processes.launcher import LocalProcesses, start_processes
from support import reference

DATA = """
import torch
from stageline import Rows

def batches(batch_size, seed):
    x = torch.randn(36, 4, generator=torch.Generator().manual_seed(1))
    return Rows(x, (x.sum(1) > 0).long(), batch_size, seed)
"""


class Barrier:
    """Where one worker stops once, when it was called for the `number`th time, until the test has let it go on."""

    def __init__(self, folder: Path, number: int) -> None:
        self._reached, self._open = folder / "reached", folder / "open"
        self._left = number
        os.mkfifo(self._reached)
        os.mkfifo(self._open)

    def pass_through(self) -> None:
        """In the worker."""
        self._left -= 1
        if not self._left and self._reached.exists():
            self._reached.write_text(str(os.getpid()))
            self._open.read_text()

    def await_worker(self) -> int:
        """The pid of the worker that has come to it."""
        return int(self._reached.read_text())

    def open(self) -> None:
        """For the worker that waits at it."""
        self.leave_open()
        self._open.write_text("")

    def leave_open(self) -> None:
        """For all that come from now on."""
        self._reached.unlink()


class Closures:
    """Objects of a script: functions that no other process could import; `gate` is passed with every loss."""

    def __init__(self, gate: Barrier | None = None, width: int = 8) -> None:
        scale = 0.5

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if gate is not None:
                gate.pass_through()
            return functional.cross_entropy(outputs, targets) * scale

        self.model = lambda: nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 2))
        self.loss = loss
        self.optimizer = lambda parameters, **options: torch.optim.AdamW(parameters, lr=0.01)

    def digest(self, steps: int, folder: Path) -> str:
        """Of the weights that a plain loop ends with."""
        source = reference._load(folder, "data.py:batches")(batch_size=6, seed=0)
        made = Closures()
        recipe = reference.Recipe(made.model, source.batch, made.loss, made.optimizer, None, 0, steps, 3)
        return reference.train(recipe).weights_sha256


def plan_of(steps: int | None, **tables: dict[str, Any]) -> Plan:
    """Of two workers that train the closures in `OBJECTS`, with the data of `DATA` in the current folder."""
    return from_mapping(
        {
            "run": {"name": "script", "log_every": 1, **({"steps": steps} if steps else {})},
            "model": {"factory": "script:model", "cut": [2], "loss": "script:loss"},
            "data": {"source": "data.py:batches", "batch_size": 6},
            "schedule": {"microbatches": 3},
            "optimizer": {"factory": "script:optimizer"},
            "recovery": {"snapshot_every": 2},
            **tables,
        }
    )


def start(closures: Closures, plan: Plan, run: str = "script-1") -> LocalProcesses:
    """In a script."""
    OBJECTS.update(model=closures.model, loss=closures.loss, optimizer=closures.optimizer)
    return start_processes(plan, run)


class Script:
    """A process that runs `function` as a script in `folder` would; what it returns is in `result` at its end."""

    def __init__(self, function: Callable[[], object], folder: Path, temporary: Path) -> None:
        def run() -> int:
            os.chdir(folder)
            os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
            (folder / "script.json").write_text(json.dumps(function()))
            return 0

        self._folder = folder
        with (folder / "script.log").open("a") as log:
            self.process = Fork(run, log.fileno())

    def result(self) -> Any:
        """Once it has ended."""
        code = self.process.wait()
        assert code == 0, (self._folder / "script.log").read_text()
        return json.loads((self._folder / "script.json").read_text())

    def launcher(self) -> psutil.Process:
        """Its only child."""
        (launcher,) = psutil.Process(self.process.pid).children()
        return launcher

    def template(self) -> psutil.Process:
        """The process that was there before all that it forked."""
        return min(self.launcher().children(), key=lambda process: process.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def told(outcome: LaunchOutcome | None) -> dict[str, Any]:
    """How a run ended, and what is left in the script's process."""
    assert outcome is not None
    facts = outcome.facts
    return {
        "code": int(outcome.code),
        "reason": outcome.reason,
        "digest": facts.get("weights_sha256"),
        "restarts": facts.get("restarts"),
        "children": len(psutil.Process().children()),
        "threads": threading.active_count(),
    }
