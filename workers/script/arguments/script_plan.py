"""A script's arguments as a plan: what `Line` is given goes the way of every run, and is refused by the same rules.

Objects that have no name in a file, such as a module or a closure, are named "script:model": the processes that are
forked from the script have them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from stageline.pipeline.feature import Feature
from stageline.pipeline.features.recompute import Recompute
from stageline.pipeline.model.cut import make_segments
from stageline.pipeline.model.families.layers import Layers
from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.model.segment import Segment
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.difference import is_weights_path
from stageline.pipeline.plan.keys.models import SCRIPT_BATCHES, numbered
from stageline.pipeline.plan.reader import from_mapping
from stageline.pipeline.stage.layers.loss import Autocast, Loss
from stageline.pipeline.stage.layers.seeded_layers import generators_kept
from stageline.pipeline.stage.stage_update import LrSchedulerFactory, OptimizerFactory

Model = torch.nn.Module | Layers | Sequence[torch.nn.Module] | Callable[[], Any]
Metric = Callable[[Any, Any], Any]
FeatureMaker = Feature | Callable[[], Feature]
Workers = Literal["processes", "inline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOptions:
    """What `Line` was given. `docs/api.md` describes each."""

    loss: Loss
    optimizer: OptimizerFactory
    lr_scheduler: LrSchedulerFactory | None = None
    lr_every: int = 1
    clip_norm: float | None = None
    ema_decay: float | None = None
    groups: Sequence[Mapping[str, object]] | None = None
    cut: Sequence[int | str] | None = None
    stages: int | None = None
    placement: Sequence[Sequence[int]] | None = None
    schedule: str = "1f1b"
    microbatches: int = 1
    accumulate: int = 1
    window: Sequence[int] | None = None
    seed: int = 0
    device: str | torch.device = "cpu"
    autocast: Autocast | None = None
    recompute: Recompute | None = None
    threads: int = 1
    metrics: Sequence[Metric] = ()
    workers: Workers = "processes"
    name: str = "line"
    folder: str | Path = "runs"
    settings: Mapping[str, object] = field(default_factory=dict)  # other keys of the plan: "recovery.lease"
    broker: str | None = None  # where workers on other machines find the broker; None: there are none
    trainable: Sequence[str] | None = None  # patterns of names; None: what requires a gradient
    features: Sequence[FeatureMaker] = ()  # the outermost first
    taps: Sequence[str] | None = None  # patterns of names of layers; None: nothing is stored
    weights: str | Path | None = None  # where workers read their weights from; None: the model has them
    accept_difference: bool = False  # whether a traced model may compute something other than its forward
    progress: bool | None = None  # whether it is drawn; None: if stderr is a terminal

    @property
    def loads_weights(self) -> bool:
        """Whether weights are read from files."""
        return self.weights is not None or any(map(is_weights_path, self.settings))

    @property
    def named_metrics(self) -> Mapping[str, Metric]:
        """The metrics by their own names; their places tell those apart that have none, or the same. Workers on other
        machines have them by the same names."""
        return dict(zip(numbered([_own_name(metric) for metric in self.metrics]), self.metrics, strict=True))


def _own_name(metric: Metric) -> str:
    """That of the function that a partial calls."""
    while isinstance(metric, partial):
        metric = metric.func
    return str(getattr(metric, "__name__", type(metric).__name__)).strip("<>")


def build_model(model: Model, options: LineOptions) -> tuple[Any, list[Segment]]:
    """The model and its stages; a factory is called under the seed, and leaves the random state of this process as it
    was. Weights that are read from files are not there yet. Raises `ModelRefused`."""
    make, cut, stages = factory_of(model), options.cut, options.stages
    with generators_kept(torch.device("cpu")):
        return make_segments(
            make,
            options.seed,
            cut,
            stages,
            options.trainable,
            stored=options.loads_weights,
            accept_difference=options.accept_difference,
        )


def factory_of(model: Model) -> Callable[[], Any]:
    """What makes the model: `model` itself if it is a factory."""
    if isinstance(model, torch.nn.Module | Layers | list | tuple):
        return lambda: model
    return model  # type: ignore[return-value]  # a module is callable, too


@contextmanager
def registered(model: Model, options: LineOptions) -> Iterator[None]:
    """A context in which the script's objects have the names that the plan calls them by. A process that is forked in
    it keeps them; this one needs them no longer."""
    objects = {
        "model": factory_of(model),
        "loss": options.loss,
        "optimizer": options.optimizer,
        "lr_scheduler": options.lr_scheduler,
        **options.named_metrics,
        **{f"feature_{place}": each for place, each in enumerate(options.features)},
    }
    OBJECTS.update(objects)
    try:
        yield
    finally:
        for name in objects:
            OBJECTS.pop(name, None)


def plan_of(options: LineOptions, stages: int, remote: Mapping[str, object] | None = None) -> Plan:
    """The plan of a run of `stages` stages that a script drives; with `remote`, these keys are as given there. Raises
    `PlanRefused`."""
    placement = options.placement or [(stage,) for stage in range(stages)]
    workers = {
        str(index): {"stages": list(owned), "device": str(options.device), "threads": options.threads}
        for index, owned in enumerate(placement)
    }
    tables: dict[str, Any] = {
        "run": {"name": options.name, "seed": options.seed, "dir": str(options.folder)},
        "model": {
            "factory": "script:model",
            "loss": "script:loss",
            "metrics": [f"script:{name}" for name in options.named_metrics],
            **({"cut": list(options.cut)} if options.cut is not None else {"stages": stages}),
        },
        "data": {"source": SCRIPT_BATCHES, "batch_size": options.microbatches},
        "schedule": {
            "name": options.schedule,
            "microbatches": options.microbatches,
            "accumulate": options.accumulate,
        },
        "optimizer": {"factory": "script:optimizer"},
        "workers": workers,
    }
    if options.features:
        tables["features"] = [f"script:feature_{place}" for place in range(len(options.features))]
    if options.weights is not None:  # another machine has a path of its own
        tables["model"]["weights"] = str(Path(options.weights).absolute())
    if options.trainable is not None:
        tables["model"]["trainable"] = list(options.trainable)
    if options.taps is not None:
        tables["taps"] = {"layers": list(options.taps)}
    if options.window is not None:
        tables["schedule"]["window"] = list(options.window)
    if options.autocast is not None:
        tables["model"]["autocast"] = options.autocast
    if options.recompute is not None:
        wanted = options.recompute
        tables["memory"] = {"recompute": wanted if isinstance(wanted, str) else list(wanted)}
    if options.accept_difference:
        tables["model"]["accept_difference"] = True
    if options.clip_norm is not None:
        tables["optimizer"]["clip_norm"] = options.clip_norm
    if options.ema_decay is not None:
        tables["optimizer"]["ema_decay"] = options.ema_decay
    if options.groups is not None:
        tables["optimizer"]["groups"] = options.groups
    if options.lr_scheduler is not None:
        tables["lr_scheduler"] = {"factory": "script:lr_scheduler", "every": options.lr_every}
    for table, keys in (remote or {}).items():
        tables[table] = {**tables.get(table, {}), **keys} if isinstance(keys, Mapping) else keys
    sets = [f"{key}={_as_toml(value)}" for key, value in options.settings.items()]
    return from_mapping(tables, sets=sets).resolved(stages)


def _as_toml(value: object) -> object:
    """Python's True and False have other names in a plan."""
    return str(value).lower() if isinstance(value, bool) else value
