"""torch.export finds the layers of any model that it can trace; tests/integration/test_traced.py has whole ones."""

import logging
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

from stageline import DataError, Line, ModelRefused, traced
from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.model.layered.layers import Layers
from support.whole_models import ADAM, WholeModel, mean_loss, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")


class Tangled(nn.Module):
    """Calls a module twice and another never, has state of its own, writes in place, and evaluates otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
        self.first = nn.Parameter(torch.randn(1, 8))
        self.register_buffer("scale", torch.full((8,), 1.5), persistent=False)
        self.drop, self.nothing = nn.Dropout(0.2), nn.Identity()
        self.one = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.frozen = nn.BatchNorm1d(8).eval()
        self.unused = nn.Linear(3, 3)
        self.relu = nn.ReLU(inplace=True)
        self.helper, self.head = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = self.fixed(x)
        x = self.nothing(self.drop(kept) * self.scale + x + self.first)
        skipped = self.one(x)
        x = self.frozen(self.drop(skipped)) + torch.arange(8, device=x.device)
        x = functional.linear(x, self.one[0].weight) + skipped
        written = self.relu(x)  # x, too
        return self.head(x) + self.helper(written) if self.training else self.head(x)


WHOLE = WholeModel(
    Tangled,
    lambda generator: (torch.randn(9, 8, generator=generator), torch.randint(3, (9,), generator=generator)),
    ("", "one.0", "one.1", "one.2", "frozen", "relu", "head", "helper"),  # the first begins with the model
    {},
)


@cache
def model_and_layers() -> tuple[Tangled, Layers]:
    model = WHOLE.made()
    return model, traced(model, torch.ones(2, 8))


def test_a_traced_model_trains_as_it_does_unsplit():
    """Its graphs do in training what it does there: a frozen BatchNorm is frozen, and in evaluation all are. Stages
    0 and 1 share a parameter."""
    (model, layers), (state, losses) = model_and_layers(), train_whole(WHOLE, 2, 4)
    untrained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Line(layers, cut=["frozen", "head"], loss=mean_loss, optimizer=ADAM, microbatches=4, workers="inline") as line:
        assert [line.step(x, y).item() for x, y in WHOLE.batches(2)] == losses
        scores = line.predict(torch.ones(8, 8))
    trained = line.state_dict()
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[key], value) for key, value in state.items())
    assert not torch.equal(untrained["one.1.running_mean"], state["one.1.running_mean"])
    assert torch.equal(untrained["frozen.running_mean"], state["frozen.running_mean"])
    plain = WHOLE.made().eval()
    plain.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(scores, torch.cat([plain(rows) for rows in torch.ones(4, 2, 8)]))


def test_the_layers_have_the_models_state_under_its_names():
    model, layers = model_and_layers()
    assert layers.names == ["nothing", "one.0", "one.1", "one.2", "frozen", "relu", "head", "helper"]
    (whole,) = cut_model(layers)
    assert whole.weight_names == model.state_dict().keys()
    assert {name for name, _ in whole.state} - model.state_dict().keys() == {"scale"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("drop", "the forward calls drop 2 times"),
        ("fixed.1", r"the forward calls fixed.1 in a context of its own, such as torch.no_grad\(\)"),
        ("unused", "the forward never calls unused"),
        ("head.weight", r'head.weight is in the layer head; traced\(..., within=\["head"\]\)'),
        ("hed", "no layer is named hed; layers have names such as head"),
    ],
)
def test_a_cut_where_no_layer_begins_is_refused_with_the_reason(name, reason):
    with pytest.raises(ModelRefused, match=reason):
        cut_model(model_and_layers()[1], [name])


def test_a_batch_of_another_shape_is_refused_by_the_line_and_by_the_first_layer():
    layers = model_and_layers()[1]
    with Line(layers, stages=2, loss=mean_loss, optimizer=ADAM, microbatches=1, workers="inline") as line:
        for call in (lambda x: line.step(x, x), line.predict, layers.bound[0]):
            with pytest.raises(DataError, match="the input has 7 in dimension 1"):
                call(torch.ones(2, 7))
        line.predict(torch.ones(2, 8))


class Deciding(nn.Module):
    """`odd` is what torch.export cannot have: a function of what the first layer gives."""

    def __init__(self, odd: object) -> None:
        super().__init__()
        self.first, self.last, self.odd = nn.Linear(2, 2), nn.Linear(2, 2), odd

    def forward(self, x: Tensor) -> object:
        return self.odd(self.last(self.first(x)))  # type: ignore[operator]


def decided(x: Tensor) -> Tensor:
    if x.abs().max() > 5:
        return x
    return -x


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (lambda x: x if x.sum() > 0 else -x, "cannot trace the Deciding: .*data-dependent.*stageline.Layers"),
        (decided, r"data-dependent.*\(/.*test_traced_layers.py, line \d+, in decided: if x.abs\(\).max\(\) > 5:\)"),
        (lambda x: x.missing, r"AttributeError: .*missing.* \(/.*test_traced_layers.py, line \d+, in <lambda>\)"),
        (lambda x: {"x": [object()]}, "returns an object of type object as its x.0; expected tensors"),
        (lambda x: object(), "returns an object of type object; expected tensors"),
    ],
    ids=range(5),
)
def test_a_model_that_cannot_be_traced_is_refused_with_the_reason(odd, reason, capfd):
    model = Deciding(odd)
    with pytest.raises(ModelRefused, match=reason):
        traced(model, torch.ones(2, 2))
    assert model.training
    assert not model.first._forward_pre_hooks
    assert "def forward" not in "".join(capfd.readouterr())


def test_a_batch_with_a_microbatch_of_one_row_is_refused_and_an_example_of_one_row_is_for_those() -> None:
    def odd(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x

    model, x = Deciding(odd).eval(), torch.randn(8, 2)
    options: dict[str, Any] = {"stages": 2, "loss": mean_loss, "optimizer": ADAM, "workers": "inline"}
    with torch.no_grad():
        pairs, ones = torch.cat([model(rows) for rows in x.split(2)]), torch.cat([model(row) for row in x.split(1)])
    with Line(traced(model, torch.ones(2, 2)), microbatches=4, **options) as line:
        five = x[:5]
        for call in (lambda: line.step(five, five), lambda: line.predict(five), lambda: line.evaluate([(five, five)])):
            with pytest.raises(DataError, match=r"the input has 1 row in a microbatch \(5 rows in 4 microbatches\)"):
                call()
        assert torch.equal(line.predict(x), pairs)
    with Line(traced(model, torch.ones(1, 2)), microbatches=8, **options) as line:
        assert torch.equal(line.predict(x), ones)


def test_microbatches_of_one_row_are_computed_where_they_have_the_models_bits() -> None:
    """The last batch of an epoch has often such a microbatch; a BatchNorm over rows takes none."""
    x = torch.randn(5, 2)
    options: dict[str, Any] = {"stages": 2, "loss": functional.mse_loss, "optimizer": ADAM, "workers": "inline"}
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.Linear(3, 2)).eval()
    with torch.no_grad():
        rows = torch.cat([model(part) for part in x.tensor_split(4)])
    with Line(traced(model, torch.randn(2, 2)), microbatches=4, **options) as line:
        assert torch.equal(line.predict(x), rows)
        line.step(x, x)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with (
        Line(traced(model, torch.randn(2, 2)), microbatches=4, **options) as line,
        pytest.raises(DataError, match=r"the input has 1 row in a microbatch \(5 rows in 4 microbatches\)"),
    ):
        line.step(x, x)


def test_an_example_that_does_not_fit_is_told_with_the_models_own_error_alone(capfd) -> None:
    model, said = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(2, 2)), KeptRecords()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(said)
    with pytest.raises(ModelRefused, match="does not fit: the Sequential, called with it, raises RuntimeError: mat1"):
        traced(model, torch.ones(2, 3))
    logger.removeHandler(said)
    assert (said.records, capfd.readouterr()) == ([], ("", ""))
    assert not logger.disabled
    assert not model[0].num_batches_tracked


class KeptRecords(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def times(factor: float) -> Any:
    return lambda module, given, output: output * factor


def test_a_hook_that_replaces_one_of_the_same_name_and_a_hook_of_all_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    former = model[0].register_forward_hook(times(2))
    layers = traced(model, torch.ones(2, 4))
    cut_model(layers)
    with (
        register_module_forward_hook(times(3)),
        pytest.raises(ModelRefused, match=r"times.*of all modules has been added"),
    ):
        cut_model(layers)
    former.remove()
    model[0].register_forward_hook(times(5))
    with pytest.raises(ModelRefused, match=r"the forward hook times.* of 0 has been added, removed or replaced"):
        cut_model(layers)


def test_a_hook_that_is_registered_after_tracing_is_refused_and_one_before_is_in_the_graph() -> None:
    model, x = Deciding(torch.tanh), torch.ones(2, 2)
    before = model.register_forward_hook(lambda module, given, output: output * 2)
    model.first.register_forward_pre_hook(lambda module, given: given[0] * 3)
    layers = traced(model, x)
    (whole,) = cut_model(layers)
    assert torch.equal(whole.stage().forward(x), model(x))
    after = model.last.register_forward_hook(lambda module, given, output: output * 2)
    with pytest.raises(
        ModelRefused, match=r"the forward hook .*lambda.* of last has been added, removed or replaced since"
    ):
        cut_model(layers)
    after.remove()
    cut_model(layers)
    before.remove()
    with pytest.raises(ModelRefused, match="of the model itself has been added, removed or replaced since"):
        cut_model(layers)


def test_a_model_without_a_module_that_is_called_once_has_no_layers():
    with pytest.raises(ModelRefused, match="calls none of its modules exactly once"):
        traced(nn.Flatten(), torch.ones(2, 2))
    with pytest.raises(ModelRefused, match="given an object of type int; expected a torch module"):
        traced(3, torch.ones(2, 2))  # type: ignore[arg-type]


def test_a_graph_makes_its_tensors_on_the_device_that_the_layer_is_moved_to():
    layers = traced(Deciding(lambda x: x + torch.arange(2, device=x.device) * torch.tensor(0.5)), torch.ones(2, 2))
    x: object = torch.ones(3, 2, device="meta")
    for layer in layers.bound:
        x = layer.to("meta")(x)
    assert isinstance(x, Tensor)
    assert (x.device.type, x.shape) == ("meta", (3, 2))


class Cache:
    """Keeps what it is given, as a decoder's cache of keys does."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def with_cache(x: Tensor) -> dict[str, Any]:
    return {"logits": x, "cache": Cache(x * 2), "more": (x.sum(1), Cache(x))}


