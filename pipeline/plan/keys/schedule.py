"""The order of the work: the table `schedule` of a plan."""

from typing import Annotated, get_args

from pydantic import Field

from stageline.pipeline.schedule import DELAYED, LISTED, Mode, Tied, schedule_names

from .key_types import Accepts, ListPath, Size, Unset, one_of, whole
from .section import Section

MOST_MICROBATCHES = 65536  # a typing error shall not make a list of a billion actions
MOST_LISTED = 48_000  # characters of a schedule's rows: a worker sends its plan, in a message of 64 KiB at most
AUTO = "auto"  # the schedule that the run itself chooses
AUTO_BEGINS_WITH = "1f1b"  # it holds the fewest microbatches of all that keep every worker busy


class SchedulePlan(Section):
    """The order of the work."""

    name: Annotated[str, one_of((*schedule_names(), DELAYED, LISTED, AUTO))] = Field(
        default="1f1b",
        description='The order in which a stage runs forwards and backwards. "csv": that of `file`. "auto": the run '
        'measures its first steps, and takes the fastest for which `memory` has room. "2bw" (PipeDream-2BW): for '
        'mode = "async", with an update after `microbatches`, of which there are at least as many as stages.',
        examples=["gpipe", "auto"],
    )
    file: Unset[ListPath] = Field(
        default=None,
        description='For name = "csv", and only there: the file with a row of actions for each worker, in the '
        '"compute_only" format of torch.distributed.pipelining.',
        examples=["schedule.csv"],
    )
    rows: Unset[Annotated[tuple[Annotated[str, Field(strict=True)], ...], Accepts("a list of rows of text")]] = Field(
        default=None,
        description="What `file` says, for each worker; or given in its place.",
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
        """Whether the run chooses its schedule."""
        return self.name == AUTO

    @property
    def begins_with(self) -> str:
        """The name of the schedule that the run begins with."""
        return AUTO_BEGINS_WITH if self.is_auto else self.name

    @property
    def in_step(self) -> int:
        """The microbatches of a step."""
        return self.microbatches * self.accumulate
