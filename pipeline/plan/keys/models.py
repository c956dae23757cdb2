"""A whole plan: its tables, properties that follow from several tables, the names of its metrics, and its JSON schema.

pydantic derives the validation from the models here; the tables' keys are in the other files of this folder. The
docstrings of the models are published in docs/plan.schema.json.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BeforeValidator, Field
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from stageline.pipeline.evaluation import Better, Criterion
from stageline.pipeline.schedule import Placement
from stageline.pipeline.schedule.replicas import Replicas, Shares

from .deployment import BrokerPlan, QueuesPlan, RecoveryPlan, WorkerPlan
from .key_types import Accepts, Recomputed, Reference, Section, Unset
from .parties import PartyPlan
from .stages import MemoryPlan, SchedulePlan, StagePlan, TapsPlan
from .training import DataPlan, EvaluationPlan, LrSchedulerPlan, ModelPlan, OptimizerPlan, RunPlan

SCRIPT_BATCHES = "script:batches"  # the data source of a run whose batches a script hands over


def by_number(tables: Mapping[str, object]) -> list[str]:
    """Return the names of the tables [workers.0], [workers.1], ... in the order of their numbers."""
    return sorted(tables, key=lambda name: (len(name), name))


def _in_order(workers: object) -> object:
    if isinstance(workers, Mapping):
        return [workers[name] for name in by_number(workers)]
    raise PydanticCustomError("model_type", "expected a table")


_Number = Annotated[str, Field(pattern="^(0|[1-9][0-9]*)$")]
_PartyName = Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,31}$")]
_Stages = Annotated[
    dict[str, StagePlan], BeforeValidator(lambda tables: tables, json_schema_input_type=dict[_Number, StagePlan])
]

_Parties = Annotated[
    dict[str, PartyPlan], BeforeValidator(lambda tables: tables, json_schema_input_type=dict[_PartyName, PartyPlan])
]

_Memory = Annotated[  # `memory = "2GiB"` is read as its limit
    MemoryPlan, BeforeValidator(lambda table: table, json_schema_input_type=MemoryPlan | int | str)
]


class PlanTables(Section):
    """The plan of a run: what is trained, how it is cut and scheduled, and which worker computes what."""

    features: Annotated[tuple[Reference, ...], Accepts('a list such as ["noise.py:GradientNoise"]')] = Field(
        default=(),
        description="Features of your own, which change what stages compute, the outermost first. Before all tables.",
        examples=[["noise.py:GradientNoise"]],
    )
    run: RunPlan = Field(default_factory=RunPlan)
    model: ModelPlan
    data: DataPlan
    schedule: SchedulePlan = Field(default_factory=SchedulePlan)
    stage: Unset[_Stages] = Field(
        default=None, description="Stages by number, as in [stage.1]: those that several workers or processes compute."
    )
    optimizer: OptimizerPlan
    lr_scheduler: Unset[LrSchedulerPlan] = None
    evaluation: Unset[EvaluationPlan] = None
    taps: Unset[TapsPlan] = None
    memory: Unset[_Memory] = None
    queues: QueuesPlan = Field(default_factory=QueuesPlan)
    recovery: RecoveryPlan = Field(default_factory=RecoveryPlan)
    broker: BrokerPlan = Field(default_factory=BrokerPlan)
    parties: Unset[_Parties] = Field(
        default=None,
        description="Owners of machines by name, as in [parties.hospital]: their keys, and whose each worker is.",
    )
    workers: Annotated[
        tuple[WorkerPlan, ...], BeforeValidator(_in_order, json_schema_input_type=dict[_Number, WorkerPlan])
    ] = Field(default_factory=tuple, description="Which worker owns which stages. Default: one for each stage.")

    @property
    def scripted(self) -> bool:
        """True if a user's script hands the batches over, call by call, instead of a data source."""
        return self.data.source == SCRIPT_BATCHES

    @property
    def caches_prefix(self) -> bool:
        """True if the output of the frozen first stages in the first epoch is kept for all later epochs."""
        return bool(self.model.prefix_cache)

    @property
    def averages(self) -> bool:
        """True if stages keep averages of their weights."""
        return self.optimizer.ema_decay is not None

    @property
    def counts_epochs(self) -> bool:
        """True if workers need to know how many steps an epoch has."""
        tables = self.lr_scheduler, self.evaluation
        return self.caches_prefix or any(table is not None and table.every == "epoch" for table in tables)

    def recompute_of(self, stage: int) -> Recomputed | None:
        """Return which layers the backward of `stage` runs forward again; None for none."""
        wanted = self.stage_plan(stage).recompute or (self.memory or MemoryPlan()).recompute
        return None if wanted == "nothing" else wanted

    def offloaded_of(self, stage: int) -> tuple[str, ...]:
        """Return the kinds of tensors, as in `memory.offload`, that `stage` keeps in files while they are not used."""
        own, of_all = self.stage_plan(stage).offload, (self.memory or MemoryPlan()).offload
        return (of_all if own is None else own) or ()

    @property
    def offloads(self) -> dict[str, tuple[str, ...]]:
        """Kinds of tensors kept in files, by the dotted key that sets them; keys without any are left out."""
        given = {"memory.offload": (self.memory or MemoryPlan()).offload}
        given |= {f"stage.{name}.offload": table.offload for name, table in (self.stage or {}).items()}
        return {key: wanted for key, wanted in given.items() if wanted}

    def limit_of(self, worker: int) -> int | None:
        """Return the bytes that the process of `worker` may take beyond its program; None if the plan sets no limit."""
        return self.limits.get(f"workers.{worker}.memory", self.limits.get("memory.limit"))

    @property
    def limits(self) -> dict[str, int]:
        """Bytes that workers may take, by the dotted key that sets them."""
        of_all = {"memory.limit": (self.memory or MemoryPlan()).limit}
        given = of_all | {f"workers.{index}.memory": each.memory for index, each in enumerate(self.workers)}
        return {key: size for key, size in given.items() if size is not None}

    @property
    def limit_keys(self) -> tuple[str, ...]:
        """Dotted keys that set how much memory workers may take."""
        return tuple(self.limits)

    def is_tight(self, worker: int) -> bool:
        """Return True if `worker` gives freed memory back at once, and waits for its snapshots, to keep to its limit.

        Until `memory.tight` has been chosen, every worker with a limit does so.
        """
        chosen = (self.memory or MemoryPlan()).tight
        return self.limit_of(worker) is not None and (chosen is None or worker in chosen)

    def is_scarce(self, worker: int) -> bool:
        """Return True if memory is scarce for `worker`: its limit is tight, or one of its stages offloads."""
        return self.is_tight(worker) or any(map(self.offloaded_of, self.workers[worker].stages))

    def undecided_memory(self, stage: int) -> tuple[str, ...]:
        """Return the keys of the table [stage.N] that a limit decides, since the plan does not set them."""
        own, of_all = self.stage_plan(stage), self.memory or MemoryPlan()
        pairs = {"recompute": (own.recompute, of_all.recompute), "offload": (own.offload, of_all.offload)}
        return tuple(f"stage.{stage}.{name}" for name, given in pairs.items() if given == (None, None))

    def undecided_keys(self, stages: int) -> tuple[str, ...]:
        """Return all keys that a limit decides, in a plan with `stages` stages."""
        return (*(key for stage in range(stages) for key in self.undecided_memory(stage)), *self.undecided_of_workers)

    @property
    def undecided_of_workers(self) -> tuple[str, ...]:
        """Keys for workers, not for one stage, that a limit decides: `memory.tight`, unless the plan sets it."""
        return ("memory.tight",) if (self.memory or MemoryPlan()).tight is None else ()

    @property
    def chooses_memory(self) -> bool:
        """True if the command that begins the run has yet to choose what stages and workers do to keep to a limit."""
        stages = self.model.stages
        return bool(self.limit_keys) and (stages is None or bool(self.undecided_keys(stages)))

    @property
    def evaluates(self) -> bool:
        """True if held-out rows are evaluated."""
        return bool(self.model.metrics) or self.evaluation is not None

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint of the best evaluation is kept."""
        return self.evaluation is not None and self.evaluation.keep_best

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics in the results of an evaluation.

        A metric has the name of its function, or its whole reference, with the file, where functions share a name.
        """
        return tuple(told_apart(self.model.metrics))

    @property
    def criterion(self) -> Criterion | None:
        """The criterion by which evaluations are compared; None if they are not compared."""
        choice = self.evaluation
        if choice is None:
            return None
        rates = self.lr_scheduler is not None and self.lr_scheduler.every == "evaluation"
        return Criterion(choice.metric, Better(choice.better or Better.LOWER), choice.patience, rates)

    @property
    def measures_cut(self) -> bool:
        """True if the command that begins the run has yet to measure where the model is cut."""
        model = self.model
        wishes = model.balance == "time" or model.stage_memory is not None
        return wishes and (model.stages or 1) > 1 and not isinstance(model.cut, tuple)

    @property
    def placement(self) -> Placement:
        """The stages of each worker.

        A stage with replicas is given as its copies, as `pipeline.schedule.replicas` numbers them. The first worker
        that names the stage has the first copy.
        """
        if not self.shares:
            return tuple(worker.stages for worker in self.workers)
        copies = [list(each) for each in Replicas(self.shares, 1).of_stage]
        return tuple(tuple(copies[stage].pop(0) for stage in worker.stages) for worker in self.workers)

    @property
    def shares(self) -> Shares:
        """Shares of the microbatches that the replicas of each stage have, by stage.

        Empty if no stage has several replicas, or while the number of stages is not known.
        """
        stages, tables = self.model.stages or 0, self.stage or {}
        if all(table.replicas == 1 for table in tables.values()):
            return ()
        single = StagePlan()
        return tuple(tables.get(str(stage), single).shares for stage in range(stages))

    def without_replicas(self) -> Self:
        """Return a plan in which each stage is on the worker of its first replica, for runs that only run forward.

        Nothing is checked.
        """
        stages = len(self.shares)
        if not stages:
            return self
        owned = [tuple(copy for copy in copies if copy < stages) for copies in self.placement]
        workers = [
            each.model_copy(update={"stages": own}) for each, own in zip(self.workers, owned, strict=True) if own
        ]
        return self.model_copy(update={"workers": tuple(workers), "stage": None})

    def stage_plan(self, stage: int) -> StagePlan:
        """Return the keys of the table [stage.N] of `stage`, with defaults if the plan has no such table."""
        return (self.stage or {}).get(str(stage)) or StagePlan()

    @property
    def loads_weights(self) -> bool:
        """True if weights are read from files. The weights of all stages are then."""
        return self.model.weights is not None or any(worker.weights is not None for worker in self.workers)

    def weights_of(self, stage: int) -> tuple[str, Path] | None:
        """Return the dotted key that says where the weights of `stage` are, and its path; None if no key does."""
        for index, worker in enumerate(self.workers):
            if stage in worker.stages and worker.weights is not None:
                return f"workers.{index}.weights", worker.weights
        return None if self.model.weights is None else ("model.weights", self.model.weights)

    def with_stages(self, stages: int) -> Self:
        """Return the plan for a model of `stages` stages. Nothing is checked.

        If the plan names no workers, each stage, and each replica of one, gets a worker.
        """
        tables = self.stage or {}
        further = [int(name) for name in by_number(tables) for _ in range(1, tables[name].replicas)]
        each = (*range(stages), *(stage for stage in further if stage < stages))
        workers = self.workers or tuple(WorkerPlan(stages=(stage,)) for stage in each)
        return self.model_copy(update={"model": self.model.model_copy(update={"stages": stages}), "workers": workers})

    def with_known_stages(self) -> Self:
        """Return `with_stages` for the number of stages that the plan gives, or that follows from its cut.

        Returns the plan itself if the number is not known.
        """
        cut = self.model.cut
        stages = self.model.stages or (len(cut) + 1 if isinstance(cut, tuple) else None)
        return self if stages is None else self.with_stages(stages)


