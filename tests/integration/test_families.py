"""Models that are no nn.Sequential train as plain `model(**inputs)` does, to the bit, wherever they are cut."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import Line
from stageline.pipeline.schedule import Placement
from stageline.workers.runs.folder import result_in
from support.reference import weights_sha256
from support.shapes import looped
from support.whole_models import ADAM, WHOLE_MODELS, WholeModel, gpt2, logits_of, mean_loss, split, train_whole
from support.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MICROBATCHES = 2, 4
PLACEMENTS = {2: looped(1, 2), 3: looped(1, 3), 4: looped(2, 2)}  # for interleaving
FAMILIES = ("gpt2", "gpt2 tied", "llama", "bert", "layoutlm", "vit", "resnet18")
DECIDING = ("resnet18", "u-net")  # transformers takes seconds to import


@cache
def reference(name: str, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    return train_whole(WHOLE_MODELS[name], steps, MICROBATCHES)


def cases() -> Iterator[Any]:
    for name, whole in WHOLE_MODELS.items():
        for stages, cuts in whole.cuts.items():
            for cut in cuts:
                for schedule, placement in (("1f1b", None), ("interleaved-1f1b", PLACEMENTS[stages])):
                    deciding = stages == 4 and cut is cuts[0] and placement and name in DECIDING
                    marks = () if deciding else pytest.mark.slow
                    yield pytest.param(name, cut, schedule, placement, marks=marks, id=f"{name}-{cut}-{schedule}")


@pytest.mark.parametrize(("name", "cut", "schedule", "placement"), list(cases()))
def test_a_model_trains_as_it_does_unsplit(
    name: str, cut: list[int | str], schedule: str, placement: Placement | None
) -> None:
    whole, (state, losses) = WHOLE_MODELS[name], reference(name)
    with Line(
        whole.layers(whole.made()),
        cut=cut,
        placement=placement,
        schedule=schedule,
        loss=mean_loss,
        optimizer=ADAM,
        microbatches=MICROBATCHES,
        workers="inline",
    ) as line:
        found = [line.step(x, y).item() for x, y in whole.batches(STEPS)]
    trained = line.state_dict()
    assert found == losses
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[key], value) for key, value in state.items())


@pytest.mark.slow
def test_a_folder_that_save_pretrained_wrote_has_the_tied_matrix_once_and_both_stages_find_it(tmp_path: Path) -> None:
    whole = WHOLE_MODELS["gpt2 tied"]
    whole.made().save_pretrained(tmp_path)
    options = {"cut": [2], "loss": mean_loss, "optimizer": ADAM, "microbatches": MICROBATCHES, "workers": "inline"}
    with Line(gpt2, weights=tmp_path, **options) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(STEPS)] == reference("gpt2 tied")[1]


@pytest.mark.slow
def test_blocks_whose_activations_are_computed_twice_give_the_same_bits() -> None:
    """Also what they draw: dropout is the same the second time. Such blocks have no cache."""

    def checkpointed() -> Any:
        model = gpt2(tie_word_embeddings=False)
        model.activation_checkpointing_enable()
        return model

    whole = replace(WHOLE_MODELS["gpt2"], build=checkpointed)
    state, losses = train_whole(whole, STEPS, MICROBATCHES)
    with Line(
        whole.made(), cut=[2], loss=mean_loss, optimizer=ADAM, microbatches=MICROBATCHES, workers="inline"
    ) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(STEPS)] == losses
    assert all(torch.equal(line.state_dict()[key], value) for key, value in state.items())


PLAN = """
[run]
steps = 3
[model]
factory = "model.py:build"
cut = ["down2", "up2"]
loss = "support.whole_models.mean_loss"
metrics = ["support.whole_models.mean_loss"]
[data]
source = "model.py:Masks"
batch_size = 5
[schedule]
microbatches = 4
[optimizer]
factory = "support.whole_models.ADAM"
"""
MODEL = """
from support.whole_models import WHOLE_MODELS

whole = WHOLE_MODELS["u-net"]
build = lambda: whole.layers(whole.made())

class Masks:
    steps_per_epoch = 3
    def __init__(self, batch_size, seed): pass
    def batch(self, step): return whole.batches(step + 1)[step]
    def held_out(self): return whole.batches(9)[8]
"""


@pytest.mark.slow
def test_a_plan_trains_layers_that_its_factory_returns_and_says_what_crosses_each_cut(workspace: Workspace) -> None:
    workspace.write("stageline.toml", PLAN)
    workspace.write("model.py", MODEL)
    ended = workspace.command("train", ".", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["weights_sha256"] == weights_sha256(reference("u-net", 3)[0])
    planned = json.loads(workspace.command("plan", ".", "--json").stdout)
    assert [stage["layers"] for stage in planned["stages"]] == [["down1"], ["down2", "middle"], ["up2", "up1", "head"]]
    rows = 2  # of the first microbatch; into stage 2 go 4 x 8 x 8 and 8 x 4 x 4 of skips, and 8 x 2 x 2 of the middle
    numbers = rows * (4 * 8 * 8 + 8 * 4 * 4 + 8 * 2 * 2)
    (message,) = [queue["message"] for queue in planned["queues"] if queue["queue"] == "forward-2"]
    assert 4 * numbers < message < 4 * numbers + 1000  # with the header


@pytest.mark.slow
@pytest.mark.parametrize("name", ["u-net", *FAMILIES])
def test_a_worker_that_is_killed_changes_no_bit(name: str, workspace: Workspace) -> None:
    whole, (state, losses) = WHOLE_MODELS[name], reference(name, 6)
    with (
        contextlib.chdir(workspace.folder),
        Line(
            whole.layers(whole.made()),
            cut=whole.cuts[2][0],
            folder=workspace.folder / "runs",
            loss=mean_loss,
            optimizer=ADAM,
            microbatches=MICROBATCHES,
            settings={"recovery.snapshot_every": 2},
        ) as line,
    ):
        found = []
        for step, (x, y) in enumerate(whole.batches(6)):
            found.append(line.step(x, y))
            if step == 3:
                found[-1].item()
                os.kill(workspace.worker(1), signal.SIGKILL)
        scores = line.predict(x)
    trained = line.state_dict()
    assert [loss.item() for loss in found] == losses
    assert all(torch.equal(trained[key], value) for key, value in state.items())
    assert torch.equal(scores, evaluated(whole, trained, x))
    assert result_in(workspace.runs()[0]).restarts == 1


def evaluated(whole: WholeModel, state: dict[str, torch.Tensor], inputs: Any) -> torch.Tensor:
    """Outputs of the unsplit model in evaluation mode, microbatch by microbatch."""
    model = whole.made().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return torch.cat([logits_of(model, part) for part in split(inputs, MICROBATCHES)])


def test_dropout_moves_the_bits_of_the_reference() -> None:
    """So layers that were seeded otherwise would not give them."""
    state, _ = train_whole(WHOLE_MODELS["u-net"], STEPS, MICROBATCHES, seed=1)
    assert not all(torch.equal(reference("u-net")[0][key], value) for key, value in state.items())
