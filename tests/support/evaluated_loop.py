"""A loop over the unsplit model that trains and evaluates as `evaluated/stageline.toml` says, in plain torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from support.paths import TESTS
from support.plain_loop import PlainLoop
from support.reference import _load, weights_sha256

FOLDER = TESTS / "support" / "evaluated"
STEPS, EVERY, MICROBATCHES, ROWS, SEED = 20, 3, 2, 6, 3


@dataclass
class EvaluatedLoop:
    """Results of the loop. `rounds`: by step, what `train --json` calls `evaluations`. `stopped`: the step after which
    it stopped early, if it did; `best`: the step of the best round."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # after the steps that were evaluated
    best: int | None = None
    steps: int = 0

    @property
    def weights_sha256(self) -> str:
        return weights_sha256(self.states[self.steps])


@cache
def evaluated_loop(
    metric: str = "loss",
    better: str = "lower",
    patience: int | None = None,
    every: int | None = EVERY,
    metrics: tuple[str, ...] = ("accuracy", "highest"),
    *,
    plateau: bool = False,
) -> EvaluatedLoop:
    """Trains and evaluates; stops after `patience` rounds in a row that were not better. `plateau` halves the learning
    rate after each of them."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    net = _load(FOLDER, "model.py:build")()
    measures = {name: _load(FOLDER, f"model.py:{name}") for name in metrics}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.9, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    plain = PlainLoop(net, cross_entropy, optimizer, MICROBATCHES, seed=SEED)
    source, found = _load(FOLDER, "data.py:batches")(batch_size=ROWS, seed=SEED), EvaluatedLoop()
    best, since = None, 0
    for step in range(1, STEPS + 1):
        plain.train([source.batch(step - 1)])
        if step == STEPS or (every is not None and step % every == 0):
            found.rounds.append(_evaluate(net, measures, source.held_out(), step))
            found.states[step] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            value = {**found.rounds[-1]["metrics"], "loss": found.rounds[-1]["loss"]}[metric]
            if not isinstance(value, str) and (best is None or (value < best if better == "lower" else value > best)):
                best, found.best, since = value, step, 0
            else:
                since += 1
            if plateau:
                scheduler.step(value)
            if patience is not None and since >= patience and step < STEPS:
                break
    found.steps, found.losses = step, plain.losses
    return found


def _evaluate(net: Any, measures: Mapping[str, Any], held_out: Any, step: int) -> dict[str, Any]:
    (inputs, targets), sums = held_out, dict.fromkeys((*measures, "loss"), 0.0)
    net.eval()
    with torch.no_grad():
        for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
            for part, target in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
                outputs = net(part)
                for name, measure in measures.items():
                    sums[name] += float(measure(outputs, target)) * len(part)
                sums["loss"] += cross_entropy(outputs, target).item() * len(part)
    net.train()
    means: Mapping[str, float] = {name: total / len(inputs) for name, total in sums.items()}
    told = {name: value if math.isfinite(value) else str(value) for name, value in means.items()}
    loss = told.pop("loss")
    return {"step": step, "rows": len(inputs), "loss": loss, "metrics": told}
