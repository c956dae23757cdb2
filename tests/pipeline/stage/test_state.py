"""Training that was interrupted by a snapshot and a restore ends with the bits of training that was not."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers

from pipeline.errors import ForeignState, StageError
from pipeline.schedule import Kind
from pipeline.schedule.alternating import alternate
from pipeline.stage import Stage
from pipeline.state import StageState
from states import difference

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
        layers(), first_layer=2, optimizer=optimizer, lr_scheduler=scheduler, loss=functional.cross_entropy, index=1
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


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("layers", LAYERS)
def test_training_goes_on_after_a_restore_as_if_there_had_been_none(layers, at):
    _check(partial(last_stage, layers), at)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(optimizer):
    _check(partial(last_stage, optimizer=optimizer), 3)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_learning_rate_scheduler_goes_on_where_it_was(scheduler):
    _check(partial(last_stage, scheduler=scheduler), 3)


def _check(new: Callable[..., Stage], at: int) -> None:
    undisturbed, first, second = new(), new(), new(seed=1)
    wanted = train(undisturbed, range(6))[4 * at :]
    train(first, range(at))
    state = first.snapshot()
    train(first, range(at, 6))  # must leave the state alone
    second.restore(state)
    assert not difference(train(second, range(at, 6)), wanted)
    assert not difference(second.snapshot(), undisturbed.snapshot())
    assert not difference(living(second), living(undisturbed))
    third = new(seed=2)
    third.restore(state)  # neither has what followed the restore touched it
    assert not difference(third.snapshot(), state)


def living(stage: Stage) -> dict[str, Any]:
    """The optimizer's tensors themselves, which lie as it works on them."""
    assert stage.optimizer is not None
    return {**stage.optimizer.state_dict()}


def drive(stage: Stage, numbers: range, warm_up: int) -> tuple[dict[str, Any], dict[int, StageState]]:
    """PipeDream on one stage: what comes out of each action, and the state at the beginning of each step."""
    out: dict[str, Any] = {}
    states = {numbers.start: stage.snapshot()}
    for turn in alternate(0, numbers, warm_up, 0):
        generator = torch.Generator().manual_seed(turn.number)
        x, g = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        if turn.kind is Kind.FORWARD:
            out[f"F{turn.number}"] = stage.forward(x.requires_grad_(), step=turn.number, microbatch=0)
        else:
            out[f"B{turn.number}"] = stage.backward(g, step=turn.number, microbatch=0)
            stage.update()
            states[turn.number + 1] = stage.snapshot()
    return out, states


def middle_stage(layers: Callable[[], list[nn.Module]], seed: int = 0) -> Stage:
    torch.manual_seed(seed)
    return Stage(layers(), optimizer=partial(torch.optim.AdamW, lr=0.1), stash_weights=True)


@given(
    layers=st.sampled_from([mixed, counting, spectral, tied]),
    warm_up=st.integers(0, 3),
    steps=st.integers(1, 6),
    data=st.data(),
)
def test_what_was_in_flight_is_run_again_with_what_it_read_then(layers, warm_up, steps, data):
    undisturbed, states = drive(middle_stage(layers), range(steps), warm_up)
    died = data.draw(st.integers(0, steps), "died")
    again = data.draw(st.integers(died, steps), "died again")
    second = middle_stage(layers, seed=1)
    second.restore(states[died])
    out, second_states = drive(second, range(died, steps), warm_up)
    third = middle_stage(layers, seed=2)
    third.restore(second_states[again])
    more, third_states = drive(third, range(again, steps), warm_up)
    for actions in (out, more):
        assert not difference(actions, {action: undisturbed[action] for action in actions})
    assert not difference(second_states[steps], states[steps])
    assert not difference(third_states[steps], states[steps])


