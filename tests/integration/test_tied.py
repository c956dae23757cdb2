"""A parameter that three stages use trains as one, to the bit, whatever is killed, left out, evaluated or run again."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stageline import Layer, Layers, Line, ModelRefused, traced
from stageline.pipeline.plan import read_plan
from stageline.pipeline.program import Tied
from stageline.workers.extras.recording.replay import ReplayTarget, replay
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer, Kill
from support.redis_server import RedisServer
from support.tied.model import build, is_bad, loss
from support.tied_per_step import OwnWeights
from support.workspace import Workspace

FOLDER = Path(reference.__file__).parent / "tied"
CONFIG = FOLDER / "stageline.toml"
STEPS, MICROBATCHES, EVERY = 8, 4, 2
LOOPED = ("workers.0.stages=[0, 2]", "workers.1.stages=[1, 3]")
ADAM = partial(torch.optim.AdamW, lr=0.05)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def plain(tied: Tied = "microbatch", *, picky: bool = False) -> reference.ReferenceResult:
    """Of the unsplit model; per step, of one with a parameter for each stage. `picky` leaves bad microbatches out."""
    recipe = reference.recipe(FOLDER, steps=STEPS)
    if picky:
        recipe = replace(recipe, loss=_loss_of_the_good)
    return reference.train(recipe if tied == "microbatch" else _per_step(recipe))


def _loss_of_the_good(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros((), requires_grad=True) if is_bad(targets) else loss(outputs, targets)


def _per_step(recipe: reference.Recipe) -> reference.Recipe:
    own: list[OwnWeights] = []

    class AddingUp(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            own[0].add_up()
            return super().step(closure)

    def made() -> Any:
        model = recipe.build()
        own.append(OwnWeights([[model[0]], [model[3]], [model[5]]]))
        return model

    return replace(recipe, build=made, optimizer=partial(AddingUp, lr=0.05))


@pytest.mark.parametrize("tied", ["microbatch", "step"])
@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("schedule.name=zb-h1", *LOOPED),
    ],
    ids=["1f1b", "zb-h1 looped"],
)
def test_stages_that_share_a_parameter_train_as_the_plain_loop_does(
    tied: Tied, sets: tuple[str, ...], tmp_path: Path
) -> None:
    plan = read_plan(CONFIG, sets=[f"run.steps={STEPS}", f"schedule.tied={tied}", *sets], environment={})
    outcome = run_memory(prepare(plan), "tied", tmp_path / "run")
    assert outcome.facts["weights_sha256"] == plain(tied).weights_sha256
    assert plain("microbatch").weights_sha256 != plain("step").weights_sha256


class Wordy(nn.Module):
    """Two layers of it name one module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.between = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        return _head(self.between(self.embed(ids)), self.norm, self.embed)


def wordy() -> Wordy:
    torch.manual_seed(0)
    return Wordy()


def _head(x: Tensor, norm: nn.Module, embed: nn.Module) -> Tensor:
    return (norm(x) @ embed.weight.T).transpose(1, 2)


def _written(model: Wordy) -> Layers:
    return Layers(model, [Layer("embed"), Layer("between"), Layer(("norm", "embed"), _head)])


def _traced(model: Wordy) -> Layers:
    return traced(model, _batch(0)[0])


