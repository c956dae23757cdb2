"""Real runs that are slow for a known reason, drawn at random in their place and size, and what `why` says of them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from support.paths import ROOT
from support.slow_steps import Named, named
from support.workspace import Workspace

SECONDS = 5.0  # that the steps of a run take, about
HERE = Path(__file__).parent
PLAN = """
[run]
name = "slow"
steps = {steps}

[model]
factory = "model.py:build"
options = {{ {options} }}
cut = [{cut}]
loss = "torch.nn.functional.mse_loss"
{trained}

[data]
{data}
batch_size = {rows}
check = false

[schedule]
microbatches = {microbatches}
{schedule}

[optimizer]
factory = "torch.optim.SGD"
lr = 0.01

[queues]
url = "tcp://127.0.0.1:0"
{retained}

[recovery]
snapshot_every = {every}
{evaluation}
"""
SCRIPT = """
from functools import partial
from time import sleep

import torch
from model import build
from stageline import Line

torch.manual_seed(0)
with Line(
    build({times}),
    cut=[{cut}],
    loss=torch.nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.01),
    microbatches={microbatches},
    name="slow",
    settings={{"queues.url": "tcp://127.0.0.1:0"}},
) as line:
    for _ in range({steps}):
        line.step(torch.randn({rows}, 64), torch.randn({rows}, 64)).item()
        sleep({seconds})
