"""Runs with two versions of the weights: those of the plain loop whose gradients are one update late, to the bit."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stageline import load_weights, read_plan
from stageline.pipeline.model_names import matches
from stageline.workers.extras.recording.replay import ReplayTarget, replay
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer
from support.frozen.model import is_bad, loss
from support.paths import EXAMPLES
from support.plain_loop import differing

STEPS, MICROBATCHES = 12, 4
MODE = ("schedule.name=2bw", "schedule.mode=async", f"schedule.microbatches={MICROBATCHES}")
SETS = (
    f"run.steps={STEPS}",
    *MODE,
    "model.cut=[3, 8]",
    "workers.0.stages=[0]",
    "workers.1.stages=[1]",
    "workers.2.stages=[2]",
    "recovery.restarts=5",
    "recovery.snapshot_every=3",
)
DIGITS = EXAMPLES / "digits" / "stageline.toml"
FROZEN = Path(reference.__file__).parent / "frozen" / "stageline.toml"
DECAY = 0.9

pytestmark = pytest.mark.usefixtures("one_thread")


def expected() -> str:
    recipe = reference.recipe(EXAMPLES / "digits", microbatches=MICROBATCHES, steps=STEPS)
    return reference.train_delayed(recipe).weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        {"worker-0": 70, "worker-2": 95},
        {},
        {"worker-1": 40},
        {"worker-2": 61},
    ],
    ids=str,
)
def test_killed_workers_come_to_the_weights_of_the_plain_loop(
    fork_server: ForkServer, tmp_path: Path, kills: dict[str, int]
) -> None:
    sets = (*SETS, f"run.dir={tmp_path}")
    outcome = fork_server.train(DIGITS, *sets, folder=tmp_path / "run", kills=tuple(kills.items()))
    assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == expected()
    assert outcome["facts"]["oddities"] == {}


@pytest.mark.slow
def test_what_killed_workers_kept_in_files_changes_no_bit(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = (*SETS, 'memory.offload=["activations", "optimizer"]', f"run.dir={tmp_path}")
    kills = (("worker-0", 70), ("worker-1", 82), ("worker-2", 95))
    outcome = fork_server.train(DIGITS, *sets, folder=tmp_path / "run", kills=kills)
    assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
    assert (outcome["orphans"], outcome["left"]) == ([], [])
    assert outcome["facts"]["weights_sha256"] == expected()


@pytest.mark.slow
def test_a_run_that_ended_goes_on_from_its_checkpoint(fork_server: ForkServer, tmp_path: Path) -> None:
    sets, folder = (*SETS, f"run.dir={tmp_path}"), tmp_path / "run"
    broken = (*sets, "recovery.restarts=1")
    ended = fork_server.train(DIGITS, *broken, folder=folder, kills=[("worker-1", 70), ("worker-1", 2)])
    assert ended["code"] == 1, ended["reason"]
    resumed = fork_server.train(DIGITS, *sets, folder=folder, resume=True)
    assert resumed["code"] == 0, resumed["reason"]
    assert resumed["facts"]["weights_sha256"] == expected()


@pytest.mark.slow
def test_microbatches_of_the_last_steps_have_their_bits_again(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = (*SETS, f"run.dir={tmp_path}", "recovery.record=all")
    outcome = fork_server.train(DIGITS, *sets, folder=tmp_path / "run", kills=(("worker-1", 80),))
    assert outcome["code"] == 0, outcome["reason"]
    for stage in range(3):
        for microbatch in range(MICROBATCHES):
            assert replay(tmp_path / "run", ReplayTarget(stage, STEPS - 2, microbatch)).reproduced


def plain(trained: Sequence[str] = ("*",), **changes: Any) -> reference.ReferenceResult:
    """Of the unsplit model of which this is trained."""
    recipe = reference.recipe(FROZEN.parent, microbatches=MICROBATCHES)
    return reference.train_delayed(replace(recipe, build=partial(frozen, recipe.build, trained), **changes))


def frozen(build: Any, trained: Sequence[str]) -> Any:
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(matches(name, trained))
    return model


def in_memory(folder: Path, trained: Sequence[str], *sets: str) -> dict[str, Any]:
    """The facts of a run on four stages."""
    patterns = ", ".join(f'"{pattern}"' for pattern in trained)
    keys = ["model.cut=[2, 5, 8]", f"model.trainable=[{patterns}]", *MODE, *sets]
    outcome = run_memory(prepare(read_plan(FROZEN, sets=keys, environment={})), "2bw", folder)
    assert outcome.code == 0, outcome.reason
    return outcome.facts


@pytest.mark.slow
def test_averages_are_those_of_the_newest_weights(fork_server: ForkServer, tmp_path: Path) -> None:
    averages: dict[str, Tensor] = {}

    def optimizer(make: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        held = nn.ParameterList(parameters)
        averaged = AveragedModel(held, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        made: torch.optim.Optimizer = make(parameters)
        made.register_step_post_hook(lambda *_: averaged.update_parameters(held))
        averages.update(zip((str(k) for k in range(len(parameters))), averaged.module.parameters(), strict=True))
        return made

    recipe = reference.recipe(FROZEN.parent, microbatches=MICROBATCHES)
    wanted = plain(optimizer=partial(optimizer, recipe.optimizer))
    names = [name for name, _ in recipe.build().named_parameters()]  # type: ignore[union-attr]
    found = in_memory(tmp_path / "run", ("*",), f"optimizer.ema_decay={DECAY}")
    assert found["weights_sha256"] == wanted.weights_sha256
    sets = (*MODE, "model.cut=[2, 5, 8]", 'model.trainable=["*"]', f"optimizer.ema_decay={DECAY}")
    folder, kills = tmp_path / "killed", (("worker-1", 30), ("worker-3", 41))
    outcome = fork_server.train(FROZEN, *sets, f"run.dir={tmp_path}", folder=folder, kills=kills)
    assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
    stored = load_weights(folder, ema=True)
    assert not differing({name: stored[name] for name in names}, dict(zip(names, averages.values(), strict=True)))


def loss_of_the_good(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros((), requires_grad=True) if is_bad(targets) else loss(outputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(), (("worker-0", 23), ("worker-2", 35), ("worker-3", 30))], ids=["whole", "killed"])
def test_bad_microbatches_are_left_out_of_the_sum(
    kills: Sequence[tuple[str, int]], fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = (*MODE, "model.cut=[2, 5, 8]", 'model.trainable=["*"]', "model.loss=model.py:picky")
    skipping = ("recovery.on_bad_microbatch=skip", f"run.dir={tmp_path}")
    outcome = fork_server.train(FROZEN, *sets, *skipping, folder=tmp_path / "run", kills=kills)
    assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == plain(loss=loss_of_the_good).weights_sha256
    assert list((tmp_path / "run" / "skipped" / "stage-3").iterdir())


@pytest.mark.slow
def test_tapped_layers_leave_the_same_files_though_workers_are_killed(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = (*MODE, "model.cut=[2, 5, 8]", 'taps.layers=["*"]', "taps.every=1")
    found = []
    for name, kills in (("whole", ()), ("killed", (("worker-0", 23), ("worker-2", 35)))):
        folder = tmp_path / name
        outcome = fork_server.train(FROZEN, *sets, f"run.dir={folder}", folder=folder / "run", kills=kills)
        assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
        paths = [path for path in (folder / "run" / "taps").rglob("*") if path.is_file()]
        found.append({path.relative_to(folder): path.read_bytes() for path in paths})
    assert len(found[0]) > STEPS
    assert found[0] == found[1]
