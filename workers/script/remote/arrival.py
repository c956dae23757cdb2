"""Waits until the workers on other machines have joined, and says which of them are missing."""

import threading
from dataclasses import dataclass
from time import monotonic

from stageline.broker.coordinator.run import RunPhase
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.script.arguments.broker_address import command_there

LOOK = 0.05  # seconds between two looks at the broker, and at who is missing
ANSWER_TIMEOUT = 1.0  # seconds for the broker to answer a question


@dataclass(frozen=True, slots=True)
class Absence:
    """The workers that are missing, and why the broker did not answer when it was last asked, "" if it did."""

    workers: list[int]
    unreachable: str


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
