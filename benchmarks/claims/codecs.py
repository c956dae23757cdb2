"""Claim: over a slow link codecs make a run faster, and it learns about as well.

Two examples, each in two stages on two workers, over tcp through a proxy with the bandwidth and the delay of a link
between two houses; then in one process without one, to their end, for what they have learned.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from torch import Tensor

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import ours
from benchmarks.workload import Timing
from stageline import Plan, load, read_plan, train
from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.tensors import delivered
from stageline.pipeline.model.load import base_folder, load_function
from stageline.workers.extras.preflight.trial import estimate
from stageline.workers.runtime.job import prepare

ROOT = Path(__file__).parents[2]
RATE, DELAY = 50e6 / 8, 0.040  # bytes per second, and seconds one way
WARM, TIMED = 4, 12  # steps over the link

CODECS = {
    "lossless": ("lossless", "lossless"),
    "bf16": ("bf16", "bf16"),
    "int8 there, bf16 back": ("int8", "bf16"),
    "int8": ("int8", "int8"),
}

THROUGH_A_LINK = f"""
import sys

from stageline.workers.process import worker

sys.path.append({str(ROOT)!r})

from benchmarks.wires.link import SlowLink

def _over_the_link(endpoint, broker, plain=worker.reachable):
    return SlowLink({RATE}, {DELAY}).before(plain(endpoint, broker))

worker.reachable = _over_the_link
"""

ABOUT = """\
Two stages on two workers, 8 microbatches a step, over tcp through a proxy with 50 Mbit/s and 40 ms one way, each
direction for itself. Of {steps} steps the last {timed} count; rates are steps per second as `min / median / max` over
the rounds, ratios the median of those to lossless within each round. Bytes are those of all messages of a step. What
was learned is of whole runs without the link (of digits the mean of three seeds); errors are what is lost of the first
microbatch at the end of the lossless one, root mean square to root mean square."""


Directions = tuple[str, str]  # the codecs there and back
Crossing = tuple[Tensor, Tensor]  # an activation, and the gradient that comes back


@dataclass(frozen=True, slots=True)
class CodecExample:
    """`sets` make two stages of it; `learned` names what is measured on rows held out, with `digits` after the
    point, the mean of so many `seeds`."""

    name: str
    learned: str
    digits: int
    seeds: int
    sets: Mapping[str, object] = field(default_factory=dict)

    def over_the_link(self, codec: Directions) -> Timing:
        """The rate of a short run."""
        with tempfile.TemporaryDirectory() as folder:
            plan = Path(shutil.copytree(ROOT / "examples" / self.name, Path(folder) / self.name)) / "stageline.toml"
            with (plan.parent / "model.py").open("a") as file:
                file.write(THROUGH_A_LINK)
            url, steps = "queues.url=tcp://127.0.0.1:0", f"run.steps={WARM + TIMED}"
            return ours.train_plan(plan, [*self._sets(codec), url, steps, "recovery.snapshot_every=0"])

    def bytes_of_a_step(self, codec: Directions) -> int:
        plan = read_plan(self._file, sets=self._sets(codec), environment=os.environ)
        return sum(queue.message for queue in estimate(plan).queues) * plan.schedule.in_step

    def learn(self, codec: Directions) -> tuple[float, Crossing]:
        """Accuracy of the example at its end, and the bytes that cross the cut then."""
        runs = [self._trained([*self._sets(codec), f"run.seed={seed}"]) for seed in range(self.seeds)]
        return fmean(learned for learned, _ in runs), runs[0][1]

    def _trained(self, sets: list[str]) -> tuple[float, Crossing]:
        with tempfile.TemporaryDirectory() as folder:
            ended = train(self._file, *sets, "queues.url=memory://", f"run.dir={folder}")
            if ended.result is None:
                raise ours.unfinished(self.name, sets, ended)
            return float(ended.result.metrics[self.learned]), _crossing(read_plan(self._file, sets=sets), ended.folder)

    @property
    def _file(self) -> Path:
        return ROOT / "examples" / self.name / "stageline.toml"

    def _sets(self, codec: Directions) -> list[str]:
        there, back = codec
        codecs = {"queues.codec.forward": there, "queues.codec.backward": back}
        common = {"schedule.microbatches": 8, "schedule.name": "gpipe", **codecs, **self.sets}
        return [f"{key}={value}" for key, value in common.items()]


EXAMPLES = (
    CodecExample(
        "chargpt", "bits_per_symbol", 3, 1, {"model.cut": [4], "workers": "{ 0.stages = [0], 1.stages = [1] }"}
    ),
    CodecExample("digits", "accuracy", 4, 3),
)


def measure(rounds: int) -> BenchmarkResult:
    found = [_example(example, rounds) for example in EXAMPLES]
    about = ABOUT.format(steps=WARM + TIMED, timed=TIMED)
    return BenchmarkResult("Codecs", about, tuple(table for table, _ in found), {"codecs": [each for _, each in found]})


def _example(example: CodecExample, rounds: int) -> tuple[Table, dict[str, object]]:
    contestants = {name: partial(example.over_the_link, codec) for name, codec in CODECS.items()}
    timings = alternate(contestants, rounds)
    rates = {name: Spread(tuple(each.steps_per_second(WARM) for each in timed)) for name, timed in timings.items()}
    sizes = {name: example.bytes_of_a_step(codec) for name, codec in CODECS.items()}
    runs = {name: example.learn(codec) for name, codec in CODECS.items()}
    learned = {name: figure for name, (figure, _) in runs.items()}
    _, crossing = runs["lossless"]
    errors = {name: _errors(codec, crossing) for name, codec in CODECS.items()}
    rows = tuple(
        (
            name,
            f"{sizes[name] / 1000:.0f}",
            f"{rates[name].low:.3g} / {rates[name].middle:.3g} / {rates[name].high:.3g}",
            f"{(rates[name] / rates['lossless']).middle:.2f}",
            *(f"{100 * error:.2f} %" for error in errors[name]),
            f"{learned[name]:.{example.digits}f}",
        )
        for name in CODECS
    )
    columns = ("codec", "kB a step", "steps/s", "to lossless", "error there", "back", example.learned.replace("_", " "))
    facts = {"steps_per_second": {name: rate.rounds for name, rate in rates.items()}, "bytes": sizes}
    return Table(example.name, columns, rows), {"example": example.name, **facts, "learned": learned, "errors": errors}


def _crossing(plan: Plan, folder: Path) -> Crossing:
    """Of the first microbatch, between the layers of a run's model at its end."""
    microbatch, model = prepare(plan).feed.microbatch(0, 0), load(folder).train()
    cut = plan.model.cut[0]
    activation = model[:cut](microbatch.inputs).detach().requires_grad_()
    loss = load_function(plan.model.loss, base_folder(plan), "model.loss")
    loss(model[cut:](activation), microbatch.targets).backward()
    return activation.detach(), activation.grad


def _errors(codec: Directions, crossing: Crossing) -> list[float]:
    """Root mean squares of what is lost, to those of what is sent, there and back."""
    arrived = (delivered(tensor, Codec[name.upper()]) for tensor, name in zip(crossing, codec, strict=True))
    return [((a - b).norm() / b.norm()).item() for a, b in zip(arrived, crossing, strict=True)]
