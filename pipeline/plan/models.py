"""Every key of a plan: its type, its default and what it is for. Validation and the JSON schema follow from here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from stageline.pipeline.schedule import Mode, Placement, schedule_names

from . import addresses
from .key_types import (
    Accepts,
    Argument,
    Cut,
    Device,
    Folder,
    Name,
    Options,
    Reference,
    Seconds,
    Size,
    Target,
    Truth,
    Unset,
    WeightsPath,
    address,
    one_of,
    whole,
)

BadMicrobatch = Literal["halt", "skip"]
Recorded = Literal["none", "bad", "all"]

SCRIPT_BATCHES = "script:batches"  # the data source of a run whose batches a script hands over

# A typing error shall not make a billion workers, nor a list of a billion actions.
_MOST_STAGES = 1024
_MOST_MICROBATCHES = 65536
_MOST_THREADS = 1024


class Section(BaseModel):
    """One table of a plan file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FactorySection(Section):
    """A table whose keys, but for `factory`, are keyword arguments for the factory."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Argument]

    @property
    def options(self) -> Options:
        """The keyword arguments."""
        return self.__pydantic_extra__


class RunPlan(Section):
    """How long the run is, and where it leaves its files. Exactly one of `steps` and `epochs` is given, but neither in
    a scripted run: the script decides."""

    name: Name = Field(
        default="run",
        description="Names the run in reports and its folder in `run.dir`. Default: the plan's folder.",
        examples=["digits"],
    )
    seed: Annotated[int, whole(0)] = Field(
        default=0,
        description="Seeds the model's weights, the order of the data and every layer's random numbers.",
        examples=[40],
    )
    steps: Unset[Annotated[int, whole(1)]] = Field(
        default=None, description="How many steps to train; one step is one batch.", examples=[1000]
    )
    epochs: Unset[Annotated[int, whole(1)]] = Field(
        default=None, description="How many passes over the data to train.", examples=[20]
    )
    dir: Folder = Field(
        default=Path("runs"),
        description="Where the run's folder is made, relative to where the command runs.",
        examples=["/data/runs"],
    )
    log_every: Annotated[int, whole(1)] = Field(
        default=10, description="The loss of every so many steps is kept in the results.", examples=[100]
    )


class ModelPlan(Section):
    """What is trained and where it is cut. `stages` is None until the model is loaded, if only the model can tell."""

    factory: Reference = Field(
        description="Is called with `options` and returns the model; or a list of modules: the stages.",
        examples=["model.py:build"],
    )
    options: Options = Field(
        default_factory=dict, description="Keyword arguments for the factory.", examples=[{"width": 128}]
    )
    weights: Unset[WeightsPath] = Field(
        default=None,
        description="The file or folder that each worker reads the weights of its stages from. Default: the factory's.",
        examples=["/data/model", "model.safetensors"],
    )
    cut: Unset[Cut] = Field(
        default=None,
        description='The layers with which stages 1, 2, ... begin, numbers or names; "auto" cuts into `stages` stages.',
        examples=[[2, 4], ["encoder.layer.6"]],
    )
    stages: Unset[Annotated[int, whole(1, _MOST_STAGES)]] = Field(
        default=None, description='How many stages there are. Without `cut` it cuts as "auto" does.', examples=[4]
    )
    loss: Reference = Field(
        description="A function of (outputs, targets), or a module class: the mean over the rows.",
        examples=["torch.nn.functional.cross_entropy"],
    )
    metrics: Annotated[tuple[Reference, ...], Accepts('a list such as ["metrics.py:accuracy"]')] = Field(
        default=(),
        description="Functions of (outputs, targets) that measure the rows held out, after the last step.",
        examples=[["model.py:accuracy"]],
    )


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
        description="The dataset whose rows the metrics measure after the last step; given as `dataset` is.",
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


class SchedulePlan(Section):
    """The order of the work."""

    name: Annotated[str, one_of(schedule_names())] = Field(
        default="1f1b", description="The order in which a stage runs forwards and backwards.", examples=["gpipe"]
    )
    microbatches: Annotated[int, whole(1, _MOST_MICROBATCHES)] = Field(
        default=1,
        description="Slices of a batch that are under way at a time; more of them keep the workers busier.",
        examples=[8],
    )
    mode: Annotated[Mode, one_of(get_args(Mode))] = Field(
        default="sync",
        description='"sync" updates once per batch and computes what the uncut model would; "async" (PipeDream) '
        "updates after every batch without waiting for the line to empty.",
        examples=["async"],
    )
    window: Unset[
        Annotated[
            tuple[Annotated[int, whole(1)], ...],
            Field(min_length=1),
            Accepts("a list with one whole number from 1 on for each stage, such as [4, 2],"),
        ]
    ] = Field(
        default=None,
        description='For name = "window", and only there: how many microbatches each stage has in flight at most.',
        examples=[[7, 4]],
    )


class OptimizerPlan(FactorySection):
    """`factory` is called with a stage's parameters and the other keys."""

    factory: Reference = Field(
        description="Is called with a stage's parameters, once for each stage that has any.",
        examples=["torch.optim.AdamW"],
    )


