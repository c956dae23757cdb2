"""A script's run whose workers are on other machines: how its plan differs, and what the script says while it waits.

script ──forks──> launcher ──forks──> template ──forks──> broker (bound to `Line`'s broker=)
                                                             ▲
on each other machine:  stageline worker --join ADDRESS ─────┘  gets the plan, compares the code, and works
"""

import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from stageline.broker.control.open import REDIS
from stageline.broker.coordinator.run import RunPhase, ScriptCode
from stageline.pipeline.plan.addresses import EVERY_INTERFACE, fault, host_of, masked
from stageline.workers.control.client import BrokerUnreachable, Client

from .named import code_of_names, named
from .script_plan import LineOptions, Model

LOOK = 0.05  # seconds between two looks at the broker, and at who is missing
ANSWER_TIMEOUT = 1.0  # seconds for the broker to answer a question
_SCHEMES = ("tcp", "redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class JoinedTerms:
    """The keys of the plan that differ from a run on this machine, by table, and the code that it goes with."""

    tables: Mapping[str, Mapping[str, object]]
    code: ScriptCode


@dataclass(frozen=True, slots=True)
class Absence:
    """The workers that are missing, and why the broker did not answer when it was last asked, "" if it did."""

    workers: list[int]
    unreachable: str


def joined_terms(model: Model, options: LineOptions, broker: str) -> JoinedTerms:
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
    return JoinedTerms(tables, code_of_names(names))


def check_address(broker: str) -> None:
    """Raises `ValueError` for what no worker on another machine could dial."""
    found = fault(broker, _SCHEMES)
    if found is None and broker.startswith("tcp://") and broker.rpartition(":")[2].strip("0") in ("", "*"):
        found = "the port must be one that the other machines can be told"
    if found is not None:
        raise ValueError(
            f"broker = {masked(broker)!r} is not an address that workers on other machines can reach: "
            f"{found or 'it is of another kind'}. Write tcp://0.0.0.0:7000 to listen there, or redis://host:6379/0"
        )


def queues_beside(broker: str) -> str:
    """Where the script's own queues are: at the same server, or at another port of the same interface."""
    return broker.partition("#")[0] if broker.startswith(REDIS) else f"{broker.rpartition(':')[0]}:0"


def command_there(broker: str) -> str:
    """What to run on the other machines."""
    shown = masked(broker)
    if shown != broker:
        return f"stageline worker --join, with STAGELINE_BROKER__URL={shown} and its password in the environment"
    if host_of(broker) in EVERY_INTERFACE:
        shown = f"tcp://{socket.gethostname()}:{broker.rpartition(':')[2]}"
    return f"stageline worker --join {shown}"


def await_workers(client: Client, workers: int, patience: float, ended: threading.Event) -> Absence | None:
    """Returns None once all `workers` are there, or the run has `ended`; else, after `patience` seconds, what is
    missing: all of them until the broker has said otherwise."""
    missing, unreachable, deadline = list(range(workers)), "", monotonic() + patience
    while not ended.is_set() and monotonic() < deadline:
        try:
            status = client.ask("status", timeout=ANSWER_TIMEOUT)
        except BrokerUnreachable as error:  # it is started again
            unreachable = str(error)
        else:
            if status["phase"] != RunPhase.WAITING:
                return None
            missing, unreachable = status["missing"], ""
        ended.wait(LOOK)
    return None if ended.is_set() else Absence(missing, unreachable)


def say(*lines: str) -> None:
    """On stderr."""
    for line in lines:
        print(f"stageline: {line}", file=sys.stderr, flush=True)


def missing_line(missing: list[int], broker: str) -> str:
    """What the script says of workers that are `missing` at `broker`."""
    return (
        f"waiting for {workers_named(missing)}. On each machine, in the folder with your code: {command_there(broker)}"
    )


def workers_named(missing: list[int]) -> str:
    """ "worker 0", "workers 0 and 1"."""
    names = list(map(str, missing))
    if len(names) < 2:
        return f"worker {''.join(names)}"
    return f"workers {', '.join(names[:-1])} and {names[-1]}"
