"""A script's stages with replicas train as a plain loop does that adds gradients in the same groups, to the bit."""

import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from stageline import Line, ModelRefused, PlanRefused
from support import reference, replica_loop

FOLDER = Path(reference.__file__).parent / "replicated"
ALL, TWO, THREE = ((0, 1, 2, 3, 4, 5, 6),), ((0, 2, 4, 6), (1, 3, 5)), ((0, 3, 6), (1, 4), (2, 5))
SHAPES = {
    "middle": ({"stage.1.replicas": 2}, (ALL, TWO, ALL)),
    "ends": ({"stage.0.replicas": 3, "stage.2.replicas": 2}, (THREE, ALL, TWO)),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def line_of(recipe: reference.Recipe, settings: Mapping[str, object], **more: object) -> Line:
    kept = {"lr_scheduler": recipe.lr_scheduler, "microbatches": recipe.microbatches, "seed": recipe.seed}
    return Line(
        recipe.build, cut=[2, 5], loss=recipe.loss, optimizer=recipe.optimizer, settings=settings, **kept, **more
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_an_inline_line_with_replicas_is_the_plain_loop_in_groups(shape: str) -> None:
    settings, groups = SHAPES[shape]
    recipe = reference.recipe(FOLDER)
    plain = replica_loop.train(recipe, (2, 5), groups)
    with line_of(recipe, settings, workers="inline") as line:
        losses = [line.step(*recipe.batch(step)).item() for step in range(recipe.steps)]
        held_out = line.evaluate([recipe.batch(7)])
    assert reference.weights_sha256(line.state_dict()) == plain.weights_sha256
    assert losses == plain.losses
    assert held_out["loss"] > 0


@pytest.mark.slow
def test_so_is_one_of_processes_whose_replica_is_killed_and_which_is_saved_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings, groups = SHAPES["middle"]
    recipe = reference.recipe(FOLDER)
    plain = replica_loop.train(recipe, (2, 5), groups)
    with line_of(recipe, settings) as line:
        assert line.step(*recipe.batch(0)).item() == plain.losses[0]
        newest = max(psutil.Process().children(recursive=True), key=lambda child: child.create_time())
        os.kill(newest.pid, signal.SIGKILL)
        assert line.step(*recipe.batch(1)).item() == plain.losses[1]
        line.save("kept")
    with Line.resume(
        "kept",
        recipe.build,
        cut=[2, 5],
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        lr_scheduler=recipe.lr_scheduler,
        microbatches=recipe.microbatches,
        seed=recipe.seed,
        settings=settings,
    ) as line:
        losses = [line.step(*recipe.batch(step)).item() for step in range(2, recipe.steps)]
    assert reference.weights_sha256(line.state_dict()) == plain.weights_sha256
    assert losses == plain.losses[2:]


def small(**more: object) -> Line:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    kept = {"cut": [1], "loss": torch.nn.functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    return Line(model, workers="inline", microbatches=2, **kept, **more)


def test_each_worker_may_have_a_device_of_its_own_and_a_list_of_another_length_is_refused() -> None:
    with small(device=["cpu", torch.device("cpu")]) as line:
        assert line.step(torch.ones(2, 2), torch.zeros(2, 2)).item() is not None
    with pytest.raises(ModelRefused, match=r"device = \['cpu'\]: there are 2 workers; .* a list with one for each"):
        small(device=["cpu"])
    with pytest.raises(PlanRefused, match=r"threads = \[1\]: expected a whole number"):  # one number for all workers
        small(threads=[1])
    with pytest.raises(ModelRefused, match='device = "meta": its tensors have no values'):
        small(device=["cpu", "meta"])


def test_a_script_starts_no_process_for_a_lost_replica() -> None:
    with pytest.raises(PlanRefused, match=r"stage\.1\.elastic = true: a script starts no process for a lost replica"):
        small(settings={"stage.1.replicas": 2, "stage.1.elastic": True})
