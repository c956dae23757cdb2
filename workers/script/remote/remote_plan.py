"""The plan of a run whose workers are on other machines: where it differs, and which code it goes with."""

from collections.abc import Mapping
from dataclasses import dataclass

from stageline.broker.coordinator.run import ScriptCode
from stageline.workers.script.arguments.checks import check_address, queues_beside
from stageline.workers.script.arguments.script_plan import LineOptions, Model

from .names import code_of_names, named


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """The keys of the plan that differ from a run on this machine, by table, and the code that it goes with."""

    tables: Mapping[str, Mapping[str, object]]
    code: ScriptCode


def remote_plan(model: Model, options: LineOptions, broker: str) -> RemotePlan:
    """Of a run whose workers find the broker at `broker`. Raises `ModelRefused` for what has no name that can be sent,
    `ValueError` for an address that other machines cannot dial."""
    check_address(broker)
    factory = named("model", model)
    loss = named("loss", options.loss, factory=False)
    metrics = [named("metrics", metric, factory=False) for metric in options.metrics]
    optimizer = named("optimizer", options.optimizer)
    scheduler = None if options.lr_scheduler is None else named("lr_scheduler", options.lr_scheduler)
    tables: dict[str, Mapping[str, object]] = {
        "model": {
            "factory": factory.reference,
            "options": factory.options,
            "loss": loss.reference,
            "metrics": [metric.reference for metric in metrics],
        },
        "optimizer": optimizer.table,
        "broker": {"url": broker},
        "queues": {"url": queues_beside(broker)},
    }
    if scheduler is not None:
        tables["lr_scheduler"] = scheduler.table
    names = [factory, loss, optimizer, *metrics, *([] if scheduler is None else [scheduler])]
    return RemotePlan(tables, code_of_names(names))