@pytest.mark.parametrize("where", [{"stages": 1}, {"cut": ["last"]}])
def test_a_cache_in_the_output_is_left_out_of_a_dict_and_none_in_a_tuple_at_every_cut(where: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Deciding(with_cache), torch.randn(4, 2)
    wanted = model(x)

    def loss(output: Any, y: Tensor) -> Tensor:
        assert output.keys() == {"logits", "more"}
        assert output["more"][1] is None
        return mean_loss(output["logits"], y)

    options: dict[str, Any] = {"loss": loss, "optimizer": ADAM, "microbatches": 2, "workers": "inline"}
    with Line(traced(model, torch.ones(2, 2)), **where, **options) as line:
        scores: Any = line.predict(x)
        line.step(x, torch.tensor([0, 1, 1, 0]))
    assert scores.keys() == {"logits", "more"}
    assert torch.equal(scores["logits"], wanted["logits"])
    assert torch.equal(scores["more"][0], wanted["more"][0])
    assert scores["more"][1] is None


class Drawing(nn.Module):
    """A block that is pruned, and whose own pre-hook draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        prune.l1_unstructured(self.middle, "weight", 0.3)
        self.last.register_forward_pre_hook(lambda module, given: functional.dropout(given[0], 0.5, module.training))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@pytest.mark.filterwarnings("ignore:The tensor attribute self.model.middle.weight was assigned during export")
def test_a_pruned_module_and_a_pre_hook_that_draws_train_as_in_the_plain_loop() -> None:
    whole = WholeModel(Drawing, WHOLE.batch, ("", "middle", "last"), {})
    state, losses = train_whole(whole, 2, 4)
    layers = traced(whole.made(), torch.ones(2, 8))
    options: dict[str, Any] = {"loss": mean_loss, "optimizer": ADAM, "microbatches": 4, "workers": "inline"}
    with Line(layers, cut=["middle", "last"], **options) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(2)] == losses
    trained = line.state_dict()
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[key], value) for key, value in state.items())
