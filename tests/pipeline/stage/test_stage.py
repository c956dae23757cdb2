"""A stage by hand: what it computes equals the unsplit model to the bit, wherever the cut is."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.pipeline.errors import GradientMismatch, LossNotScalar, StageError
from stageline.pipeline.stage.seeding import layer_seed
from stageline.pipeline.stage.stage import Stage

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


def test_microbatches_in_flight_go_backward_in_any_order():
    stage = Stage(nn.Linear(4, 4))
    x = [torch.randn(2, 4, requires_grad=True) for _ in range(3)]
    y = [stage.forward(each) for each in x]
    assert stage.in_flight == 3
    gradients = {m: stage.backward(torch.ones_like(y[m]), step=0, microbatch=m) for m in (1, 0, 2)}
    assert stage.in_flight == 0
    assert all(gradients[m].shape == x[m].shape for m in gradients)


def test_the_seed_of_a_layer_depends_on_its_place_alone():
    # The figures are the contract with every script that wants the same bits.
    assert layer_seed(0, 0, 0, 0) == 12803515573143611444
    assert layer_seed(1, 2, 3, 4) == 10246464913169517987


def test_the_gradient_of_the_cut_layers_weight_is_refused_and_the_right_one_named():
    stage = Stage(nn.Linear(64, 128), index=0)
    stage.forward(torch.randn(512, 64))
    with pytest.raises(GradientMismatch) as refusal:
        stage.backward(torch.randn(64, 128))
    text = str(refusal.value)
    assert "[64, 128]" in text
    assert "[512, 128]" in text
    assert "with respect to the activation" in text


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2), (torch.zeros(2, 3),), {"y": torch.zeros(2, 3)}, 1.0],
    ids=["dtype", "shape", "tuple", "dict", "number"],
)
def test_a_gradient_that_does_not_match_the_activation_is_refused(gradient):
    stage = Stage(nn.Linear(4, 3))
    stage.forward(torch.zeros(2, 4))
    with pytest.raises(GradientMismatch):
        stage.backward(gradient)


def test_backward_without_a_gradient_is_for_a_loss_alone():
    stage = Stage(nn.Linear(4, 3))
    stage.forward(torch.zeros(2, 4))
    with pytest.raises(GradientMismatch, match="not a loss"):
        stage.backward()


def test_backward_without_a_forward_says_so():
    with pytest.raises(StageError, match="call forward first"):
        Stage(nn.Linear(4, 3), index=2).backward()


def test_the_same_microbatch_twice_in_flight_is_refused():
    stage = Stage(nn.Linear(4, 3))
    stage.forward(torch.zeros(2, 4), step=3, microbatch=1)
    with pytest.raises(StageError, match="microbatch 1 of step 3"):
        stage.forward(torch.zeros(2, 4), step=3, microbatch=1)


def test_a_loss_that_is_not_one_number_is_refused_with_its_shape():
    stage = Stage(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(LossNotScalar, match=r"float32 \[2\]"):
        stage.forward(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


def test_a_stage_without_parameters_trains_nothing_and_passes_gradients():
    stage = Stage(nn.Tanh(), optimizer=SGD)
    x = torch.randn(2, 4, requires_grad=True)
    stage.forward(x)
    assert stage.optimizer is None
    wanted = torch.autograd.grad(torch.tanh(x), x, torch.ones(2, 4))[0]
    assert torch.equal(stage.backward(torch.ones(2, 4)), wanted)
    stage.update()


class TwoTowers(nn.Module):
    """Takes and gives a tree: a mask and a flag travel along, two activations carry gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: dict) -> dict:
        a, b = x["towers"]
        return {"towers": (self.left(a), self.right(b)), "mask": x["mask"], "flag": x["flag"], "none": None}


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


def test_an_output_that_nobody_used_gets_no_gradient():
    stage = Stage(TwoTowers())
    x = {"towers": (torch.randn(2, 4, requires_grad=True),) * 2, "mask": None, "flag": None}
    stage.forward(x)
    stage.backward({"towers": (None, torch.ones(2, 4)), "mask": None, "flag": None, "none": None})
    weights = stage.state_dict()
    parameters = dict(stage._body.named_parameters())
    assert weights.keys() == {"0.left.weight", "0.left.bias", "0.right.weight", "0.right.bias"}
    assert parameters["0.left.weight"].grad is None
    assert parameters["0.right.weight"].grad is not None


