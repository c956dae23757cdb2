"""The plan as a value: what is trained, how it is cut and scheduled, and which worker owns which stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from stageline.pipeline.schedule import Mode, Placement

from .consistency import problems
from .passwords import ADDRESSES, all_masked, masked
from .refusal import PlanError, PlanRefused, shown
from .tables import canonical, flat
from .urls import open_to_others

Options = Mapping[str, object]  # keyword arguments for a user's factory: whatever TOML can say, but for dates
Origin = Literal["default", "file", "environment", "--set"]

_MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How long the run is, and where it leaves its files. Exactly one of `steps` and `epochs` is given.

    A plan that is read without a `name` takes that of its folder.
    """

    name: str = "run"
    seed: int = 0
    steps: int | None = None
    epochs: int | None = None
    dir: Path = Path("runs")
    log_every: int = 10  # steps


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is trained and where it is cut: `cut` holds the layers that stages 1, 2, ... begin with.

    `stages` is their number, None as long as only the loaded model can tell.
    """

    factory: str
    loss: str
    options: Options = field(default_factory=dict)
    cut: tuple[int, ...] | Literal["auto"] | None = None
    stages: int | None = None
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataPlan:
    """Where the batches come from."""

    source: str
    batch_size: int
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The order of the work, as `make_schedule` takes it. `window` holds K for every stage."""

    name: str = "1f1b"
    microbatches: int = 1
    mode: Mode = "sync"
    window: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """`factory` is called with a stage's parameters and `options`."""

    factory: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LrSchedulerPlan:
    """`factory` is called with a stage's optimizer and `options`."""

    factory: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueuesPlan:
    """What carries the messages, and how many bytes of them a producer retains."""

    url: str = "ipc://"
    retain_bytes: int = 1024 * _MEBIBYTE


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """When a silent worker is given up (`lease`, seconds), and how often stages write snapshots (in steps; 0: never).

    `restarts`: how many times in a row, without a newer complete checkpoint, a worker may be replaced before the run
    is given up; with 0, losing a worker ends the run. A microbatch is bad if its loss is not a finite number, or if the
    user's code raises. `record`: which microbatches can be run again, alone: none, one
    that stopped the run, or all since the last but one complete checkpoint.
    """

    lease: float = 10.0
    snapshot_every: int = 20
    restarts: int = 5
    on_bad_microbatch: Literal["halt", "skip"] = "halt"
    record: Literal["none", "bad", "all"] = "bad"

    @property
    def on(self) -> bool:
        """Whether stages write snapshots, and lost workers are replaced."""
        return self.restarts > 0 and self.snapshot_every > 0


