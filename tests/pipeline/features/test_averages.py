"""The averages of a stage's weights are those that torch's `AveragedModel` keeps of the unsplit model, to the bit."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stageline.pipeline.errors import ForeignState, StageError
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from support.states import difference

DECAY, STEPS = 0.9, 4
ADAM = partial(torch.optim.AdamW, lr=0.05)


class Scale(nn.Module):
    """Uses another layer's weight, and gives its own as it is."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.scale = nn.Parameter(torch.ones(3, 4).T)  # not row-major

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight @ self.scale, self.scale


class First(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    layers = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 4), Scale(first.weight), First())
    layers[2].requires_grad_(False)
    return layers


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)


def stage(decay: float | None = DECAY, **options: Any) -> Stage:
    return Stage(model(), loss=mse_loss, optimizer=ADAM, settings=StageSettings(ema_decay=decay, **options))


def averaged_model(of: nn.Module) -> AveragedModel:
    return AveragedModel(of, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def train(trained: Stage, steps: range) -> None:
    for step in steps:
        trained.forward(*batch(step), step=step)
        trained.backward()
        trained.update()


def plain(steps: int = STEPS) -> tuple[nn.Sequential, AveragedModel]:
    made = model()
    averaged, optimizer = averaged_model(made), ADAM([each for each in made.parameters() if each.requires_grad])
    for step in range(steps):
        x, y = batch(step)
        mse_loss(made(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(made)
    return made, averaged


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(each, wanted[name]) for name, each in found.items())


@pytest.mark.parametrize("steps", [0, 1, STEPS])
def test_averages_are_those_of_torch_buffers_frozen_and_shared_parameters_included(steps: int) -> None:
    trained, (weights, averaged) = stage(), plain(steps)
    train(trained, range(steps))
    assert same(trained.state_dict(), weights.state_dict())
    assert same(trained.state_dict(ema=True), averaged.module.state_dict())
    assert same(trained.state_dict(), trained.state_dict(ema=True)) is (steps < 2)  # the first update copies


def test_only_what_is_trained_has_an_average_under_each_of_its_names() -> None:
    trained = stage()
    assert not trained.averages  # no memory before the first update
    train(trained, range(1))
    assert set(trained.averages) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.scale"}
    assert trained.averages["0.weight"] is trained.averages["3.weight"]
    frozen = Stage(nn.Linear(2, 2).requires_grad_(False), optimizer=ADAM, settings=StageSettings(ema_decay=DECAY))
    frozen.forward(torch.ones(1, 2))
    frozen.update()
    assert not frozen.averages
    assert same(frozen.state_dict(ema=True), frozen.state_dict())


def test_dtypes_are_averaged_apart() -> None:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double()]
    made = nn.Sequential(*layers)
    averaged, trained = (
        averaged_model(made),
        Stage(deepcopy(made), optimizer=ADAM, settings=StageSettings(ema_decay=DECAY)),
    )
    optimizer = ADAM(made.parameters())
    for step in range(3):
        for parameters in (made.parameters(), trained._body.parameters()):
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, float(number + step))
        optimizer.step()
        averaged.update_parameters(made)
        trained.update()
    assert same(trained.state_dict(ema=True), averaged.module.state_dict())


def test_evaluation_computes_with_averages_and_leaves_weights_and_modes_as_they_are() -> None:
    trained, (weights, averaged) = stage(), plain()
    train(trained, range(STEPS))
    x, _ = batch(9)
    before = {name: (tensor, tensor.clone()) for name, tensor in trained._body.named_parameters()}
    with torch.no_grad():
        assert torch.equal(trained.evaluate(x, ema=True), averaged.eval()(x))
        assert torch.equal(trained.evaluate(x), weights.eval()(x))
    assert not torch.equal(trained.evaluate(x), trained.evaluate(x, ema=True))
    for name, parameter in trained._body.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert all(each.training for each in trained._body.modules())


class Referring(nn.Module):
    """Has its weight in a list, too, where nothing but the parameter itself is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.again = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.again[0]


class Recurrent(nn.LSTM):
    """Keeps a list of its weights."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.parametrize("layer", [Referring, partial(Recurrent, 4, 4)], ids=["referring", "recurrent"])
