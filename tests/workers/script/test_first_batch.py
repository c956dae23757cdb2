"""A line of a model of one's own, whose layers are not listed: it begins with the first batch."""

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline import DataError, Line, LineClosed, ModelRefused, NoSuchRun, NotSaved, PlanRefused, traced
from stageline.workers.script.calls.example import NAME as EXAMPLE
from stageline.workers.script.calls.example import keep_example, kept_examples
from support.whole_models import ADAM, WholeModel, mean_loss, train_whole
from support.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


class MaskedNet(nn.Module):
    """Two inputs, a skip connection, dropout, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x).relu() * self.scale
        return self.last(x + self.drop(self.middle(x).relu())) * mask


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x if x.sum() > 0 else -x)


def compiled() -> nn.Module:
    """A model as its `compile()` leaves it, without the seconds that torch's compiler takes to be imported."""
    model = MaskedNet()
    model._compiled_call_impl = model._call_impl
    return model


def batch(generator: torch.Generator, rows: int = 8) -> tuple[dict[str, Tensor], Tensor]:
    inputs = {"x": torch.randn(rows, 4, generator=generator), "mask": torch.ones(rows, 1)}
    return inputs, torch.randint(3, (rows,), generator=generator)


WHOLE = WholeModel(MaskedNet, batch, ("", "middle", "drop", "last"), {})  # the first layer begins with the model
BATCHES = WHOLE.batches(STEPS)
X, Y = BATCHES[0]


def line(model: Any = None, **arguments: Any) -> Line:
    given = {"stages": 2, "loss": mean_loss, "optimizer": ADAM, "workers": "inline", "progress": False, **arguments}
    return Line(WHOLE.made() if model is None else model, **given)


def same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("cut", [["middle"], ["last"], ["middle", "drop", "last"]])
def test_it_trains_as_the_plain_loop_of_its_forward_does(cut: list[str]) -> None:
    state, losses = train_whole(WHOLE, STEPS, microbatches=2)
    with line(stages=None, cut=cut, microbatches=2) as trained:
        found = [trained.step(x, y).item() for x, y in BATCHES]
    assert found == losses
    assert same(trained.state_dict(), state)


@pytest.mark.slow
@pytest.mark.parametrize("made", [WHOLE.made, lambda: WHOLE.made], ids=["a module", "a function"])
def test_processes_are_started_with_the_first_batch_and_compute_the_same_bits(made: Any, workspace: Workspace) -> None:
    state, losses = train_whole(WHOLE, STEPS, microbatches=4)
    runs = workspace.folder / "runs"
    with line(made(), workers="processes", folder=runs) as trained:
        assert trained.position == 0
        assert not runs.exists()
        named = trained.folder
        found = [trained.step(x, y).item() for x, y in BATCHES]
        assert trained.folder == named
        assert [each.name for each in runs.iterdir()] == [named.name if named else ""]
    assert found == losses
    assert same(trained.state_dict(), state)


def test_the_model_that_a_function_returns_is_made_once_under_the_seed() -> None:
    made = []

    def make() -> nn.Module:
        made.append(MaskedNet())
        return made[-1]

    with line(make, seed=5) as trained:
        trained.step(X, Y)
        torch.manual_seed(5)
        assert not same(trained.state_dict(), MaskedNet().state_dict())
    again = line(make, seed=5)
    torch.manual_seed(5)
    assert same(again.state_dict(), MaskedNet().state_dict())
    assert len(made) == 2


@pytest.mark.slow
def test_the_first_batch_may_be_one_to_evaluate_or_to_predict_of_a_fit_or_of_several_in_a_step() -> None:
    with line() as first, line() as second, line() as third, line(accumulate=2, microbatches=1) as fourth:
        assert first.evaluate(BATCHES) == second.evaluate(BATCHES)
        assert third.predict(X).shape == (8, 3)
        assert fourth.step((X, BATCHES[1][0]), (Y, BATCHES[1][1])).item() is not None
        assert first.fit(BATCHES).steps == second.fit(iter(BATCHES)).steps == STEPS
    with line() as fresh:
        fresh.fit(BATCHES)
    assert same(fresh.state_dict(), first.state_dict())


def test_the_line_says_once_that_it_traces_and_where_it_cuts(capfd: pytest.CaptureFixture[str]) -> None:
    with line(progress=None) as trained:
        assert capfd.readouterr().err == ""
        for x, y in BATCHES:
            trained.step(x, y)
    told = capfd.readouterr().err
    assert told.count("\n") == 2
    for fact in (
        "stageline: tracing the MaskedNet",
        "stageline: traced the MaskedNet",
        "{x: float32 [2, 4], mask: float32 [2, 1]}",
        "4 layers, cut at middle",
    ):
        assert fact in told
    with line(progress=False) as silent:
        silent.step(X, Y)
    assert capfd.readouterr().err == ""


