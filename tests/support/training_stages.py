"""Stages with every kind of state: layers, optimizers and schedulers, and how to drive them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers

from stageline.pipeline.schedule import Kind
from stageline.pipeline.schedule.alternating import alternate
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState

pytestmark = pytest.mark.usefixtures("one_thread")


def mixed() -> list[nn.Module]:
    """Dropout, counted and running buffers, a frozen layer, one without parameters."""
    frozen = nn.Linear(8, 8).requires_grad_(False)
    return [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), frozen, nn.ReLU(inplace=True), nn.Linear(8, 3)]


class Counting(nn.Module):
    """Its output depends on buffers that every forward changes: one outside of the state dict, one exchanged for
    another, one that is not there before the first forward, one written to behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("hidden", torch.zeros(6), persistent=False)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("late", None)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach()
        self.hidden.add_(rows.sum(0))
        self.mean = self.mean * 0.9 + rows.mean(0)
        self.late = rows[:1] if self.late is None else torch.cat([self.late, rows[:1]])
        self.calls.data += 1
        return x * self.scale + self.hidden + self.mean + self.late.sum(0) + self.calls


def counting() -> list[nn.Module]:
    return [Counting(), nn.Linear(6, 3)]


def spectral() -> list[nn.Module]:
    return [nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))]


def tied() -> list[nn.Module]:
    square = nn.Linear(6, 6)
    last = nn.Linear(6, 6)
    last.weight = square.weight
    return [nn.Sequential(square, nn.Tanh(), last), nn.Linear(6, 3)]


class Image(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 6, 1, 1).expand(-1, 6, 4, 4)


def convolution() -> list[nn.Module]:
    layers = [Image(), nn.Conv2d(6, 4, 3), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return list(nn.Sequential(*layers).to(memory_format=torch.channels_last))


class Rounded(torch.optim.Optimizer):
    """Keeps 64-bit sums, text and a list for 32-bit parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.5, float("inf")), "tag": "a"})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"sum": torch.zeros_like(p, dtype=torch.float64), "name": "sum", "all": []}
                state["sum"] += p.grad.double() / 3
                state["all"].append(p.grad.mean().double())
                p.sub_(group["lr"] * (state["sum"] + sum(state["all"])))


def tensor_lr(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)


def groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.SGD([{"params": every[1:]}, {"params": every[:1], "lr": 0.01}], lr=0.1, momentum=0.9)


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LAYERS = (mixed, counting, spectral, tied, convolution)
OPTIMIZERS = (
    SGD,
    partial(torch.optim.AdamW, lr=0.01),
    partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    partial(torch.optim.Adagrad, lr=0.1),
    partial(torch.optim.Adadelta, lr=0.1),
    partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    partial(torch.optim.NAdam, lr=0.01),
    partial(torch.optim.RAdam, lr=0.01),
    partial(torch.optim.ASGD, lr=0.01, t0=2),
    partial(torch.optim.Rprop, lr=0.01),
    partial(torch.optim.Adamax, lr=0.01),
    partial(torch.optim.Adafactor, lr=0.01),
    Rounded,
    tensor_lr,
    groups,
)
SCHEDULERS = (
    None,
    partial(schedulers.LambdaLR, lr_lambda=lambda step: 0.9**step),
    partial(schedulers.StepLR, step_size=2),
    partial(schedulers.MultiStepLR, milestones=[1, 3, 3, 5], gamma=0.5),
    partial(schedulers.ExponentialLR, gamma=0.9),
    partial(schedulers.CosineAnnealingLR, T_max=5),
    partial(schedulers.CosineAnnealingWarmRestarts, T_0=2),
    partial(schedulers.PolynomialLR, total_iters=4),
    partial(schedulers.OneCycleLR, max_lr=0.2, total_steps=20),
    partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
    lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], milestones=[2]),
    lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], optimizer=o),
)


def last_stage(
    layers: Callable[[], list[nn.Module]] = mixed, optimizer: Any = SGD, scheduler: Any = None, seed: int = 0
) -> Stage:
    torch.manual_seed(seed)
    return Stage(
        layers(),
        first_layer=2,
        optimizer=optimizer,
        loss=functional.cross_entropy,
        index=1,
        settings=StageSettings(lr_scheduler=scheduler),
    )


def train(stage: Stage, steps: range) -> list[Tensor]:
    """Two microbatches a step; everything that comes out."""
    out = []
    for step in steps:
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            x = torch.randn(4, 6, generator=generator).requires_grad_()
            target = torch.randint(0, 3, (4,), generator=generator)
            out.append(stage.forward(x, target, step=step, microbatch=microbatch, share=0.5))
            out.append(stage.backward(step=step, microbatch=microbatch))
        stage.update()
    return out


def living(stage: Stage) -> dict[str, Any]:
    """The optimizer's tensors themselves, which lie as it works on them."""
    assert stage.optimizer is not None
    return {**stage.optimizer.state_dict()}


def drive(stage: Stage, numbers: range, warm_up: int) -> tuple[dict[str, Any], dict[int, StageState]]:
    """PipeDream on one stage: what comes out of each action, and the state at the beginning of each step."""
    out: dict[str, Any] = {}
    states = {numbers.start: stage.snapshot()}
    for kind, _, step in alternate(0, numbers, warm_up):
        generator = torch.Generator().manual_seed(step)
        x, g = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        if kind is Kind.FORWARD:
            out[f"F{step}"] = stage.forward(x.requires_grad_(), step=step, microbatch=0)
        else:
            out[f"B{step}"] = stage.backward(g, step=step, microbatch=0)
            stage.update()
            states[step + 1] = stage.snapshot()
    return out, states


def middle_stage(layers: Callable[[], list[nn.Module]], seed: int = 0) -> Stage:
    torch.manual_seed(seed)
    return Stage(layers(), optimizer=partial(torch.optim.AdamW, lr=0.1), settings=StageSettings(stash_weights=True))
