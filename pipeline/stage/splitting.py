"""Split of a stage's layers over the processes of a group, in place, with torch's own means.

tensor   a linear or embedding layer: each process has some of its columns ("colwise") or rows ("rowwise")
shard    every layer: each process has a part of each parameter, and gathers the others while it computes
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from stageline.pipeline.stage.draws import Styled


def split_by_styles(styled: Styled, mesh: DeviceMesh) -> None:
    """Split each module's weights over the processes of `mesh` by the module's style in `styled`.

    Styles are "colwise" and "rowwise". Raises `ValueError` for another one.
    """
    for module, style in styled.values():
        parallelize_module(module, mesh, _style(style))


def shard_layers(layers: Sequence[torch.nn.Module], mesh: DeviceMesh) -> None:
    """Split every parameter of each layer over the processes of `mesh`.

    A layer's parameters are gathered before its forward and its backward, and given back after each.
    """
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def _style(name: str) -> ParallelStyle:
    """Return torch's style of this name.

    The output of a layer with split columns stays split until a layer with split rows takes it, or the stage ends:
    torch follows it, and refuses what it cannot follow. A layer with split rows takes a whole input, too.
    """
    match name:
        case "colwise":
            return ColwiseParallel(use_local_output=False)
        case "rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case _:
            raise ValueError(f"{name!r} is no style")
