"""Every key of a plan file, with the kind of its value. Defaults stand with the values they make, in `value.py`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stageline.pipeline import schedule

from . import kinds, urls, value


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the file: the value it makes, and the kinds of its keys.

    In a `free` table all other keys are arguments for its factory; an `optional` one may be absent.
    """

    makes: type[Any]
    keys: Mapping[str, kinds.KeyKind[Any]]
    free: bool = False
    optional: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """The keys without a default."""
        return tuple(field.name for field in dataclasses.fields(self.makes) if _has_no_default(field))


TABLES: Mapping[str, Table] = {
    "run": Table(
        value.RunPlan,
        {
            "name": kinds.NAME,
            "seed": kinds.whole(0),
            "steps": kinds.whole(1),
            "epochs": kinds.whole(1),
            "dir": kinds.FOLDER,
            "log_every": kinds.whole(1),
        },
    ),
    "model": Table(
        value.ModelPlan,
        {
            "factory": kinds.REFERENCE,
            "options": kinds.OPTIONS,
            "cut": kinds.CUT,
            "stages": kinds.NUMBER_OF_STAGES,
            "loss": kinds.REFERENCE,
            "metrics": kinds.REFERENCES,
        },
    ),
    "data": Table(value.DataPlan, {"source": kinds.REFERENCE, "options": kinds.OPTIONS, "batch_size": kinds.whole(1)}),
    "schedule": Table(
        value.SchedulePlan,
        {
            "name": kinds.choice(schedule.schedule_names()),
            "microbatches": kinds.MICROBATCHES,
            "mode": kinds.choice(("sync", "async")),
            "window": kinds.WINDOW,
        },
    ),
    "optimizer": Table(value.OptimizerPlan, {"factory": kinds.REFERENCE}, free=True),
    "lr_scheduler": Table(value.LrSchedulerPlan, {"factory": kinds.REFERENCE}, free=True, optional=True),
    "queues": Table(value.QueuesPlan, {"url": kinds.url(urls.QUEUES), "retain_bytes": kinds.SIZE}),
    "recovery": Table(
        value.RecoveryPlan,
        {
            "lease": kinds.SECONDS,
            "snapshot_every": kinds.whole(0),
            "restarts": kinds.whole(0),
            "on_bad_microbatch": kinds.choice(("halt", "skip")),
            "record": kinds.choice(("none", "bad", "all")),
        },
    ),
    "broker": Table(value.BrokerPlan, {"url": kinds.url(urls.BROKER), "store": kinds.url(urls.REDIS, "sqlite")}),
}

WORKER = Table(value.WorkerPlan, {"stages": kinds.STAGES, "device": kinds.DEVICE, "threads": kinds.whole(1)})

KEYS = tuple(f"{name}.{key}" for name, table in TABLES.items() for key in table.keys)


def _has_no_default(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