@dataclass(frozen=True, slots=True)
class BrokerPlan:
    """Where workers and commands find the broker, and where it keeps its records: in a file of the run's folder
    ("sqlite"), or at a Redis server, by its address."""

    url: str = "tcp://127.0.0.1:5600"
    store: str = "sqlite"


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker: the stages it owns, the device they live on, the threads it computes with."""

    stages: tuple[int, ...]
    device: str = "cpu"
    threads: int = 1


Section = (
    RunPlan
    | ModelPlan
    | DataPlan
    | SchedulePlan
    | OptimizerPlan
    | LrSchedulerPlan
    | QueuesPlan
    | RecoveryPlan
    | BrokerPlan
    | WorkerPlan
)


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a run's settings. Two plans are equal if they say the same, wherever it was said.

    `workers` is empty as long as `model.stages` is None and the plan names no workers: see `resolved`.
    """

    run: RunPlan
    model: ModelPlan
    data: DataPlan
    optimizer: OptimizerPlan
    schedule: SchedulePlan = SchedulePlan()
    lr_scheduler: LrSchedulerPlan | None = None
    queues: QueuesPlan = QueuesPlan()
    recovery: RecoveryPlan = RecoveryPlan()
    broker: BrokerPlan = BrokerPlan()
    workers: tuple[WorkerPlan, ...] = ()
    file: Path | None = field(default=None, compare=False)
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)  # dotted key -> who set it

    @property
    def placement(self) -> Placement:
        """The stages of each worker."""
        return tuple(worker.stages for worker in self.workers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but should be known before the run begins."""
        urls = self._addresses()
        exposed = (f'{key} = "{masked(url)}" {_EXPOSED}' for key, url in urls.items() if open_to_others(url))
        typed = (key for key, url in urls.items() if masked(url) != url and self.origins.get(key) == "--set")
        seen = (_SEEN.format(key=key, variable=f"STAGELINE_{key.replace('.', '__').upper()}") for key in typed)
        return (*exposed, *seen)

    def resolved(self, stages: int) -> "Plan":
        """The plan for a model that turned out to have `stages` stages; where no worker is named, one for each stage.

        Raises `PlanRefused` if the plan asks for another number, or if workers and schedule do not fit it.
        """
        if self.model.stages not in (None, stages):
            raise PlanRefused([self._error("model.stages", f"the model has {stages} stages")])
        plan = self.with_stages(stages)
        if wrong := [plan._error(problem.key, problem.reason) for problem in problems(plan)]:
            raise PlanRefused(wrong)
        return plan

    def with_stages(self, stages: int) -> "Plan":
        """`resolved` without its checks."""
        workers = self.workers or tuple(WorkerPlan((stage,)) for stage in range(stages))
        return replace(self, model=replace(self.model, stages=stages), workers=workers)

    def as_mapping(self) -> dict[str, object]:
        """The plan as nested tables of JSON's own types, just as `from_mapping` takes it; what is None is left out.

        It is for others to see, so its addresses are without their passwords.
        """
        sections: dict[str, Section | None] = {
            "run": self.run,
            "model": self.model,
            "data": self.data,
            "schedule": self.schedule,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "queues": self.queues,
            "recovery": self.recovery,
            "broker": self.broker,
        }
        tables: dict[str, object] = {name: _table(name, section) for name, section in sections.items() if section}
        if self.workers:
            tables["workers"] = {str(index): _table("workers", worker) for index, worker in enumerate(self.workers)}
        return tables

    def _addresses(self) -> dict[str, str]:
        """All that are set, as they were given, by their keys."""
        held = (key.split(".") for key in ADDRESSES)
        values = {f"{section}.{name}": getattr(getattr(self, section), name, None) for section, name in held}
        return {key: value for key, value in values.items() if isinstance(value, str)}

    def digest(self) -> str:
        """SHA-256 (hex) over what determines the computation and who does which part of it.

        Names, folders, addresses and what is merely reported are left out: two machines may differ in them.
        """
        counted = {key: value for key, value in flat(self.as_mapping()).items() if key not in UNCOUNTED}
        return sha256(canonical(counted).encode()).hexdigest()

    def _error(self, key: str, reason: str) -> PlanError:
        value = flat(self.as_mapping()).get(key)
        return PlanError(key, reason, str(self.file or ""), "" if value is None else shown(value))


UNCOUNTED = frozenset(
    {
        "run.name",
        "run.dir",
        "run.log_every",
        "queues.url",
        "queues.retain_bytes",
        "recovery.lease",
        "recovery.restarts",
        "recovery.record",
        "broker.url",
        "broker.store",
    }
)

_EXPOSED = (
    "can be reached from other machines and nothing on it is encrypted: whoever reaches it can read and change "
    "the run. Use 127.0.0.1, or an address inside a tunnel (WireGuard, ssh)."
)


_SEEN = (
    "{key} was given with a password on the command line, where everybody on this machine can read it (ps). Leave that "
    "--set out, and put the address into the environment, as {variable}, or into a plan file that only you can read."
)


def _table(name: str, section: Section) -> dict[str, object]:
    values = {each.name: getattr(section, each.name) for each in fields(section)}
    table = {key: _plain(value) for key, value in values.items() if value is not None}
    table |= {key: all_masked(value) for key, value in table.items() if f"{name}.{key}" in ADDRESSES}
    match section:
        case OptimizerPlan() | LrSchedulerPlan():
            return {"factory": section.factory, **section.options}
        case _:
            return table


def _plain(value: object) -> object:
    match value:
        case Path():
            return value.as_posix()
        case tuple():
            return list(value)
        case Mapping():
            return dict(value)
        case _:
            return value
