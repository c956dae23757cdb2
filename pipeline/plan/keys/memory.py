"""How much memory workers take, for more time: a table of the plan. It changes no bit of what is trained."""

from pydantic import Field

from .key_types import Offloaded, Recomputed, Size, Unset, Workers
from .section import Section


class MemoryPlan(Section):
    """How much workers may take; or what stages do not keep in memory while they do not use it."""

    limit: Unset[Size] = Field(
        default=None,
        description="What the process of each worker may take beyond its program, in bytes. What stages recompute and "
        "offload is chosen so that none takes more, as far as other keys do not say it.",
        examples=["2GiB"],
    )
    tight: Unset[Workers] = Field(
        default=None,
        description="The workers whose limit is tight: each gives memory of 1 MiB and more back to the system as soon "
        "as it is freed, and goes on only when its snapshot is written, which takes time. Default: chosen; those whose "
        "limit has no room to spare.",
        examples=[[1], []],
    )
    recompute: Unset[Recomputed] = Field(
        default=None,
        description='What backward runs forward again instead of keeping its activations: each "stage" as one, all '
        '"layers" one by one, or patterns of the names of layers and modules in them. Default: nothing.',
        examples=["stage", ["transformer.h.*.mlp"]],
    )
    offload: Unset[Offloaded] = Field(
        default=None,
        description="What lies in files of the run's folder while it is not used: activations between a microbatch's "
        "forward and its backward; weights, with their gradients and averages; what the optimizer keeps. "
        "Default: nothing.",
        examples=[["activations"], ["activations", "weights", "optimizer"]],
    )
