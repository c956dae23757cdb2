"""Saves trained weights: one safetensors file for each stage, under the unsplit model's names."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stageline.pipeline.digest import TensorDigest, tensor_digests
from stageline.pipeline.stage.stage import Stage


def save_weights(stages: Mapping[int, Stage], folder: Path) -> dict[str, TensorDigest]:
    """Writes `stage-N.safetensors` for each stage into `folder`; returns the digests of what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    digests: dict[str, TensorDigest] = {}
    for index, stage in stages.items():
        state = {name: _own(tensor) for name, tensor in stage.state_dict().items()}
        save_file(state, folder / f"stage-{index}.safetensors")
        digests |= tensor_digests(state)
    return digests


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The whole model's state dict from a run's folder, under the unsplit model's names."""
    files = sorted(folder.glob("stage-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no stage-*.safetensors: has the run finished, on this machine?")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _own(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU: safetensors refuses tensors that share memory."""
    return tensor.detach().to("cpu", copy=True).contiguous().clone(memory_format=torch.contiguous_format)
