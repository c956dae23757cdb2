"""The tables `schedule`, `stage.0`, `stage.1`, ..., `memory` and `taps`: the order of the work, and settings of stages.

The tables `memory` and `taps` change no bit of what is trained. The docstrings of the tables are published in
docs/plan.schema.json.
"""

from typing import Annotated, get_args

from pydantic import Field

from stageline.pipeline.program import Tied
from stageline.pipeline.schedule import DELAYED, LISTED, Mode, schedule_names

from .key_types import (
    Accepts,
    ListPath,
    Offloaded,
    Recomputed,
    RecomputedOfStage,
    Section,
    Size,
    Styles,
    Truth,
    Unset,
    Workers,
    one_of,
    one_of_or_function,
    whole,
)

# A typing error shall not make a billion stages, replicas or processes.
MOST_STAGES = 1024
MOST_REPLICAS = 256
MOST_SHARE = 1000
MOST_PROCESSES = 64


class StagePlan(Section):
    """Settings of one stage: the processes that compute it, and what it does not keep in memory.

    Replicas compute it side by side, each some of the microbatches. Processes of a group compute each microbatch
    together, each with a part of the weights.
    """

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
        """Number of processes that compute the stage together."""
        return max(self.tensor, self.shard)

    @property
    def shares(self) -> tuple[int, ...]:
        """Shares of the microbatches, one for each replica; all 1 if the plan does not set `share`."""
        return self.share or (1,) * self.replicas


MOST_MICROBATCHES = 65536  # a typing error shall not make a list of a billion actions
MOST_LISTED = 48_000  # characters of a schedule's rows: a worker sends its plan, in a message of 64 KiB at most
AUTO = "auto"  # the schedule that the run itself chooses
AUTO_BEGINS_WITH = "1f1b"  # it holds the fewest microbatches of all that keep every worker busy


class SchedulePlan(Section):
    """The order of the work."""

    name: Annotated[str, one_of_or_function((*schedule_names(), DELAYED, LISTED, AUTO))] = Field(
        default="1f1b",
        description='The order in which a stage runs forwards and backwards. "csv": that of `file`. "auto": the run '
        'measures its first steps, and takes the fastest for which `memory` has room. "2bw" (PipeDream-2BW): for '
        'mode = "async", with an update after `microbatches`, of which there are at least as many as stages. '
        '"mine.py:reverse": the one that this function lists, for the stages of each worker and the number of '
        "microbatches.",
        examples=["gpipe", "auto", "mine.py:reverse"],
    )
    file: Unset[ListPath] = Field(
        default=None,
        description='For name = "csv", and only there: the file with a row of actions for each worker, in the '
        '"compute_only" format of torch.distributed.pipelining.',
        examples=["schedule.csv"],
    )
    rows: Unset[Annotated[tuple[Annotated[str, Field(strict=True)], ...], Accepts("a list of rows of text")]] = Field(
        default=None,
        description="What `file` says, or the function that `name` names, for each worker; or given in its place.",
        examples=[["0F0,0F1,,0B0,0B1", ",1F0,1B0,1F1,1B1"]],
    )
    memory: Unset[Size] = Field(
        default=None,
        description='For name = "auto", and only there: the bytes that a worker may take for weights, gradients, '
        "optimizer and the activations of microbatches in flight.",
        examples=["4GiB"],
    )
    microbatches: Annotated[int, whole(1, MOST_MICROBATCHES)] = Field(
        default=1,
        description="Slices of a batch that are under way at a time; more of them keep the workers busier.",
        examples=[8],
    )
    accumulate: Annotated[int, whole(1, MOST_MICROBATCHES)] = Field(
        default=1,
        description="Batches in a step, each in `microbatches` slices: their gradients are added up, then all stages "
        "update once.",
        examples=[4],
    )
    mode: Annotated[Mode, one_of(get_args(Mode))] = Field(
        default="sync",
        description='"sync" updates once per batch and computes what the uncut model would; "async" (PipeDream) '
        'updates after every batch without waiting for the line to empty, by name = "1f1b" or "2bw".',
        examples=["async"],
    )
    tied: Annotated[Tied, one_of(get_args(Tied))] = Field(
        default="microbatch",
        description="When stages that use one parameter send each other its gradients: after each microbatch, which "
        "computes what the uncut model would, or once per step, in so many fewer bytes.",
        examples=["step"],
    )
    window: Unset[
        Annotated[
            tuple[Annotated[int, whole(1)], ...],
            Field(min_length=1),
            Accepts("a list with one whole number of at least 1 for each stage, such as [4, 2]"),
        ]
    ] = Field(
        default=None,
        description='For name = "window": how many microbatches each stage has in flight at most. For "zb-h1", if not '
        "those of 1F1B: how many each has run forward at most before it has sent their gradients.",
        examples=[[7, 4]],
    )
    times: Unset[
        Annotated[
            tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]],
            Accepts("a list of three numbers above 0, how long F, I and W of a stage take, such as [1, 1.5, 0.5]"),
        ]
    ] = Field(
        default=None,
        description='For name = "zb-v", and only there: how long F, I and W of a stage take, in any one unit.',
        examples=[[1, 1.5, 0.5]],
    )

    @property
    def is_auto(self) -> bool:
        """True if the run chooses its schedule."""
        return self.name == AUTO

    @property
    def is_function(self) -> bool:
        """True if a user's function lists the schedule."""
        return ":" in self.name or "." in self.name

    @property
    def begins_with(self) -> str:
        """Name of the schedule that the run begins with."""
        return AUTO_BEGINS_WITH if self.is_auto else LISTED if self.is_function else self.name

    @property
    def rows_key(self) -> str:
        """Dotted key to which errors about the schedule's rows belong."""
        return "schedule.name" if self.is_function else "schedule.rows" if self.file is None else "schedule.file"

    @property
    def in_step(self) -> int:
        """Number of microbatches in a step: those of all its `accumulate` batches."""
        return self.microbatches * self.accumulate


class MemoryPlan(Section):
    """Limits of workers' memory, and the parts of stages that are not kept in memory while unused."""

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


class TapsPlan(Section):
    """The layers that are tapped, and the steps whose microbatches are stored."""

    layers: Annotated[
        tuple[Annotated[str, Field(strict=True, min_length=1)], ...],
        Field(min_length=1),
        Accepts('a list of patterns such as ["encoder.layer.4*"]'),
    ] = Field(
        description="Patterns of the names of layers, as `model.cut` has them: what these return is written to the "
        "run's folder.",
        examples=[["encoder.layer.40", "encoder.layer.4?"]],
    )
    every: Annotated[int, whole(1)] = Field(
        default=10, description="Every so many steps are stored, from step 0 on.", examples=[1]
    )
    evaluation: Truth = Field(
        default=False, description="Whether the batches that are evaluated are stored too.", examples=[True]
    )

    def has(self, step: int) -> bool:
        """Return True if the microbatches of training step `step` are stored."""
        return step % self.every == 0