class Aliasing(nn.Module):
    """Gives back its input, a view of it, its parameter and its buffer: none may be sent as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x[:, 1:], self.weight, self.kept


def test_what_shares_memory_with_weights_or_input_is_copied_before_it_is_sent():
    module, x = Aliasing(), torch.randn(2, 3, requires_grad=True)
    sent = Stage(module).forward(x)
    kept = [t.detach().clone() for t in sent]
    with torch.no_grad():
        for tensor in (x, module.weight, module.kept):
            tensor.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(sent, kept, strict=True))


def test_a_hook_that_writes_to_the_gradient_of_the_loss_changes_one_microbatch_alone():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = (output - target).square().mean()
        value.register_hook(lambda gradient: gradient.mul_(2))
        return value

    layer = nn.Linear(3, 1)
    stage = Stage(layer, loss=loss)
    gradients = []
    for microbatch in range(3):
        stage.forward(torch.ones(2, 3), torch.zeros(2, 1), microbatch=microbatch, share=0.5)
        stage.backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(gradients[1], 2 * gradients[0])
    assert torch.equal(gradients[2], 3 * gradients[0])


@pytest.mark.parametrize("twice", [lambda h: (h, h), lambda h: {"h": h, "head": h[:, :2]}], ids=["same", "slice"])
def test_memory_that_would_be_sent_twice_is_refused(twice):
    # They would arrive apart: an in-place layer would write to one alone, and gradients be added in another order.
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x * 2)

    with pytest.raises(StageError, match="returns the same memory twice"):
        Stage(Twice()).forward(torch.randn(3, 4, requires_grad=True))


def test_parts_of_one_tensor_that_do_not_overlap_may_be_sent():
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x * 2).chunk(2, dim=1)

    assert len(Stage(Parts()).forward(torch.randn(3, 4))) == 2


def test_outputs_whose_names_look_alike_get_their_own_gradients():
    class Alike(nn.Module):
        def forward(self, x: Tensor) -> dict:
            return {"a.b": x * 2, "a": {"b": x * 3}, "['a']": {"b": x * 5}}

    stage, one = Stage(Alike()), torch.ones(2)
    stage.forward(torch.zeros(2, requires_grad=True))
    gradient = stage.backward({"a.b": one, "a": {"b": 10 * one}, "['a']": {"b": 100 * one}})
    assert torch.equal(gradient, torch.full((2,), 532.0))


def test_evaluation_leaves_its_input_alone():
    x = torch.tensor([-1.0, 1.0])
    Stage(nn.ReLU(inplace=True)).evaluate(x)
    assert torch.equal(x, torch.tensor([-1.0, 1.0]))


def test_an_input_that_is_not_handed_over_is_never_written_to():
    x = torch.tensor([-1.0, 1.0])
    Stage(nn.ReLU(inplace=True)).forward(x)
    assert torch.equal(x, torch.tensor([-1.0, 1.0]))


def test_expanded_and_channels_last_inputs_keep_their_layout():
    seen: list[tuple[int, ...]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.stride())
            return x * 2

    expanded = torch.randn(1, 4).expand(3, 4)
    permuted = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    stage = Stage(Look())
    for x in (expanded, permuted):
        stage.forward(x)
    assert seen == [expanded.stride(), permuted.stride()]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_gradient_keeps_the_layout_in_which_it_arrives(cut):
    # A leaf's .grad is laid out anew in the leaf's strides; SiLU's backward takes another path then, with other bits.
    class Transpose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    def model() -> list[nn.Module]:
        torch.manual_seed(3)
        return [nn.Linear(5, 7), nn.SiLU(), Transpose(), nn.Linear(9, 3)]

    x, target = torch.randn(4, 9, 5), torch.randn(4, 7, 3)
    whole = nn.Sequential(*model())
    functional.mse_loss(whole(x), target).backward()
    front = Stage(model()[:cut])
    back = Stage(model()[cut:], index=1, first_layer=cut, loss=functional.mse_loss)
    back.forward(front.forward(x), target)
    front.backward(back.backward())
    gradients = [p.grad for stage in (front, back) for p in stage._body.parameters()]
    assert all(torch.equal(p.grad, g) for p, g in zip(whole.parameters(), gradients, strict=True))


def test_a_cut_after_a_chunk_keeps_the_gaps_in_memory():
    seen: list[tuple[int, ...]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.stride())
            return x * 2

    half = torch.randn(4, 6, 5).chunk(2, dim=1)[0]
    Stage(Look()).forward(half)
    assert seen == [half.stride()]


def test_an_empty_microbatch_passes_with_zero_gradients():
    stage = Stage(nn.Linear(4, 1), loss=functional.mse_loss)
    loss = stage.forward(torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 1))
    assert loss.isnan()
    assert stage.backward().shape == (0, 4)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in stage._body.parameters())


def test_backward_uses_the_weights_that_forward_used():
    # PipeDream's weight stashing: two forwards, an update between their backwards.
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(module)
    stage = Stage(module, optimizer=partial(torch.optim.SGD, lr=1.0), stash_weights=True)
    x = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    g = torch.randn(2, 4)
    for step, each in enumerate(x):
        stage.forward(each, step=step, microbatch=0)
    got = []
    for step in range(2):
        got.append(stage.backward(g, step=step, microbatch=0))
        stage.update()
    for each, gradient in zip(x, got, strict=True):
        assert torch.equal(torch.autograd.grad(reference(each), each, g)[0], gradient)
    for p, q in zip(reference.parameters(), module.parameters(), strict=True):
        first, second = (torch.autograd.grad(reference(each), p, g)[0] for each in x)
        assert torch.equal(p - first - second, q)


def test_evaluation_draws_no_dropout_and_keeps_no_graph():
    stage = Stage(nn.Dropout(0.9))
    x = torch.ones(3, 3)
    assert torch.equal(stage.evaluate(x), x)
    assert stage.in_flight == 0
    assert stage.forward(x).eq(0).any()


def test_state_goes_out_and_in_under_the_unsplit_models_names():
    stage, other = (Stage(layers(seed)[3:], first_layer=3) for seed in (1, 2))
    other.load_state_dict({name: value.clone() for name, value in stage.state_dict().items()})
    assert list(stage.state_dict()) == ["3.weight", "3.bias", "6.weight", "6.bias"]
    assert all(torch.equal(other.state_dict()[name], value) for name, value in stage.state_dict().items())
