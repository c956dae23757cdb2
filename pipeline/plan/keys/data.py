"""Where batches come from: the table `data` of a plan."""

from typing import Annotated

from pydantic import Field

from .key_types import Accepts, Options, Reference, Section, Target, Truth, Unset, whole
from .stages import MOST_STAGES


class DataPlan(Section):
    """Where the batches come from. Exactly one of `source` and `dataset` is given; what follows goes with `dataset`."""

    source: Unset[Reference] = Field(
        default=None,
        description="Is called with `batch_size`, `seed` and `options` and returns a source, such as stageline.Rows.",
        examples=["data.py:batches"],
    )
    dataset: Unset[Reference] = Field(
        default=None,
        description="A map-style torch Dataset, or what returns one when it is called with `options`.",
        examples=["data.py:train"],
    )
    held_out: Unset[Reference] = Field(
        default=None,
        description="The dataset whose rows are evaluated; given as `dataset` is.",
        examples=["data.py:test"],
    )
    target: Unset[Target] = Field(
        default=None,
        description="The name or place of the part of a sample that is its target, a list of them, or a function that "
        "takes a batch and returns (inputs, targets). Default: samples are pairs.",
        examples=["label", "data.py:split"],
    )
    collate: Unset[Reference] = Field(
        default=None,
        description="Makes a batch of a list of samples. Default: torch's default_collate.",
        examples=["data.py:padded"],
    )
    shuffle: Unset[Truth] = Field(
        default=None,
        description="Whether each epoch has an order of its own. Default: true.",
        examples=[False],
    )
    num_workers: Unset[Annotated[int, whole(0)]] = Field(
        default=None,
        description="Processes that draw ahead, at the first stage and at the last. Default: 0, the workers draw "
        "themselves.",
        examples=[2],
    )
    targets: Unset[Reference] = Field(
        default=None,
        description="Is called as `source` is, by a worker that has the last stage and not the first. Of its batches "
        "the targets alone count. Default: that worker opens the data, too.",
        examples=["data.py:labels"],
    )
    stays: Unset[
        Annotated[
            tuple[Annotated[int, whole(0, MOST_STAGES - 1)], ...],
            Field(min_length=1),
            Accepts("a list of stages such as [0]"),
        ]
    ] = Field(
        default=None,
        description="Stages whose inputs and weights stay at one worker, that of stage 0. A plan that would have them "
        "elsewhere is refused.",
        examples=[[0], [0, 2]],
    )
    labels_stay: Unset[Truth] = Field(
        default=None,
        description="Whether the targets stay there too: the last stage is at that worker. With `stays`. Default: "
        "false.",
        examples=[True],
    )
    options: Options = Field(
        default_factory=dict,
        description="Keyword arguments for the source, or for the datasets.",
        examples=[{"folder": "/data/digits"}],
    )
    batch_size: Annotated[int, whole(1)] = Field(
        description="Rows in a batch; at least `schedule.microbatches`.", examples=[64]
    )
    check: Truth = Field(
        default=True,
        description="Before the run, two processes try the plan; where they draw or compute other values, it is "
        "refused.",
        examples=[False],
    )

    @property
    def origin(self) -> str:
        """Which key names the data, and what: `data.source = "data.py:batches"`."""
        return f'data.source = "{self.source}"' if self.dataset is None else f'data.dataset = "{self.dataset}"'

    @property
    def origin_held_out(self) -> str:
        """Which key names the data whose rows are held out: `data.held_out = "data.py:test"`."""
        return self.origin if self.held_out is None else f'data.held_out = "{self.held_out}"'