class LrSchedulerPlan(FactorySection):
    """`factory` is called with a stage's optimizer and the other keys."""

    factory: Reference = Field(
        description="Is called with a stage's optimizer; steps once per step.",
        examples=["torch.optim.lr_scheduler.StepLR"],
    )


class QueuesPlan(Section):
    """What carries the messages, and how many bytes of them a producer retains."""

    url: Annotated[str, address(addresses.QUEUES)] = Field(
        default="ipc://",
        description="What carries the messages between workers.",
        examples=list(addresses.QUEUES.values()),
    )
    retain_bytes: Size = Field(
        default=2**30,
        description="How much a producer keeps in memory to deliver again; four times as much may lie on disk.",
        examples=["256MiB"],
    )


class RecoveryPlan(Section):
    """How the loss of a worker is noticed and repaired."""

    lease: Seconds = Field(
        default=10.0,
        description="How long (seconds) a worker may be silent before it counts as lost.",
        examples=["30s"],
    )
    action: Unset[Seconds] = Field(
        default=None,
        description="How long (seconds) one action, such as a microbatch's forward, may take before the worker counts "
        "as lost. Default: `lease`.",
        examples=["2min"],
    )
    loading: Seconds = Field(
        default=300.0,
        description="How long (seconds) loading model and data, and the trial of one microbatch, may take.",
        examples=["30min"],
    )
    snapshot_every: Annotated[int, whole(0)] = Field(
        default=20,
        description="Steps between snapshots; work redone after a loss is bounded by it. 0: none are written.",
        examples=[100],
    )
    restarts: Annotated[int, whole(0)] = Field(
        default=5,
        description="How many times in a row, without a newer complete checkpoint, a worker may be replaced before "
        "the run is given up. 0: losing a worker ends the run.",
        examples=[5],
    )
    on_bad_microbatch: Annotated[BadMicrobatch, one_of(get_args(BadMicrobatch))] = Field(
        default="halt",
        description="What happens when a microbatch's loss is not a finite number or the model raises: the run "
        "stops and names it, or the microbatch is left out.",
        examples=["skip"],
    )
    record: Annotated[Recorded, one_of(get_args(Recorded))] = Field(
        default="bad",
        description="What `stageline replay` can run again: nothing, the microbatch that stopped the run, or every "
        "microbatch since the last but one complete checkpoint.",
        examples=["all"],
    )

    @property
    def longest_action(self) -> float:
        """Seconds."""
        return self.lease if self.action is None else self.action

    @property
    def on(self) -> bool:
        """Whether stages write snapshots, and lost workers are replaced."""
        return self.restarts > 0 and self.snapshot_every > 0


class BrokerPlan(Section):
    """Where workers and commands find the broker, and where it keeps its records."""

    url: Annotated[str, address(addresses.BROKER)] = Field(
        default=addresses.BROKER["tcp"],
        description="Where `broker` listens, and where `worker` and `status` look for it. `train` takes a free "
        "address of its own.",
        examples=list(addresses.BROKER.values()),
    )
    store: Annotated[str, address(addresses.REDIS, "sqlite")] = Field(
        default="sqlite",
        description="Where the broker keeps its records: in a file of the run's folder, or at a Redis server.",
        examples=["redis://host:6379/0"],
    )
    patience: Seconds = Field(
        default=600.0,
        description="How long (seconds) a script waits for its workers on other machines.",
        examples=["1h"],
    )


