"""Trained weights are one safetensors file for each stage, which anything can read."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stageline.pipeline.digest import tensor_digests, weights_sha256
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.workers.checkpoint.trained_weights import load_weights, save_weights


def stages() -> dict[int, Stage]:
    torch.manual_seed(1)
    tied = nn.Linear(3, 3)
    tied.register_buffer("view", tied.weight.detach()[1])
    convolution = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    return {0: Stage([convolution, nn.BatchNorm2d(4)]), 1: Stage(tied, index=1, first_layer=2)}


def test_the_whole_models_weights_come_back_to_the_bit(tmp_path):
    made = stages()
    digests = save_weights(made, tmp_path / "run")
    save_weights(made, tmp_path / "run")  # by a replacement that finishes again
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["stage-0.safetensors", "stage-1.safetensors"]
    wanted = made[0].state_dict() | made[1].state_dict()
    back = load_weights(str(tmp_path / "run"))
    assert back.keys() == wanted.keys() == digests.keys()
    assert all(torch.equal(back[name], wanted[name]) for name in wanted)
    assert weights_sha256(tensor_digests(back)) == weights_sha256(digests)


def test_the_files_can_be_used_without_stageline(tmp_path):
    made = stages()
    save_weights(made, tmp_path)
    plain = load_file(tmp_path / "stage-0.safetensors")
    assert all(torch.equal(plain[name], tensor) for name, tensor in made[0].state_dict().items())


def test_averages_are_beside_the_weights_where_a_stage_has_any(tmp_path):
    adam = torch.optim.AdamW
    frozen = Stage(nn.Linear(2, 2).requires_grad_(False), optimizer=adam, settings=StageSettings(ema_decay=0.5))
    trains = Stage(
        [nn.Linear(3, 3), nn.BatchNorm1d(3)],
        index=1,
        first_layer=1,
        optimizer=adam,
        settings=StageSettings(ema_decay=0.5),
    )
    for _ in range(2):
        trains.forward(torch.randn(4, 3))
        trains.backward(torch.ones(4, 3))
        trains.update()
    save_weights({0: frozen, 1: trains}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "stage-0.safetensors",
        "stage-1.safetensors",
        "averages-1.safetensors",
    }
    weights, averages = load_weights(tmp_path), load_weights(tmp_path, ema=True)
    wanted = frozen.state_dict() | trains.state_dict(ema=True)
    assert averages.keys() == weights.keys() == wanted.keys()
    assert all(torch.equal(averages[name], wanted[name]) for name in wanted)
    assert {name for name in weights if not torch.equal(weights[name], averages[name])} == set(trains.averages)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no stage-\*\.safetensors"):
        load_weights(tmp_path)