def test_before_the_first_batch_the_state_is_the_models_own_and_may_be_set() -> None:
    model, other = WHOLE.made(), MaskedNet()
    with line(model, ema_decay=0.9) as waiting:
        assert same(waiting.state_dict(), model.state_dict())
        assert same(waiting.state_dict(ema=True), model.state_dict())
        with pytest.raises(ModelRefused, match=r"middle\.weight is missing"):
            waiting.load_state_dict({name: each for name, each in other.state_dict().items() if "middle" not in name})
        waiting.load_state_dict(other.state_dict())
        assert same(waiting.state_dict(), other.state_dict())
        assert same(model.state_dict(), other.state_dict())
        waiting.predict(X)
        assert same(waiting.state_dict(), other.state_dict())


@pytest.mark.parametrize("workers", ["inline", "processes"])
def test_a_line_that_is_closed_without_a_batch_has_started_nothing(workers: str, folder: Path) -> None:
    model = WHOLE.made()
    with line(model, workers=workers) as waiting:
        assert "step 0" in repr(waiting)
        assert "begins with the first batch" in waiting._repr_html_()
        assert len(waiting.timetable().timed) == 2 * 2 * 4 + 2
        with pytest.raises(NotSaved):
            waiting.save(folder / "saved")
    assert same(waiting.state_dict(), model.state_dict())
    assert not list(folder.iterdir())
    with pytest.raises(LineClosed):
        waiting.step(X, Y)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"schedule": "1f1"}, 'did you mean "1f1b"'),
        ({"settings": {"recovery.leas": 3}}, 'did you mean "lease"'),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"placement": [[0], [1], [2]]}, "placement"),
        ({"settings": {"taps.layers": "x"}}, "taps"),
    ],
)
def test_an_argument_that_needs_no_layers_is_refused_when_the_line_is_made(arguments: Any, fact: str) -> None:
    with pytest.raises(PlanRefused, match=fact):
        line(**arguments)


@pytest.mark.parametrize("model", [MaskedNet, MaskedNet()], ids=["a function", "a module"])
def test_workers_on_other_machines_get_the_layers_from_a_function(model: Any) -> None:
    with pytest.raises(
        ModelRefused, match=r"type MaskedNet.*function that returns stageline.traced\(MaskedNet\(...\), example\)"
    ):
        line(model, workers="processes", broker="tcp://0.0.0.0:7000")


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        (nn.Bilinear(2, 2, 2).to("meta"), "weight has no values"),
        (nn.ModuleDict({"one": nn.LazyLinear(3)}), "one.weight has no shape"),
        (compiled(), "compiled"),
    ],
)
def test_a_model_that_no_batch_could_trace_is_refused_when_the_line_is_made(model: Any, fact: str) -> None:
    with pytest.raises(ModelRefused, match=fact):
        line(model)


@pytest.mark.parametrize(("cut", "fact"), [(["midle"], "no layer is named midle"), ([9], "9 is out of range")])
def test_a_wrong_cut_is_refused_at_the_first_batch_as_it_is_of_a_known_model(cut: Any, fact: str) -> None:
    with line(stages=None, cut=cut) as waiting:
        with pytest.raises(ModelRefused, match=fact) as refused:
            waiting.step(X, Y)
        assert str(refused.value).startswith("cut = ")
    with pytest.raises(ModelRefused, match=fact):
        line(traced(WHOLE.made(), X), stages=None, cut=cut)


@pytest.mark.parametrize("workers", ["inline", "processes"])
def test_a_model_that_cannot_be_traced_is_refused_at_the_first_batch_and_nothing_is_left(
    workers: str, folder: Path
) -> None:
    with (
        pytest.raises(ModelRefused, match=r"torch.export cannot trace the Branching.*stageline.Layers"),
        line(Branching(), workers=workers) as waiting,
    ):
        waiting.step(X["x"], Y)
    with pytest.raises(LineClosed):
        waiting.step(X["x"], Y)
    assert not list(folder.iterdir())