TABLES = tuple(name for name in PlanTables.model_fields if name != "features")


def section(table: str) -> type[Section]:
    """Return the model of the keys of `table`; for "workers" and "stage", that of one worker or one stage."""
    return next(_sections(PlanTables.model_fields[table].annotation))


def _sections(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, Section):
        yield annotation
    for each in get_args(annotation):
        yield from _sections(each)


def numbered(names: Sequence[str]) -> list[str]:
    """Return the functions' own `names`, each made unique.

    A name that several functions have ends with its place, as in "accuracy_1".
    """
    every = [f"{name}_{place}" for place, name in enumerate(names)]
    own = [name if names.count(name) == 1 else longer for name, longer in zip(names, every, strict=True)]
    return own if len(set(own)) == len(own) else every


def told_apart(references: Sequence[str]) -> list[str]:
    """Return the names of the functions in `references`.

    Functions that share a name are called by their whole references, which name their files.
    """
    short = [function_of(each) for each in references]
    return [each if short.count(name) > 1 else name for each, name in zip(references, short, strict=True)]


def function_of(reference: str) -> str:
    """Return the name of the function in a reference: "accuracy" of "metrics.py:accuracy"."""
    return reference.replace(":", ".").rpartition(".")[2]


def plan_schema() -> dict[str, Any]:
    """Return the JSON schema of plan files, in draft 7: the newest that the editors' TOML extensions know well."""
    schema = PlanTables.model_json_schema(ref_template="#/definitions/{model}", schema_generator=_Draft7)
    definitions = schema.pop("$defs")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": definitions}


class _Draft7(GenerateJsonSchema):
    """A generator of JSON schemas for TOML files."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a title would repeat the key."""
        return False  # a title would repeat the key

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Return the schema of a default, and none for a default of None, since TOML has no null."""
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)
