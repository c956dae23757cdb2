"""How much memory stages take, for more time: a table of the plan. It changes no bit of what is trained."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from .key_types import Accepts, Recomputed, Unset
from .section import Section

Offloaded = Literal["activations", "weights", "optimizer"]


class MemoryPlan(Section):
    """What stages do not keep in memory while they do not use it."""

    recompute: Unset[Recomputed] = Field(
        default=None,
        description='What backward runs forward again instead of keeping its activations: each "stage" as one, or '
        "patterns of the names of layers and modules in them. Default: nothing.",
        examples=["stage", ["transformer.h.*.mlp"]],
    )
    offload: Annotated[
        tuple[Offloaded, ...],
        Accepts('a list of "activations", "weights", "optimizer"', names=get_args(Offloaded)),
    ] = Field(
        default=(),
        description="What lies in files of the run's folder while it is not used: activations between a microbatch's "
        "forward and its backward; weights, with their gradients and averages; what the optimizer keeps.",
        examples=[["activations"], ["activations", "weights", "optimizer"]],
    )