def test_after_a_batch_that_the_model_does_not_take_the_line_begins_with_another() -> None:
    with line() as trained:
        with pytest.raises(ModelRefused, match="the MaskedNet, called with it, raises RuntimeError: mat1"):
            trained.step({"x": torch.ones(8, 5), "mask": torch.ones(8, 1)}, Y)
        with pytest.raises(DataError):
            trained.step(X, Y[:7])
        assert trained.step(X, Y).item() is not None
        with pytest.raises(DataError, match="the model was traced with 4 there"):
            trained.step({"x": torch.ones(8, 5), "mask": torch.ones(8, 1)}, Y)
        assert trained.position == 1


def test_a_last_batch_of_an_epoch_with_few_rows_is_trained_and_few_rows_are_predicted() -> None:
    """By default there are 4 microbatches: one row each of three, and none in the fourth."""
    few = {name: each[:3] for name, each in X.items()}
    with line() as trained:
        assert trained.fit([(X, Y), (few, Y[:3])]).steps == 2
        assert trained.predict(few).shape == (3, 3)  # type: ignore[union-attr]


def test_a_first_batch_with_fewer_rows_than_microbatches_traces_nothing() -> None:
    few = {name: each[:3] for name, each in X.items()}
    with line(microbatches=4) as trained:
        with pytest.raises(DataError, match=r"3 rows, too few for 4 microbatches"):
            trained.step(few, Y[:3])
        trained.step(X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False], ids=["a saved folder", "a run"])
def test_a_resumed_line_goes_on_at_once_without_a_batch(saves: bool, workspace: Workspace) -> None:
    """It traces with the shapes that the run's folder has: its loader needs the position before the first batch."""
    state, losses = train_whole(WHOLE, STEPS, microbatches=2)
    given = {"workers": "processes", "folder": workspace.folder / "runs", "microbatches": 2}
    saved: Any = workspace.folder / "saved"
    with contextlib.suppress(KeyError), line(settings={"recovery.snapshot_every": 1}, **given) as first:
        first.step(*BATCHES[0])
        if saves:
            first.save(saved)
        else:
            saved = first.folder
        raise KeyError
    kept = json.loads((saved / EXAMPLE).read_text())
    assert kept["tensors"] == [["float32", [4, 4]], ["float32", [4, 1]]]
    arguments: Any = {"stages": 2, "loss": mean_loss, "optimizer": ADAM, "progress": False, "folder": given["folder"]}
    if not saves:
        arguments["settings"] = {"recovery.snapshot_every": 1}
    with Line.resume(saved, WHOLE.made(), **arguments) as resumed:
        assert resumed.position == 1
        found = [resumed.step(x, y).item() for x, y in BATCHES[1:]]
        assert resumed.folder is not None
        assert (resumed.folder / EXAMPLE).exists()
    assert found == losses[1:]
    assert same(resumed.state_dict(), state)


def test_a_resumed_line_tells_what_is_missing(folder: Path) -> None:
    arguments: Any = {"stages": 2, "loss": functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    with pytest.raises(NoSuchRun, match="there is no run of that name"):
        Line.resume("runs/other", MaskedNet(), **arguments)
    (folder / "runs" / "line-1").mkdir(parents=True)
    (folder / "runs" / "line-1" / "plan.json").write_text("{}")
    with pytest.raises(ModelRefused, match=r"example.json is missing.*stageline.traced\(MaskedNet\(...\), example\)"):
        Line.resume("line-1", MaskedNet(), **arguments)


def test_an_example_is_kept_without_its_values(tmp_path: Path) -> None:
    more = torch.full((2,), 0.5), [None, True, 3, "text"]
    given = {"ids": torch.full((2, 3), 77), "more": more, "on": torch.ones(2) > 0}
    keep_example(tmp_path, given)
    assert "77" not in (tmp_path / EXAMPLE).read_text()
    ones, zeros = kept_examples(tmp_path)
    assert torch.equal(ones["ids"], torch.ones(2, 3, dtype=torch.int64))  # type: ignore[index,call-overload]
    assert torch.equal(zeros["more"][0], torch.zeros(2))  # type: ignore[index,call-overload]
    assert ones["more"][1] == [None, True, 3, "text"]  # type: ignore[index,call-overload]
    assert ones["on"].dtype == torch.bool  # type: ignore[index,call-overload,union-attr]


@pytest.mark.parametrize("tensors", ["", "[]", '[["nix", [1]]]', '[["float32", [-1]]]'])
def test_a_damaged_example_is_none(tensors: str, tmp_path: Path) -> None:
    (tmp_path / EXAMPLE).write_text(f'{{"structure": [0], "tensors": {tensors}}}')
    assert kept_examples(tmp_path) == []
