"""What the broker must still know after it was killed, and the promise of whatever keeps it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stageline.broker.control.records import StepRecord
from stageline.broker.errors import BrokerError

KEPT_STEPS = 100_000  # how many steps' times a store keeps for each stage, unless told otherwise

Fact = dict[str, object]  # of JSON's own types


class StoreUnusable(BrokerError):
    """The store cannot be opened, read or written; the text names it and the reason."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """All that a store knows, but for the times of single steps."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    finished: Mapping[int, int] = field(default_factory=dict)  # stage -> steps
    losses: Mapping[int, float | None] = field(default_factory=dict)  # step -> loss


def steps_finished(records: Iterable[StepRecord]) -> dict[int, int]:
    """stage -> how many steps it has finished, by the `records` that are kept."""
    finished: dict[int, int] = {}
    for record in records:
        finished[record.stage] = max(finished.get(record.stage, 0), record.step + 1)
    return finished


class Store(Protocol):
    """Keeps what it was given although the process is killed right after the call returns.

    Writing the same twice is writing it once. Every method may raise `StoreUnusable`.
    """

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        """Keeps finished steps and their losses, all or nothing. Old steps' times may be forgotten, losses never."""

    def put(self, name: str, fact: Fact) -> None:
        """Keeps `fact` under `name` in place of the one before."""

    def load(self) -> StoredRun:
        """All that is kept."""

    def record(self, stage: int, step: int) -> StepRecord | None:
        """One finished step of a stage (without its loss), None if it is not kept."""

    def go_back(self, stages: Sequence[int], step: int) -> None:
        """Forgets that the stages have finished `step` and those after it; losses stay."""

    def begin(self) -> None:
        """Forgets everything: another run begins."""

    def close(self) -> None:
        """Lets go of what the store holds open."""
