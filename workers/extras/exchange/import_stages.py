"""Cuts weights of other programs for a plan's stages: each machine then needs its own stages' files alone.

/data/gpt2/model.safetensors  ->  parts/stage-0.safetensors, parts/stage-1.safetensors, an index of them
"""

from pathlib import Path

import torch

from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.segment import Segment
from stageline.pipeline.plan import Plan

from .export import export_file, export_folder, write_index, write_tensors
from .foreign import is_readable_by_stages
from .stored_weights import StoredWeights

_MERGED = ".merged.safetensors"


def import_stages(weights: StoredWeights, source: Path, plan: Plan, target: Path) -> None:
    """Writes the folder `target`, from the `weights` at `source`, as a stage of `plan` reads them: by the names of the
    model or those that transformers has for it, and compared before anything is written. One stage is in memory at a
    time. Raises `ModelRefused`, `WeightsUnusable`, `OSError`."""

    def write(draft: Path) -> None:
        merged = draft / _MERGED
        if not is_readable_by_stages(source):
            export_file(weights, merged)
        segments = build_segments(_reading(plan, merged if merged.exists() else source))
        plan.resolved(len(segments))
        for part in segments:
            part.check()
        sizes: dict[str, int] = {}
        shards = {_file_of(part): _write(draft, part, sizes) for part in segments}
        write_index(draft, shards, sum(sizes.values()))
        merged.unlink(missing_ok=True)

    export_folder(target, write)


def _reading(plan: Plan, source: Path) -> Plan:
    """The plan whose stages all read `source`."""
    workers = tuple(each.model_copy(update={"weights": None}) for each in plan.workers)
    model = plan.model.model_copy(update={"weights": source.absolute()})
    return plan.model_copy(update={"model": model, "workers": workers})


def _write(folder: Path, part: Segment, sizes: dict[str, int]) -> list[str]:
    """Writes a stage's file, and the bytes of its entries into `sizes`; returns their names."""
    part.load()
    made: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in part.weights.items():
        shared = tensor.data_ptr() in made  # by another name of the same parameter
        tensors[name] = tensor.clone() if shared else tensor.contiguous()
        made[tensor.data_ptr()] = tensor
    write_tensors(folder / _file_of(part), tensors)
    sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}
    torch.nn.ModuleList(part.layers).to("meta")  # makes room for the next
    return list(tensors)


def _file_of(part: Segment) -> str:
    return f"stage-{part.index}.safetensors"
