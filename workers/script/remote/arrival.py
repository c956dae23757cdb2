"""Waits until the workers on other machines have joined, and says which of them are missing, and which cannot join."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from stageline.broker.coordinator.run import RunPhase
from stageline.pipeline.printable import printable_line
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.script.arguments.checks import command_there

LOOK = 0.05  # seconds between two looks at the broker, and at who is missing
ANSWER_TIMEOUT = 1.0  # seconds for the broker to answer a question


@dataclass(frozen=True, slots=True)
class Absence:
    """The workers that are missing; why the broker did not answer when it was last asked, "" if it did; and what is
    known of processes that cannot join."""

    workers: list[int]
    unreachable: str
    declined: tuple[str, ...] = ()


def await_workers(
    client: Client,
    workers: int,
    patience: float,
    ended: threading.Event,
    tell: Callable[[str], object] = lambda line: None,
) -> Absence | None:
    """Returns None once all `workers` are there, or the run has `ended`; else, after `patience` seconds, what is
    missing: all of them until the broker has said otherwise. Each process that cannot join is told once."""
    missing, unreachable, deadline = list(range(workers)), "", monotonic() + patience
    told: dict[str, None] = {}  # in order
    while not ended.is_set() and monotonic() < deadline:
        try:
            status = client.ask("status", timeout=ANSWER_TIMEOUT)
        except BrokerUnreachable as error:  # it is started again
            unreachable = str(error)
        else:
            if status["phase"] != RunPhase.WAITING:
                return None
            missing, unreachable = status["missing"], ""
            for line in (_declined_line(row) for row in status["declined"]):
                if line not in told:
                    told[line] = None
                    tell(line)
        ended.wait(LOOK)
    return None if ended.is_set() else Absence(missing, unreachable, tuple(told))


def _declined_line(row: Mapping[str, Any]) -> str:
    """What the script says of a process that cannot join; what it says itself comes from the network."""
    return printable_line(f"a worker (process {row['pid']} on {row['host']}) cannot join: {row['reason']}")


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