def test_whatever_refers_to_a_weight_is_evaluated_with_its_average(layer: Any) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(layer())
    averaged, trained = (
        averaged_model(made),
        Stage(deepcopy(made), optimizer=ADAM, settings=StageSettings(ema_decay=DECAY)),
    )
    optimizer = ADAM(made.parameters())
    for step in range(3):
        x, _ = batch(step)
        made(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(made)
        y = trained.forward(x, step=step).requires_grad_()
        y.square().mean().backward()
        trained.backward(y.grad)
        trained.update()
    x, _ = batch(9)
    with torch.no_grad():
        assert torch.equal(trained.evaluate(x, ema=True), averaged(x))
        assert torch.equal(trained.evaluate(x), made(x))


def test_weights_are_back_after_an_error_in_an_evaluation() -> None:
    trained = stage()
    train(trained, range(2))
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    with pytest.raises(RuntimeError):
        trained.evaluate(torch.ones(5, 7), ema=True)
    assert same(trained.state_dict(), before)


@pytest.mark.parametrize("versions", [{}, {"stash_weights": True}, {"delay_weights": True}], ids=str)
def test_evaluation_with_averages_disturbs_no_microbatch_in_flight(versions: dict[str, bool]) -> None:
    trained, other = stage(**versions), stage(**versions)
    for each in (trained, other):
        train(each, range(2))
        each.forward(*batch(2), step=2)
        if versions:
            each.forward(*batch(3), step=3)
        if each is trained:
            each.evaluate(batch(9)[0], ema=True)
        each.backward()
        each.update()
        if versions:
            each.backward()
            each.update()
    assert not difference(trained.snapshot(), other.snapshot())


def test_an_output_that_is_an_average_is_sent_as_a_copy() -> None:
    trained = Stage(
        list(model())[:4],
        loss=lambda given, target: mse_loss(given[0], target),
        optimizer=ADAM,
        settings=StageSettings(ema_decay=DECAY),
    )
    train(trained, range(1))
    _, scale = trained.evaluate(batch(9)[0], ema=True)  # type: ignore[misc]
    kept = scale.clone()
    assert torch.equal(scale, trained.averages["3.scale"])
    train(trained, range(1, STEPS))
    assert torch.equal(scale, kept)
    assert not torch.equal(scale, trained.averages["3.scale"])


@pytest.mark.parametrize("before", [0, 2])
def test_a_restored_stage_goes_on_with_the_averages(before: int) -> None:
    first, second = stage(), stage()
    train(first, range(before))
    state = first.snapshot()
    train(second, range(3))  # what it had is gone
    second.restore(state)
    train(second, range(before, STEPS))
    assert same(second.state_dict(ema=True), plain()[1].module.state_dict())


def test_a_state_whose_averages_do_not_fit_is_refused() -> None:
    trained = stage()
    train(trained, range(2))
    state = trained.snapshot()
    with pytest.raises(ForeignState, match="averages of weights are in the state only"):
        stage(None).restore(state)
    for name, wrong, said in (
        ("1.bias", {}, r"the average of 1.bias is missing, the weight is float32 \[4\]"),
        (
            "3.scale",
            {"3.scale": torch.ones(4)},
            r"the average of 3.scale is float32 \[4\], the weight is float32 \[4, 3\]",
        ),
    ):
        averages = {**{key: each for key, each in state.averages.items() if key != name}, **wrong}
        with pytest.raises(ForeignState, match=said):
            stage().restore(replace(state, averages=averages))


def test_weights_that_are_loaded_leave_averages_as_they_are_which_is_what_a_plain_loop_does() -> None:
    trained, (made, averaged) = stage(), plain(2)
    train(trained, range(2))
    given = {name: torch.zeros_like(tensor) for name, tensor in made.state_dict().items()}
    made.load_state_dict(given)
    trained.load_state_dict(given)
    assert same(trained.averages, {name: averaged.module.state_dict()[name] for name in trained.averages})
    trained.update()  # without gradients: the weights stay
    averaged.update_parameters(made)
    assert same(trained.averages, {name: averaged.module.state_dict()[name] for name in trained.averages})


def test_a_stage_without_averages_says_so() -> None:
    trained = stage(None)
    with pytest.raises(StageError, match="stage 0 keeps no averages of its weights: make it with ema_decay"):
        trained.state_dict(ema=True)
    with pytest.raises(StageError, match="stage 0 keeps no averages"):
        trained.evaluate(batch(0)[0], ema=True)
