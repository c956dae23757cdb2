"""Everything that fine-tuning has, as one plain loop: torch, an unsplit model, none of our code.

The plan's file says what is done, key by key; `FEATURES` are the keys that can be added, alone or together. Random
numbers are seeded before each layer, as for every run.
"""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial, reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from support.paths import TESTS
from support.reference import _alone, _load, weights_sha256

FOLDER = TESTS / "support" / "finetuned"
Keys = Mapping[str, Any]
State = dict[str, Any]

FEATURES: Mapping[str, Keys] = {
    "clipping": {"optimizer.clip_norm": 0.1},
    "accumulation": {"schedule.accumulate": 2},
    "bf16": {"model.autocast": "bf16"},
    "groups": {"optimizer.groups": [{"match": ["*.bias"], "weight_decay": 0.0, "lr": 0.03}]},
    "rates": {
        "lr_scheduler.factory": "torch.optim.lr_scheduler.ExponentialLR",
        "lr_scheduler.gamma": 0.8,
        "lr_scheduler.every": 2,
    },
    "averages": {"optimizer.ema_decay": 0.7},
    "evaluation": {"evaluation.every": 1},
    "early stopping": {"evaluation.every": 1, "evaluation.patience": 3},
    "keep best": {"evaluation.every": 1, "evaluation.keep_best": True},
    "prefix cache": {"model.prefix_cache": True},
}
TOGETHER: Keys = {key: value for keys in FEATURES.values() for key, value in keys.items()}

# The modules before which random numbers are seeded, one for each layer, and the one before which the prefix ends.
_LAYERS = {
    "convolutions": ("conv1", "norm1", "relu1", "conv2", "norm2", "relu2", "drop", "norm3", "flat", "head"),
    "gpt2": ("transformer.wte", *(f"transformer.h.{block}" for block in range(4)), "transformer.ln_f", "lm_head"),
}
_TRAINS_FROM = {"convolutions": "conv2", "gpt2": "transformer.h.2"}


@dataclass
class FineTuned:
    """Results of the loop.

    `lines` are those of metrics.jsonl without their times, `rounds` what `train --json` calls `evaluations`. By steps,
    of those that were evaluated: `weights` and `averages`. `best` is the step of the best round. `optimizer` and
    `lr_scheduler` have their state after the last step: the first, by the parameters' names.
    """

    steps: int = 0
    best: int | None = None
    stopped_early: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[int, State] = field(default_factory=dict)
    averages: dict[int, State] = field(default_factory=dict)
    optimizer: dict[str, State] = field(default_factory=dict)
    lr_scheduler: State | None = None

    @property
    def weights_sha256(self) -> str:
        return weights_sha256(self.weights[self.steps])

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if line["kind"] == "step"]


def plan_of(kind: str, changes: Keys) -> dict[str, Any]:
    """The plan file of "convolutions" or "gpt2", with `changes` by dotted keys."""
    plan = tomllib.loads((FOLDER / f"{kind}.toml").read_text(encoding="utf-8"))
    for key, value in changes.items():
        *tables, name = key.split(".")
        reduce(lambda table, each: table.setdefault(each, {}), tables, plan)[name] = value
    return plan


def sets_of(changes: Keys) -> list[str]:
    """The same for `--set`."""
    return [f"{key}={_toml(value)}" for key, value in changes.items()]


def fine_tune(kind: str, changes: Keys = TOGETHER) -> FineTuned:
    """Trains as the plan says."""
    plan = plan_of(kind, changes)
    with _alone(plan["run"]["seed"]):
        return _Loop(plan, _LAYERS[kind], _TRAINS_FROM[kind]).run()