"""


@dataclass(frozen=True, slots=True)
class SlowCase:
    """A kind of slow run, with the numbers of stages that it is drawn from, and what makes it slow."""

    name: str
    stages: tuple[int, ...]
    causes: tuple[str, ...] = ()


CASES = (
    SlowCase("healthy, 2 stages", (2,)),
    SlowCase("healthy, 3 stages", (3,)),
    SlowCase("healthy, 4 stages", (4,)),
    SlowCase("slow stage of 2", (2,), ("stage",)),
    SlowCase("slow stage of 3", (3,), ("stage",)),
    SlowCase("slow stage of 4", (4,), ("stage",)),
    SlowCase("far link of 2 stages", (2,), ("far",)),
    SlowCase("far link of 3 or 4 stages", (3, 4), ("far",)),
    SlowCase("narrow link", (2,), ("narrow",)),
    SlowCase("slow source", (2, 3, 4), ("source",)),
    SlowCase("slow dataset", (2, 3), ("dataset",)),
    SlowCase("slow disk", (2, 3), ("disk",)),
    SlowCase("small window", (3, 4), ("window",)),
    SlowCase("slow stage and slow source", (2, 3), ("stage", "source")),
    SlowCase("far link and slow stage", (3, 4), ("far", "stage")),
    SlowCase("little credit", (2, 3), ("credit",)),
    SlowCase("little room", (2,), ("room",)),
    SlowCase("much evaluation", (2, 3, 4), ("evaluation",)),
    SlowCase("slow script", (2, 3), ("script",)),
)


@dataclass(slots=True)
class DrawnCase:
    """A run: its plan, or a script that drives it, and the causes that are right for it."""

    plan: str
    right: set[Named] = field(default_factory=set)
    script: str = ""


class _Drawing:
    """A run while it is drawn. Times are in seconds; `step` is that of a step without the causes."""

    def __init__(self, case: SlowCase, seed: int) -> None:
        self.random = random = Random(f"{case.name}/{seed}")
        self.causes = case.causes
        self.stages, self.microbatches = random.choice(case.stages), random.choice((4, 6, 8))
        self.base = random.uniform(0.008, 0.014)
        self.times, self.width = [self.base] * self.stages, 64
        self.step = 3 * self.base * (self.microbatches + self.stages - 1)
        self.right = set[Named]()
        self.options: dict[str, object] = {}
        self.source, self.seconds, self.held_out, self.every, self.pause = "source", 0.0, 0, 20, 0.0
        self.schedule = self.trained = self.retained = self.evaluation = ""
        self.longer = 1.0  # times that steps take, of which there are fewer then

    def stage(self) -> None:
        taken = {place for named, place in self.right if named == "wire"}
        free = [each for each in range(self.stages) if each - 1 not in taken and each not in taken]
        place = self.random.choice(free)
        self.times[place] *= self.random.uniform(2, 3.5)
        self.right.add(("compute", place))

    def far(self) -> None:
        at = -1 if self.stages == 2 else self.random.choice((0, self.stages - 1))
        beside = self.microbatches / 2 if "stage" in self.causes else 1.0  # else the slow stage hides it
        self.options |= {"lag": self.base * self.random.uniform(4, 8) * beside, "at": at}
        self.right.add(("wire", 0 if at <= 0 else self.stages - 2))

    def narrow(self) -> None:
        self.width = 8192
        self.options |= {"rate": 4 * 4 * self.width / (self.base * self.random.uniform(3, 6)), "lag": 0.001}
        self.right.add(("wire", 0))

    def slow_source(self) -> None:
        self.seconds = self.step * self.random.uniform(0.3, 0.8)
        self.longer = 1 + 2 * self.seconds / self.step
        self.right.add(("data", None))

    def dataset(self) -> None:
        drawn = self.step * self.random.uniform(0.3, 0.8)
        self.source, self.seconds, self.longer = "dataset", drawn / (4 * self.microbatches), 1 + 2 * drawn / self.step
        self.right.add(("data", None))

    def disk(self) -> None:
        self.every = 4
        self.options["disk"] = self.step * self.every * self.random.uniform(1.6, 2.5)
        self.right.add(("disk", None))

    def window(self) -> None:
        self.schedule = f'name = "window"\nwindow = [{", ".join(["1"] * self.stages)}]'
        self.right.add(("window", None))

    def credit(self) -> None:
        """Stage 0 runs forward only; the link is so far that grants of credit come too late."""
        self.trained = f"trainable = {json.dumps([f'{stage}.*' for stage in range(1, self.stages)])}"
        self.longer, granted = self.random.uniform(1.6, 2.5), 2 * self.microbatches + 2
        self.options |= {"lag": self.longer * 3 * self.base * granted / 2, "at": 0}
        self.right.add(("credit", None))

    def room(self) -> None:
        """A snapshot is written for longer than the messages of further steps have room, before the next is due."""
        self.every, self.width = 4, 2048
        self.options["disk"] = self.step * self.random.uniform(2.5, 3.5)
        self.retained = f"retain_bytes = {self.microbatches * (4 * 4 * self.width + 512)}"  # and four times on the disk
        self.right.add(("room", None))

    def rounds(self) -> None:
        self.held_out = 4 * self.microbatches * self.random.randint(1, 3)
        self.evaluation, self.longer = "\n[evaluation]\nevery = 1", 2.0
        self.right.add(("evaluation", None))

    def script(self) -> None:
        self.pause = self.step * self.random.uniform(0.4, 0.9)
        self.right.add(("script", None))

    def drawn(self) -> DrawnCase:
        """The run, with as many steps as take about `SECONDS`."""
        known = {
            "steps": max(14, min(60, round(SECONDS / (self.step * self.longer)))),
            "cut": ", ".join(map(str, range(1, self.stages))),
            "rows": 4 * self.microbatches,
            "microbatches": self.microbatches,
        }
        if self.pause:
            return DrawnCase("", self.right, SCRIPT.format(times=self.times, seconds=self.pause, **known))
        plan = PLAN.format(
            options=_table({"times": self.times, "width": self.width} | self.options),
            data=_data(self.source, self.width, self.seconds, self.held_out),
            schedule=self.schedule,
            every=self.every,
            trained=self.trained,
            retained=self.retained,
            evaluation=self.evaluation,
            **known,
        )
        return DrawnCase(plan, self.right)


_WAYS = {
    "stage": _Drawing.stage,
    "far": _Drawing.far,
    "narrow": _Drawing.narrow,
    "source": _Drawing.slow_source,
    "dataset": _Drawing.dataset,
    "disk": _Drawing.disk,
    "window": _Drawing.window,
    "credit": _Drawing.credit,
    "room": _Drawing.room,
    "evaluation": _Drawing.rounds,
    "script": _Drawing.script,
}


def draw(case: SlowCase, seed: int) -> DrawnCase:
    """A run of this kind."""
    drawing = _Drawing(case, seed)
    for cause in case.causes:
        _WAYS[cause](drawing)
    return drawing.drawn()


def _data(slow: str, width: int, seconds: float, held_out: int) -> str:
    options = _table({"width": width, "seconds": seconds} | ({"held_out": held_out} if held_out else {}))
    return f'{slow} = "model.py:{"batches" if slow == "source" else "dataset"}"\noptions = {{ {options} }}'


def _table(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())


def train(plan: str, workspace: Workspace, *arguments: str) -> None:
    """Trains by the plan, in real processes."""
    shutil.copy(HERE / "slow_model.py", workspace.folder / "model.py")
    workspace.write("stageline.toml", plan)
    trained = workspace.command("train", ".", *arguments, PYTHONPATH=str(ROOT))
    assert trained.returncode == 0, trained.stderr


def _drive(script: str, workspace: Workspace) -> None:
    """Trains by the script, in real processes."""
    shutil.copy(HERE / "slow_model.py", workspace.folder / "model.py")
    workspace.write("script.py", script)
    driven = workspace.command("script", "script.py")
    assert driven.returncode == 0, driven.stderr


def answer(case: DrawnCase, workspace: Workspace) -> dict[str, object]:
    """Trains, and returns what `why` says of the run."""
    if case.script:
        _drive(case.script, workspace)
    else:
        train(case.plan, workspace)
    asked = workspace.command("why", str(workspace.runs()[-1]), "--json")
    assert asked.returncode == 0, asked.stderr
    told: dict[str, object] = json.loads(asked.stdout)["slow"]
    return told


def causes(told: dict[str, object]) -> frozenset[Named]:
    """The causes that an answer names."""
    return named(told)