def test_the_state_of_a_step_in_flight_names_what_each_forward_read():
    # Warm-up 2: when step 3 begins, microbatches 3 and 4 have run forward, on the weights of steps 1 and 2.
    _, states = drive(middle_stage(mixed), range(6), 2)
    assert [(each.step, each.microbatch) for each in states[3].in_flight] == [(3, 0), (4, 0)]
    for each, version in zip(states[3].in_flight, (states[1], states[2]), strict=True):
        assert each.weights.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"}
        assert all(torch.equal(weight, version.weights[name]) for name, weight in each.weights.items())
    counts = [each.buffers["1.num_batches_tracked"].item() for each in states[3].in_flight]
    assert counts == [3, 4]
    assert states[3].weights["1.num_batches_tracked"] == 5


def test_a_stage_that_sends_nothing_to_differentiate_keeps_its_place():
    # Its microbatches in flight are run again too, and must count once in its buffers.
    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return (x * self.weight).argmax(1) + self.seen

    def run(stage: Stage, numbers: range) -> list[Tensor]:
        return [stage.forward(torch.eye(6), step=n, microbatch=0) for n in numbers]

    stage = middle_stage(lambda: [Watch()])
    wanted = run(stage, range(2))
    state, other = stage.snapshot(), middle_stage(lambda: [Watch()])
    other.restore(state)
    assert not difference(run(other, range(2)), wanted)
    assert other.backward(None, step=0, microbatch=0) is None
    assert other.in_flight == 1
    assert other.state_dict()["0.seen"] == 2


def test_gradients_that_no_update_has_cleared_are_state():
    def accumulate(stage: Stage, microbatches: range) -> None:
        for m in microbatches:
            stage.forward(torch.full((2, 6), float(m)), torch.tensor([0, 1]), step=0, microbatch=m)
            stage.backward(step=0, microbatch=m)

    whole, first, second = (last_stage() for _ in range(3))
    accumulate(whole, range(4))
    accumulate(first, range(2))
    second.restore(first.snapshot())
    accumulate(second, range(2, 4))
    assert second.snapshot().gradients
    for stage in (whole, second):
        stage.update()
    assert not difference(second.snapshot(), whole.snapshot())


def test_a_stage_without_parameters_has_a_state_too():
    stage = Stage(nn.Tanh(), optimizer=SGD)
    stage.restore(stage.snapshot())
    assert stage.snapshot() == StageState({})


def test_names_in_a_state_are_those_of_the_unsplit_model():
    stage = Stage([nn.Linear(2, 2), nn.BatchNorm1d(2)], names=("encoder", "norm"), optimizer=SGD)
    assert set(stage.snapshot().weights) == set(stage.state_dict())
    assert {name.partition(".")[0] for name in stage.snapshot().weights} == {"encoder", "norm"}


def test_a_synchronous_step_cannot_be_left_in_the_middle():
    stage = last_stage()
    stage.forward(torch.zeros(2, 6), torch.tensor([0, 1]), step=0, microbatch=0)
    with pytest.raises(StageError, match=r"stage 1 holds 1 microbatches .* between two steps"):
        stage.snapshot()


OTHERS = {
    "2.0.bias is in the stage and not in the state": lambda: last_stage(tied),
    "an optimizer is in the state only": lambda: last_stage(optimizer=None),
    "a learning rate scheduler is in the stage only": lambda: last_stage(scheduler=SCHEDULERS[1]),
    "parameter group": lambda: last_stage(optimizer=groups),
    r"7.weight is float32 \[3, 8\] in the state and float64 \[3, 8\]": lambda: last_stage(
        lambda: [*mixed()[:-1], nn.Linear(8, 3, dtype=torch.float64)]
    ),
    r"7.weight is float32 \[3, 8\] in the state and float32 \[4, 8\] in the stage": lambda: last_stage(
        lambda: [*mixed()[:-1], nn.Linear(8, 4)]
    ),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_the_state_of_another_stage_is_refused_in_words(reason):
    stage = last_stage()
    train(stage, range(1))
    with pytest.raises(ForeignState, match=f"stage 1 cannot go on from this state: .*{reason}"):
        OTHERS[reason]().restore(stage.snapshot())