class _Loop:
    def __init__(self, plan: dict[str, Any], layers: Iterable[str], trains_from: str) -> None:
        model, data, optimizer = plan["model"], plan["data"], plan["optimizer"]
        load = partial(_load, FOLDER)
        self.plan, self.found = plan, FineTuned()
        self.model: nn.Module = load(model["factory"])(**model.get("options", {}))
        self.loss = load(model["loss"])
        self.metrics = {name.rpartition(":")[2]: load(name) for name in model["metrics"]}
        self.source = load(data["source"])(batch_size=data["batch_size"], seed=plan["run"]["seed"])
        self.microbatches = plan["schedule"]["microbatches"]
        self.accumulate = plan["schedule"].get("accumulate", 1)
        self.steps = plan["run"]["epochs"] * self.source.steps_per_epoch // self.accumulate
        self.epoch = self.source.steps_per_epoch // self.accumulate
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in model["trainable"]))
        self.groups = _groups(self.model, optimizer.get("groups", []))
        self.optimizer = torch.optim.AdamW(
            [{**group, "params": list(group["params"].values())} for group in self.groups],
            lr=optimizer["lr"],
            weight_decay=optimizer["weight_decay"],
        )
        self.lr_scheduler = _lr_scheduler(plan, self.optimizer)
        decay = optimizer.get("ema_decay")
        averaged = None if decay is None else AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.averaged = averaged
        self.place = _Current()
        for layer, name in enumerate(layers):
            seed = partial(self.place.seed, plan["run"]["seed"], layer)
            self.model.get_submodule(name).register_forward_pre_hook(seed)
        if model.get("prefix_cache"):
            self.model.get_submodule(trains_from).register_forward_pre_hook(_KeptRows(self.place, self.epoch))

    def run(self) -> FineTuned:
        choice, best, since = self.plan.get("evaluation", {}), None, 0
        for step in range(1, self.steps + 1):
            self.train(step - 1)
            if step % choice.get("every", self.steps) and step != self.steps:
                continue
            self.found.rounds.append(self.evaluate(step))
            self.keep(step)
            loss = self.found.rounds[-1]["loss"]
            if math.isfinite(loss) and (best is None or loss < best):
                best, since, self.found.best = loss, 0, step
            else:
                since += 1
            if since == choice.get("patience") and step < self.steps:
                self.found.stopped_early = True
                break
        return self.end(step)

    def train(self, step: int) -> None:
        first = step * self.accumulate
        batches = range(first, first + self.accumulate)
        losses: list[Tensor] = []
        rows = sum(len(self.source.samples(batch)) for batch in batches)
        for batch in batches:
            parts = (*self.source.batch(batch), self.source.samples(batch))
            for inputs, targets, samples in zip(*(each.tensor_split(self.microbatches) for each in parts), strict=True):
                self.place.at(step, len(losses), samples)
                with self.precision():
                    loss = self.loss(self.outputs(self.model, inputs), targets)
                loss = loss * (len(inputs) / rows)
                loss.backward()
                losses.append(loss.detach())
        self.place.nowhere()
        line = {"kind": "step", "step": step, "loss": reduce(torch.add, losses).item()}
        if (most := self.plan["optimizer"].get("clip_norm")) is not None:
            line["gradient_norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), most).item()
        line |= {"learning_rates": [group["lr"] for group in self.optimizer.param_groups], "rows": rows}
        self.found.lines.append(line)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        if self.lr_scheduler is not None and (step + 1) % self.plan["lr_scheduler"]["every"] == 0:
            self.lr_scheduler.step()

    def evaluate(self, step: int) -> dict[str, Any]:
        """Outputs for all rows that are held out, of the averages or else the weights."""
        model = self.model if self.averaged is None else self.averaged.module
        (inputs, targets), size = self.source.held_out(), self.plan["data"]["batch_size"]
        sums = dict.fromkeys(("loss", *self.metrics), 0.0)
        modes = {module: module.training for module in model.modules()}
        model.eval()
        with torch.no_grad(), self.precision():
            for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                parts = (each.tensor_split(self.microbatches * self.accumulate) for each in (x, y))
                for part, target in zip(*parts, strict=True):
                    outputs = self.outputs(model, part)
                    sums["loss"] += self.loss(outputs, target).item() * len(part)
                    for name, metric in self.metrics.items():
                        sums[name] += float(metric(outputs, target)) * len(part)
        for module, mode in modes.items():
            module.training = mode
        means = {name: total / len(inputs) for name, total in sums.items()}
        loss = means.pop("loss")
        self.found.lines.append({"kind": "evaluation", "step": step, "loss": loss, "metrics": means})
        return {"step": step, "rows": len(inputs), "loss": loss, "metrics": means}

    def keep(self, step: int) -> None:
        self.found.weights[step] = deepcopy(self.model.state_dict())
        if self.averaged is not None:
            self.found.averages[step] = deepcopy(self.averaged.module.state_dict())

    def end(self, step: int) -> FineTuned:
        self.found.steps = step
        for group in self.groups:
            self.found.optimizer |= {
                name: self.optimizer.state[parameter] for name, parameter in group["params"].items()
            }
        self.found.lr_scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        return self.found

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        found: Any = model(inputs)
        return found if isinstance(found, Tensor) else found.logits  # type: ignore[no-any-return]

    def precision(self) -> torch.autocast:
        bf16 = self.plan["model"].get("autocast") == "bf16"
        return torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False)


class _Current:
    """Which microbatch of which step is computed, of which samples; nowhere in evaluation."""

    def __init__(self) -> None:
        self.nowhere()

    def nowhere(self) -> None:
        self.step, self.microbatch, self.samples = -1, -1, torch.zeros(0)

    def at(self, step: int, microbatch: int, samples: Tensor) -> None:
        self.step, self.microbatch, self.samples = step, microbatch, samples

    def seed(self, seed: int, layer: int, *_: object) -> None:
        if self.step >= 0:
            digest = sha256(f"{seed}/{self.step}/{self.microbatch}/{layer}".encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))


class _KeptRows:
    """Before a layer: keeps what it is given in the first epoch, a row for each sample, and gives it that in later
    ones, in place of what the layers before it have computed again."""

    def __init__(self, place: _Current, epoch: int) -> None:
        self._place, self._epoch = place, epoch
        self._rows: dict[int, Tensor] = {}

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._place.step < 0:
            return None
        samples = self._place.samples.tolist()
        if self._place.step < self._epoch:
            self._rows |= {sample: row.clone() for sample, row in zip(samples, given[0], strict=True)}
            return None
        return torch.stack([self._rows[sample] for sample in samples]), *given[1:]


def _groups(model: nn.Module, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Unmatched parameters, then each group; `params` by their names. The first group that matches has a parameter."""
    groups: list[dict[str, Any]] = [{"params": {}}, *({**group, "params": {}} for group in wanted)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matching = (at for at, group in enumerate(groups[1:], 1) if _matches(name, group["match"]))
            groups[next(matching, 0)]["params"][name] = parameter
    for group in groups:
        group.pop("match", None)
    return groups


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _lr_scheduler(plan: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    table = dict(plan.get("lr_scheduler", {}))
    table.pop("every", None)
    factory: Callable[..., Any] | None = None if not table else _load(FOLDER, table.pop("factory"))
    return None if factory is None else factory(optimizer, **table)


def _toml(value: Any) -> str:
    match value:
        case dict():
            return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case _:
            return str(value)


def path_of(kind: str) -> Path:
    return FOLDER / f"{kind}.toml"
