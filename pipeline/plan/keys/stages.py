"""How one stage is computed: the tables `stage.0`, `stage.1`, ... of a plan."""

from typing import Annotated

from pydantic import Field

from .key_types import Accepts, Offloaded, RecomputedOfStage, Styles, Truth, Unset, whole
from .section import Section

# A typing error shall not make a billion stages, replicas or processes.
MOST_STAGES = 1024
MOST_REPLICAS = 256
MOST_SHARE = 1000
MOST_PROCESSES = 64


class StagePlan(Section):
    """One stage: how many workers compute it side by side, each some of the microbatches; how many processes compute
    each microbatch together, each with a part of the weights; and what it does not keep in memory."""

    replicas: Annotated[int, whole(1, MOST_REPLICAS)] = Field(
        default=1,
        description="How many workers compute the stage, each with its part of a step's microbatches. The gradients of "
        "each part are added up, then those of the parts: the number is part of the result.",
        examples=[2],
    )
    share: Unset[
        Annotated[
            tuple[Annotated[int, whole(1, MOST_SHARE)], ...],
            Field(min_length=1),
            Accepts("a list with one whole number of at least 1 for each replica, such as [2, 1]"),
        ]
    ] = Field(
        default=None,
        description="What part of the microbatches each replica has, in proportion. Default: as many each.",
        examples=[[2, 1]],
    )
    recompute: Unset[RecomputedOfStage] = Field(
        default=None,
        description='What backward runs forward again in this stage: the "stage", its "layers" one by one, patterns of '
        'names of layers and modules in them, or "nothing". Default: `memory.recompute`.',
        examples=["stage", "nothing", ["lm_head"]],
    )
    offload: Unset[Offloaded] = Field(
        default=None,
        description="What lies in files in this stage while it is not used; [] is nothing. Default: `memory.offload`.",
        examples=[["activations"], []],
    )
    elastic: Truth = Field(
        default=False,
        description="Whether the machine of another replica computes the part of one that is lost, if nothing replaces "
        "it within recovery.lease.",
        examples=[True],
    )
    tensor: Annotated[int, whole(1, MOST_PROCESSES)] = Field(
        default=1,
        description="How many processes compute the layers that `styles` names, each with a part of their weights "
        "(tensor parallel).",
        examples=[2],
    )
    styles: Unset[Styles] = Field(
        default=None,
        description='How the weights of linear and embedding layers are split, by their names in the model: "colwise" '
        'or "rowwise", as torch.distributed.tensor.parallel has them.',
        examples=[{"*.linear1": "colwise", "*.linear2": "rowwise"}],
    )
    shard: Annotated[int, whole(1, MOST_PROCESSES)] = Field(
        default=1,
        description="How many processes share the stage's weights, gradients and optimizer state among them (FSDP2); "
        "each computes all rows.",
        examples=[2],
    )

    @property
    def processes(self) -> int:
        """How many compute the stage together."""
        return max(self.tensor, self.shard)

    @property
    def shares(self) -> tuple[int, ...]:
        return self.share or (1,) * self.replicas
