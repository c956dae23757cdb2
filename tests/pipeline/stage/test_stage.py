"""A stage in a plain loop: what it computes equals the unsplit model to the bit, wherever the cut is."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.pipeline.errors import LossNotScalar, StageError
from stageline.pipeline.stage.layers.passage import layer_seed
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from support.towers import TwoTowers

pytestmark = pytest.mark.usefixtures("one_thread")


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def layers(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [
        nn.Linear(8, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    ]


def batch(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def unsplit(model: nn.Sequential, steps: int) -> dict[str, Tensor]:
    """The plain loop: one microbatch a step, each layer seeded."""
    optimizer = SGD(model.parameters())
    for step in range(steps):
        x, target = batch(step)
        for number, layer in enumerate(model):
            torch.default_generator.manual_seed(layer_seed(0, step, 0, number))
            x = layer(x)
        functional.cross_entropy(x, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_cut_anywhere_changes_no_bit(cut):
    # In-place layers come first in a stage here, and dropout on either side.
    wanted = unsplit(nn.Sequential(*layers()), steps=4)
    first = Stage(layers()[:cut], optimizer=SGD)
    last = Stage(layers()[cut:], index=1, first_layer=cut, optimizer=SGD, loss=functional.cross_entropy)
    for step in range(4):
        x, target = batch(step)
        y = first.forward(x, step=step)
        last.forward(y, target, step=step)
        first.backward(last.backward())
        first.update()
        last.update()
    found = {**first.state_dict(), **last.state_dict()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_stage_without_parameters_trains_nothing_and_passes_gradients():
    stage = Stage(nn.Tanh(), optimizer=SGD)
    x = torch.randn(2, 4, requires_grad=True)
    stage.forward(x)
    assert stage.optimizer is None
    wanted = torch.autograd.grad(torch.tanh(x), x, torch.ones(2, 4))[0]
    assert torch.equal(stage.backward(torch.ones(2, 4)), wanted)
    stage.update()


def test_trees_keep_their_shape_and_integers_carry_no_gradient():
    stage = Stage(TwoTowers())
    tower = torch.randn(2, 4, requires_grad=True)
    x = {"towers": (tower, torch.randn(2, 4)), "mask": torch.tensor([0, 1]), "flag": True, "none": None}
    y = stage.forward(x)
    assert y["flag"] is True
    assert torch.equal(y["mask"], x["mask"])
    gradient = stage.backward(
        {"towers": (torch.ones(2, 4), torch.ones(2, 4)), "mask": None, "flag": None, "none": None}
    )
    assert gradient["towers"][0].shape == (2, 4)
    assert gradient == {"towers": (gradient["towers"][0], None), "mask": None, "flag": None, "none": None}


def test_evaluation_leaves_its_input_alone():
    x = torch.tensor([-1.0, 1.0])
    Stage(nn.ReLU(inplace=True)).evaluate(x)
    assert torch.equal(x, torch.tensor([-1.0, 1.0]))


def test_an_empty_microbatch_passes_with_zero_gradients():
    stage = Stage(nn.Linear(4, 1), loss=functional.mse_loss)
    loss = stage.forward(torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 1))
    assert loss.isnan()
    assert stage.backward().shape == (0, 4)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in stage._body.parameters())


def test_evaluation_draws_no_dropout_and_keeps_no_graph():
    stage = Stage(nn.Dropout(0.9))
    x = torch.ones(3, 3)
    assert torch.equal(stage.evaluate(x), x)
    assert stage.in_flight == 0
    assert stage.forward(x).eq(0).any()


def test_a_loss_that_is_not_one_number_is_refused_with_its_shape():
    stage = Stage(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(LossNotScalar, match=r"float32 \[2\]"):
        stage.forward(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("recompute", [None, "stage", "layers"])
def test_a_loss_without_a_gradient_is_refused_as_backward_of_the_unsplit_model_refuses_it(recompute):
    stage = Stage(
        nn.Linear(4, 3),
        loss=lambda output, target: (output * 0).sum() if target else torch.ones(()),
        settings=StageSettings(recompute=recompute),
    )
    assert stage.forward(torch.zeros(2, 4), 1, microbatch=0) == 0
    with pytest.raises(StageError, match="the loss has no gradient"):
        stage.forward(torch.zeros(2, 4), 0, microbatch=1)


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_a_loss_may_use_parameters_of_its_own_stage_alone(recompute):
    """In a process of its own, the gradient of any other went nowhere, and its values were those of the beginning."""
    layer, other = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
    used = layer.weight

    def loss(output, target):
        return output.sub_(target).pow(2).mean() + used.pow(2).sum()  # writes to the output

    def trained(**settings):
        stage = Stage(layer, loss=loss, settings=StageSettings(recompute=recompute), **settings)
        stage.forward(torch.zeros(2, 4), torch.ones(2, 3))
        stage.backward()

    trained()
    used = other.detach().requires_grad_()  # no parameter: as a loss may make for a penalty of gradients
    trained()
    used = other
    with pytest.raises(StageError, match=r"a parameter, float32 \[3\], that is not of this stage.*detach"):
        trained()


def test_a_loss_that_is_a_parameter_of_another_stage_is_refused():
    other = nn.Parameter(torch.ones(()))
    stage = Stage(nn.Linear(4, 3), loss=lambda output, target: other)
    with pytest.raises(StageError, match=r"a parameter, float32 .*that is not of this stage"):
        stage.forward(torch.zeros(2, 4), torch.ones(2, 3))


def test_a_loss_of_one_number_in_any_shape_has_the_gradient_of_that_number():
    def gradient(loss):
        stage = Stage(nn.Linear(4, 3, bias=False), loss=loss)
        with torch.no_grad():
            for parameter in stage.trainable().values():
                parameter.fill_(0.5)
        stage.forward(torch.ones(2, 4), torch.ones(2, 3))
        stage.backward()
        return [parameter.grad for parameter in stage.trainable().values()]

    (flat,) = gradient(nn.functional.mse_loss)
    (shaped,) = gradient(lambda output, target: nn.functional.mse_loss(output, target).reshape(1, 1))
    assert torch.equal(flat, shaped)


def test_the_seed_of_a_layer_depends_on_its_place_alone():
    # The figures are the contract with every script that wants the same bits.
    assert layer_seed(0, 0, 0, 0) == 12803515573143611444
    assert layer_seed(1, 2, 3, 4) == 10246464913169517987


@pytest.mark.parametrize("stash_weights", [False, True])
def test_a_tap_is_given_what_each_layer_returns_before_the_next_may_write_to_it(stash_weights):
    """Layer 1 writes to what layer 0 returns."""
    stage = Stage(
        layers(),
        optimizer=SGD,
        loss=functional.cross_entropy,
        settings=StageSettings(names="abcdefg", stash_weights=stash_weights),
    )
    seen: list[tuple[str, Tensor]] = []
    x, target = batch(0)
    with stage.tapped(lambda layer, output: seen.append((layer, output.detach().clone()))):
        stage.forward(x, target)
    model = layers()
    for number, layer in enumerate(model):
        torch.default_generator.manual_seed(layer_seed(0, 0, 0, number))
        x = layer(x)
        assert seen[number][0] == "abcdefg"[number]
        assert torch.equal(seen[number][1], x)
    assert len(seen) == 7
    seen.clear()
    with stage.tapped(lambda layer, output: seen.append((layer, output))):
        stage.evaluate(batch(1)[0])
    assert [layer for layer, _ in seen] == list("abcdefg")