@pytest.mark.parametrize("layers_of", [_written, pytest.param(_traced, marks=pytest.mark.slow)])
def test_a_module_that_layers_of_two_stages_name_is_a_shared_one(layers_of: Callable[[Wordy], Layers]) -> None:
    model = wordy()
    with _line(layers_of(wordy()), cut=["norm"], workers="inline") as line:
        for step in range(3):
            line.step(*_batch(step))
    optimizer = ADAM(model.parameters())
    for step in range(3):
        for x, y in zip(*(each.tensor_split(MICROBATCHES) for each in _batch(step)), strict=True):
            (loss(model(x), y) * (1 / MICROBATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _same(line.state_dict(), model.state_dict())


def _line(model: Any = build, **options: Any) -> Line:
    return Line(model, **{"cut": [1, 3, 5], "loss": loss, "optimizer": ADAM, "microbatches": MICROBATCHES, **options})


def _batch(step: int) -> tuple[Tensor, Tensor]:
    return reference.recipe(FOLDER).batch(step)


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


OWNER, LAST_USER = ("worker-0", 16), ("worker-3", 34)  # in the middle of a step
BOTH = (("worker-0", 31), ("worker-3", 30))  # those that replaced them


@pytest.mark.parametrize(
    ("tied", "over_redis", "kills"),
    [
        pytest.param("microbatch", False, (OWNER, LAST_USER), marks=pytest.mark.slow),
        pytest.param("step", False, (OWNER, LAST_USER, ("broker", 60), *BOTH), marks=pytest.mark.slow),
        pytest.param("microbatch", True, (LAST_USER, OWNER, ("broker", 60), *BOTH), marks=pytest.mark.slow),
    ],
    ids=["per microbatch", "per step", "over Redis"],
)
def test_those_that_share_a_parameter_and_the_broker_are_killed_in_the_middle_of_a_step(
    tied: Tied, over_redis: bool, kills: list[Kill], fork_server: ForkServer, request: Any, tmp_path: Path
) -> None:
    queues = [f"queues.url={request.getfixturevalue('redis').url}"] if over_redis else []
    outcome = fork_server.train(
        CONFIG,
        *queues,
        f"run.steps={STEPS}",
        f"run.dir={tmp_path}",
        f"schedule.tied={tied}",
        folder=tmp_path / "run",
        kills=kills,
    )
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == plain(tied).weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["microbatch", pytest.param("step", marks=pytest.mark.slow)])
def test_a_microbatch_that_is_left_out_has_no_part_in_it_and_the_others_can_be_run_again(
    tied: Tied, fork_server: ForkServer, tmp_path: Path
) -> None:
    outcome = fork_server.train(
        CONFIG,
        f"run.steps={STEPS}",
        f"run.dir={tmp_path}",
        f"schedule.tied={tied}",
        f"recovery.snapshot_every={EVERY}",
        "recovery.record=all",
        "recovery.on_bad_microbatch=skip",
        "model.loss=model.py:picky",
        *LOOPED,
        folder=tmp_path / "run",
    )
    assert outcome["facts"]["weights_sha256"] == plain(tied, picky=True).weights_sha256
    skipped = {path.name for path in (tmp_path / "run" / "skipped" / "stage-3").iterdir()}
    assert skipped
    for stage in (0, 2, 3):
        for step in (STEPS - EVERY, STEPS - 1):
            for microbatch in range(MICROBATCHES):
                replayed = replay(tmp_path / "run", ReplayTarget(stage, step, microbatch))
                assert replayed.reproduced
                if f"{step}-{microbatch}" not in skipped:
                    assert [outcome.same for outcome in replayed.outcomes] == [True, True if stage else None]


def test_weights_that_a_file_has_under_one_name_are_found_by_all_stages_that_use_them(tmp_path: Path) -> None:
    """As `save_pretrained` writes them."""
    whole = build()
    once = {name: tensor for name, tensor in whole.state_dict().items() if name not in ("0.weight", "3.weight")}
    save_file(once, tmp_path / "model.safetensors")
    with _line(whole, workers="inline") as line, _line(weights=tmp_path, workers="inline") as read:
        for step in range(3):
            assert line.step(*_batch(step)).item() == read.step(*_batch(step)).item()
    assert _same(read.state_dict(), line.state_dict())


def test_a_script_evaluates_predicts_and_loads_what_it_has() -> None:
    x, y = _batch(STEPS)
    with _line(workers="inline") as line:
        line.step(*_batch(0))
        state, scores = line.state_dict(), line.predict(x)
        assert line.evaluate([(x, y)])["loss"] == pytest.approx(loss(scores, y).item())
        assert all(torch.equal(state[name], state["0.weight"]) for name in ("3.weight", "5.weight"))
        with pytest.raises(ModelRefused, match=r"3.weight and 0.weight differ, and are one parameter"):
            line.load_state_dict({**state, "3.weight": torch.zeros_like(state["3.weight"])})
        line.load_state_dict(state)
        assert torch.equal(line.predict(x), scores)


@pytest.mark.slow
def test_a_script_saves_and_goes_on_with_other_stages(workspace: Workspace) -> None:
    folder = workspace.folder
    options = {"folder": folder / "runs", "settings": {"recovery.snapshot_every": EVERY}}
    with contextlib.chdir(folder), _line(**options) as first:
        for step in range(STEPS // 2):
            first.step(*_batch(step))
        scores = first.predict(_batch(STEPS)[0])
        first.save(folder / "saved")
    with contextlib.chdir(folder), _line(resume=folder / "saved", cut=[4], **options) as again:
        assert torch.equal(again.predict(_batch(STEPS)[0]), scores)
        for step in range(again.position, STEPS):
            again.step(*_batch(step))
    assert _same(again.state_dict(), plain().state)
