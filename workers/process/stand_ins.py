"""Replacement of lost replicas on the machine of another replica, if the plan asks for it (`stage.N.elastic`).

    worker 1, with replica 1.0    asks the broker every second which places are empty, and since when
       └── worker 3, with 1.1     started here once nothing else has replaced it within recovery.lease

The microbatches of the lost replica are then computed here, by a process of their own, from the newest complete
checkpoint on. Its weights are those of the other replica at that step, so the snapshots of that replica will do.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import Any, Self

import structlog

from stageline.broker.control.records import LONGEST_NAME
from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.child import Interpreter
from stageline.pipeline.process.lifeline import LifelineOwner
from stageline.pipeline.schedule import Schedule
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.control.enrolling import JOIN

EVERY = 1.0  # seconds between two questions
LEFT = 10.0  # seconds for a process to exit by itself once the run is over

log = structlog.get_logger()


def places_to_take(facts: Mapping[str, Any], schedule: Schedule, elastic: frozenset[int], mine: int) -> list[int]:
    """Return the indexes of the places that worker `mine` takes now.

    A place is taken if it has been empty for a lease and has nothing but replicas of stages in `elastic`, and if `mine`
    is the first worker present that has other replicas of all of them.

    Args:
        facts: Status of the broker.
        schedule: Schedule of the run.
        elastic: Stages whose replicas stand in for each other.
        mine: Index of this worker.
    """
    present = [row["index"] for row in facts["workers"] if row["standing"] == "present"]
    empty = [row["index"] for row in facts["recovering"] if not row["given"] and row["since"] >= facts["plan"]["lease"]]
    return [place for place in empty if next(_able(schedule, elastic, present, place), None) == mine]


def _able(schedule: Schedule, elastic: frozenset[int], present: Sequence[int], place: int) -> "filter[int]":
    stage_of = schedule.replicas.stage
    wanted = {stage_of(copy) for copy in schedule.placement[place]}

    def has_replicas(worker: int) -> bool:
        return wanted <= elastic & {stage_of(copy) for copy in schedule.placement[worker]}

    return filter(has_replicas, present)


def elastic_stages(plan: Plan) -> frozenset[int]:
    """Return the stages whose replicas stand in for each other."""
    return frozenset(int(name) for name, table in (plan.stage or {}).items() if table.elastic and table.replicas > 1)


class StandIns:
    """Processes that a worker has started for other places. As a context, they end with it at the latest."""

    def __init__(
        self, schedule: Schedule, plan: Plan, mine: int, broker: tuple[str, KeyPair | None], command: Sequence[str]
    ) -> None:
        """Prepare to take places. The processes will run in the folder that is the current one now.

        Args:
            schedule: Schedule of the run.
            plan: Plan of the run.
            mine: Index of this worker.
            broker: Address of the broker, and the pair by which it knows this process.
            command: Arguments of the command `stageline` that run a worker of the same plan, without its place and its
                broker: the processes find the address in their environment, where no other user reads it.
        """
        self._schedule = schedule
        self._elastic = elastic_stages(plan)
        self._mine = mine
        self._broker, self._pair = broker
        self._command = command
        self._folder = os.getcwd()  # the user's code may change it
        self._started: dict[int, Interpreter] = {}
        self._lifeline = LifelineOwner()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stand-ins", daemon=True)

    def __enter__(self) -> Self:
        """Begin to ask the broker for empty places."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the processes to end, or, after an error, have them end with this worker."""
        self._over.set()
        self._thread.join(LEFT)
        if kind is not None:  # the run goes on, and has yet to be told that this worker leaves
            self._lifeline.close()
        for process in self._started.values():
            with suppress(TimeoutExpired):
                process.wait(LEFT)
        self._lifeline.close()

    def _watch(self) -> None:
        with suppress(BrokerUnreachable), Client(self._broker, pair=self._pair) as client:
            while not self._over.wait(EVERY):
                self._take_places(client)

    def _take_places(self, client: Client) -> None:
        """Take the places that are empty. A broker that does not answer is asked again: training goes on without it."""
        try:
            facts = client.ask("status")
        except (BrokerUnreachable, ValueError):
            return
        for place in places_to_take(facts, self._schedule, self._elastic, self._mine):
            if place not in self._started or self._started[place].poll() is not None:
                self._start(place)

    def _start(self, place: int) -> None:
        log.warning("taking the place of a lost replica", worker=place)
        name = f"worker-{place}-at-{self._mine}"[:LONGEST_NAME]
        end = self._lifeline.end
        place_options = ("--index", str(place), "--name", name, "--standing-in", "--lifeline", str(end))
        environment = {**os.environ, JOIN: self._broker}
        command = [*self._command, *place_options]
        self._started[place] = Interpreter("stageline", command, [end], cwd=self._folder, env=environment)
