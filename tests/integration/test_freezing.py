"""Frozen weights stay as they are, and others train as in the plain loop, to the bit, wherever the cuts are.

embed first | drop act | norm middle | later tail | end head         embed, first ...: layers; |: a cut
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stageline import Line, ModelRefused, traced
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.recording.replay import ReplayTarget, replay
from stageline.workers.process.in_process import run_memory
from stageline.workers.runs.folder import result_in
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer, Kill
from support.frozen.model import build, is_bad, loss
from support.redis_server import RedisServer
from support.whole_models import ADAM as WHOLE_ADAM
from support.whole_models import WHOLE_MODELS, mean_loss, train_whole
from support.workspace import Workspace

FOLDER = Path(reference.__file__).parent / "frozen"
CONFIG = FOLDER / "stageline.toml"
MICROBATCHES = 4
CUTS = ([2, 4, 6, 8], [1, 3, 4, 5, 6, 7, 8, 9], [5], [6], [9])
FROZEN = {  # what is trained, by what that leaves frozen
    "nothing": ("*",),
    "all but a layer in the middle": ("middle.*",),
    "all but the second half of a layer": ("middle.outer.*",),
    "all but the first layer": ("embed.*",),
    "all but the last layer": ("head.*",),
    "all but a norm's weight": ("norm.weight",),
    "all but one layer and biases": ("first.*", "*.bias"),
}
ADAM = partial(torch.optim.AdamW, lr=0.05)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def plain(trainable: Sequence[str]) -> reference.ReferenceResult:
    """Of the unsplit model with the same `requires_grad`."""
    recipe = reference.recipe(FOLDER, microbatches=MICROBATCHES)
    return reference.train(replace(recipe, build=partial(_frozen, recipe.build, trainable)))


def _frozen(make: Callable[[], Any], trainable: Sequence[str]) -> Any:
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trainable))
    return model


def _listed(values: Sequence[object]) -> str:
    return "[" + ", ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in values) + "]"


def _run(folder: Path, trainable: Sequence[str], cut: Sequence[int], *sets: str) -> dict[str, Any]:
    keys = [f"model.trainable={_listed(trainable)}", f"model.cut={_listed(cut)}", *sets]
    outcome = run_memory(prepare(read_plan(CONFIG, sets=keys, environment={})), "frozen", folder)
    assert outcome.code == 0, outcome.reason
    return outcome.facts


def _agrees(facts: dict[str, Any], wanted: reference.ReferenceResult) -> bool:
    losses = [facts["losses"][str(step)] for step in range(len(wanted.losses))]
    return (facts["weights_sha256"], losses) == (wanted.weights_sha256, wanted.losses)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("frozen", FROZEN)
def test_whatever_is_frozen_a_run_equals_the_plain_loop(frozen: str, cut: Sequence[int], tmp_path: Path) -> None:
    trainable = FROZEN[frozen]
    assert _agrees(_run(tmp_path / "run", trainable, cut), plain(trainable))


@pytest.mark.parametrize("frozen", ["all but the second half of a layer", "all but the first layer"])
@pytest.mark.parametrize("factory_freezes", [False, True])
def test_a_script_names_what_is_trained_or_sets_it_itself(frozen: str, *, factory_freezes: bool) -> None:
    trainable, recipe = FROZEN[frozen], reference.recipe(FOLDER)
    model, named = (partial(_frozen, build, trainable), None) if factory_freezes else (build, trainable)
    with _line(model, trainable=named, workers="inline") as line:
        losses = [line.step(*recipe.batch(step)).item() for step in range(recipe.steps)]
        state = line.state_dict()
    assert losses == plain(trainable).losses
    assert reference.weights_sha256(state) == plain(trainable).weights_sha256


def _line(model: Any, **options: Any) -> Line:
    return Line(model, cut=[2, 5], loss=loss, optimizer=ADAM, microbatches=MICROBATCHES, **options)


def test_a_script_is_told_of_its_argument() -> None:
    with pytest.raises(ModelRefused, match=r'^trainable: no parameter of the model matches "middel.\*". Parameters'):
        _line(build, trainable=["middel.*"])
    with pytest.raises(ModelRefused, match=r"^trainable = 'middle.\*': expected a list of patterns of names"):
        _line(build, trainable="middle.*")
    with pytest.raises(ModelRefused, match=r'^settings\["model.trainable"\]: the script needs it too. Pass trainable'):
        _line(build, settings={"model.trainable": ["middle.*"]})
    with pytest.raises(ModelRefused, match=r"there is nothing to train. Name some in trainable, or"):
        _line(partial(_frozen, build, ()))


@pytest.mark.parametrize(
    ("name", "trainable", "trace"),
    [
        ("bert", ("bert.encoder.layer.1.*", "bert.pooler.*"), False),
        ("gpt2 tied", ("transformer.wte.*",), False),
        ("gpt2 tied", ("transformer.h.1.*",), False),
        ("resnet18", ("layer3.*",), False),
        pytest.param("resnet18", ("layer3.*",), True, marks=pytest.mark.slow),
        pytest.param("llama", ("model.layers.1.*",), False, marks=pytest.mark.slow),
        pytest.param("vit", ("*.bias",), True, marks=pytest.mark.slow),
    ],
)
def test_parts_of_known_and_of_traced_models_are_frozen(name: str, trainable: Sequence[str], *, trace: bool) -> None:
    whole = replace(WHOLE_MODELS[name], build=partial(_frozen, WHOLE_MODELS[name].build, trainable))
    made = WHOLE_MODELS[name].made()
    if trace:
        layers = traced(made, whole.batches(1)[0][0])
        whole = replace(whole, seeded=("", *layers.names[1:]))
    cut = list(whole.cuts[3][1])
    options: Any = {"loss": mean_loss, "optimizer": WHOLE_ADAM, "microbatches": 1, "workers": "inline"}
    with Line(layers if trace else made, cut=cut, trainable=trainable, **options) as line:
        losses = [line.step(x, y).item() for x, y in whole.batches(2)]
        state = line.state_dict()
    wanted, wanted_losses = train_whole(whole, 2, 1)
    assert losses == wanted_losses
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def test_weights_that_are_read_from_files_are_frozen_too(tmp_path: Path) -> None:
    recipe = reference.recipe(FOLDER)
    save_file(plain(("*",)).state, tmp_path / "model.safetensors")
    first = build()
    first.load_state_dict(plain(("*",)).state)
    found = []
    for model, weights in ((first, None), (build, tmp_path)):
        with _line(model, weights=weights, trainable=["middle.outer.*"], workers="inline") as line:
            losses = [line.step(*recipe.batch(step)).item() for step in range(3)]
            found.append((losses, reference.weights_sha256(line.state_dict())))
    assert found[0] == found[1]


@pytest.mark.slow
def test_bad_microbatches_are_left_out_where_no_gradient_goes_back_to_the_first_stages(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = ("model.loss=model.py:picky", "recovery.on_bad_microbatch=skip", f"run.dir={tmp_path}")
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run", kills=(BELOW, TRAINED))
    recipe = replace(reference.recipe(FOLDER), build=partial(_frozen, build, ("middle.*",)), loss=_loss_of_the_good)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == reference.train(recipe).weights_sha256
    assert list((tmp_path / "run" / "skipped" / "stage-4").iterdir())


def _loss_of_the_good(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros((), requires_grad=True) if is_bad(targets) else loss(outputs, targets)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


BELOW, TRAINED, ABOVE = ("worker-0", 23), ("worker-2", 35), ("worker-4", 30)  # in the middle of a step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over_redis", "kills", "sets"),
    [
        (False, (BELOW, TRAINED, ABOVE), ()),
        pytest.param(True, (BELOW, TRAINED, ABOVE, ("broker", 60)), (), marks=pytest.mark.slow),
        pytest.param(False, (("worker-0", 39), ("worker-1", 3), ("broker", 40)), (), marks=pytest.mark.slow),
        pytest.param(False, (BELOW, TRAINED), ("queues.url=tcp://127.0.0.1:0",), marks=pytest.mark.slow),
    ],
    ids=["ipc", "Redis", "late", "tcp"],
)
def test_workers_with_frozen_and_with_trained_stages_are_killed(
    over_redis: bool, kills: Sequence[Kill], sets: Sequence[str], fork_server: ForkServer, request: Any, tmp_path: Path
) -> None:
    queues = [f"queues.url={request.getfixturevalue('redis').url}"] if over_redis else []
    outcome = fork_server.train(CONFIG, *queues, *sets, f"run.dir={tmp_path}", folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert _agrees(outcome["facts"], plain(("middle.*",)))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_scripts_worker_is_killed_whatever_of_its_stage_is_frozen(killed: int, workspace: Workspace) -> None:
    """Stage 0 runs forward only, stage 1 trains, stage 2 passes gradients on."""
    recipe, settings = reference.recipe(FOLDER), {"recovery.snapshot_every": 2}
    options: Any = {"trainable": ["middle.inner.*"], "settings": settings, "folder": workspace.folder / "runs"}
    with contextlib.chdir(workspace.folder), _line(build, **options) as line:
        found = []
        for step in range(recipe.steps):
            found.append(line.step(*recipe.batch(step)))
            if step == 4:
                found[-1].item()
                os.kill(workspace.worker(killed), signal.SIGKILL)
    wanted = plain(("middle.inner.*",))
    assert [loss.item() for loss in found] == wanted.losses
    assert reference.weights_sha256(line.state_dict()) == wanted.weights_sha256
    assert result_in(workspace.runs()[0]).restarts == 1


@pytest.mark.slow
def test_microbatches_of_frozen_and_of_trained_stages_can_be_run_again(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = ("recovery.record=all", f"run.dir={tmp_path}")
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run")
    assert outcome["code"] == 0, outcome["reason"]
    for stage in range(5):
        replayed = replay(tmp_path / "run", ReplayTarget(stage, 7, 2))
        assert replayed.reproduced
        assert replayed.outcomes[0].same