class WorkerPlan(Section):
    """One worker: the stages it owns, the device they live on, the threads it computes with."""

    stages: Annotated[
        tuple[Annotated[int, whole(0, _MOST_STAGES - 1)], ...],
        Field(min_length=1),
        Accepts("a list of stages such as [0, 2]"),
    ] = Field(
        description="The stages that the worker owns; several for an interleaved or a U-shaped placement.",
        examples=[[0, 2]],
    )
    device: Device = Field(default="cpu", description="Where the stages live.", examples=["cuda:0"])
    threads: Annotated[int, whole(1, _MOST_THREADS)] = Field(
        default=1, description="Threads that torch computes with. It is part of the result.", examples=[4]
    )
    weights: Unset[WeightsPath] = Field(
        default=None,
        description="Where this worker reads the weights of its stages. Default: `model.weights`.",
        examples=["/data/part-1.safetensors"],
    )


def by_number(tables: Mapping[str, object]) -> list[str]:
    """The names of [workers.0], [workers.1], ... in the order of their numbers."""
    return sorted(tables, key=lambda name: (len(name), name))


def _in_order(workers: object) -> object:
    if isinstance(workers, Mapping):
        return [workers[name] for name in by_number(workers)]
    raise PydanticCustomError("model_type", "a table is wanted")


_Number = Annotated[str, Field(pattern="^(0|[1-9][0-9]*)$")]


class PlanTables(Section):
    """The plan of a run: what is trained, how it is cut and scheduled, and which worker computes what."""

    run: RunPlan = Field(default_factory=RunPlan)
    model: ModelPlan
    data: DataPlan
    schedule: SchedulePlan = Field(default_factory=SchedulePlan)
    optimizer: OptimizerPlan
    lr_scheduler: Unset[LrSchedulerPlan] = None
    queues: QueuesPlan = Field(default_factory=QueuesPlan)
    recovery: RecoveryPlan = Field(default_factory=RecoveryPlan)
    broker: BrokerPlan = Field(default_factory=BrokerPlan)
    workers: Annotated[
        tuple[WorkerPlan, ...], BeforeValidator(_in_order, json_schema_input_type=dict[_Number, WorkerPlan])
    ] = Field(default_factory=tuple, description="Which worker owns which stages. Default: one for each stage.")

    @property
    def scripted(self) -> bool:
        """Whether a user's script hands the batches over, call by call, instead of a data source."""
        return self.data.source == SCRIPT_BATCHES

    @property
    def placement(self) -> Placement:
        """The stages of each worker."""
        return tuple(worker.stages for worker in self.workers)

    @property
    def loads_weights(self) -> bool:
        """Whether weights are read from files. Then those of all stages are."""
        return self.model.weights is not None or any(worker.weights is not None for worker in self.workers)

    def weights_of(self, stage: int) -> tuple[str, Path] | None:
        """The key that says where the weights of `stage` are, and what it says; None if none does."""
        for index, worker in enumerate(self.workers):
            if stage in worker.stages and worker.weights is not None:
                return f"workers.{index}.weights", worker.weights
        return None if self.model.weights is None else ("model.weights", self.model.weights)

    def with_stages(self, stages: int) -> Self:
        """For a model of `stages` stages; where no worker is named, each stage has one. Nothing is checked."""
        workers = self.workers or tuple(WorkerPlan(stages=(stage,)) for stage in range(stages))
        return self.model_copy(update={"model": self.model.model_copy(update={"stages": stages}), "workers": workers})

    def with_known_stages(self) -> Self:
        """`with_stages`, if the number of stages is given, or follows from the cut."""
        cut = self.model.cut
        stages = self.model.stages or (len(cut) + 1 if isinstance(cut, tuple) else None)
        return self if stages is None else self.with_stages(stages)


def section(table: str) -> type[Section]:
    """The model of `table`'s keys; for "workers", of one worker's."""
    annotation = PlanTables.model_fields[table].annotation
    return next(
        each for each in (annotation, *get_args(annotation)) if isinstance(each, type) and issubclass(each, Section)
    )
