"""The interface of a store for the records that a broker needs after it was killed, and a store in memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from stageline.broker.control.records import StepRecord
from stageline.broker.errors import BrokerError

KEPT_STEPS = 100_000  # how many steps' times a store keeps for each stage, unless told otherwise

Fact = dict[str, object]  # of JSON's own types


class StoreUnusable(BrokerError):
    """Error that the broker's records cannot be opened, read or written.

    Mend: Mend the disk or the server that the message names, and resume the run: the snapshots are enough.

    Example: the records in runs/a/broker.sqlite cannot be read: database disk image is malformed
    """

    error_code = "SL318"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's records as a store has them, without the times of single steps."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    finished: Mapping[int, int] = field(default_factory=dict)  # stage -> steps
    losses: Mapping[int, float | None] = field(default_factory=dict)  # step -> loss


def steps_finished(records: Iterable[StepRecord]) -> dict[int, int]:
    """Return how many steps each stage has finished according to `records`, by stage."""
    finished: dict[int, int] = {}
    for record in records:
        finished[record.stage] = max(finished.get(record.stage, 0), record.step + 1)
    return finished


class Store(Protocol):
    """A store of one run's records, which survive if the process is killed right after a call returns.

    Writing a record twice has the effect of writing it once. Every method may raise `StoreUnusable`.
    """

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        """Keep finished steps and their losses, all or nothing.

        Times of old steps may be forgotten, losses never.
        """

    def put(self, name: str, fact: Fact) -> None:
        """Keep `fact` under `name` in place of the one before."""

    def load(self) -> StoredRun:
        """Return all that is kept."""

    def record(self, stage: int, step: int) -> StepRecord | None:
        """Return the record of `step` of `stage`, without its loss, or None if it is not kept."""

    def records(self, wanted: Sequence[tuple[int, int]]) -> list[StepRecord]:
        """Return the records of these stages and steps that are kept, without losses. At a server: one round trip."""

    def go_back(self, stages: Sequence[int], step: int) -> None:
        """Forget that the stages have finished `step` and later steps; losses stay."""

    def begin(self) -> None:
        """Forget everything: another run begins."""

    def close(self) -> None:
        """Close what the store holds open."""


class MemoryStore:
    """A store in memory, for runs and tests that need no records after the process."""

    def __init__(self, kept_steps: int = KEPT_STEPS) -> None:
        """Start empty; keep the times of `kept_steps` steps for each stage."""
        self._kept_steps = kept_steps
        self.begin()

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        """Keep finished steps and their losses. A step's loss is the first one given."""
        for record in records:
            slot = record.stage, record.step % self._kept_steps
            if slot not in self._records or self._records[slot].step < record.step:
                self._records[slot] = record
        for step, loss in losses.items():
            self._losses.setdefault(step, loss)

    def put(self, name: str, fact: Fact) -> None:
        """Keep `fact` under `name` in place of the one before."""
        self._facts[name] = msgspec.json.encode(fact)  # what comes back is what any other store gives back

    def load(self) -> StoredRun:
        """Return all that is kept. Facts have passed through JSON, as in every other store."""
        facts = {name: msgspec.json.decode(text, type=Fact) for name, text in self._facts.items()}
        return StoredRun(facts, steps_finished(self._records.values()), dict(self._losses))

    def record(self, stage: int, step: int) -> StepRecord | None:
        """Return the record of `step` of `stage`, without its loss, or None if it is not kept."""
        record = self._records.get((stage, step % self._kept_steps))
        return StepRecord(stage, step, record.times) if record is not None and record.step == step else None

    def records(self, wanted: Sequence[tuple[int, int]]) -> list[StepRecord]:
        """Return the records of these stages and steps that are kept."""
        found = (self.record(stage, step) for stage, step in wanted)
        return [record for record in found if record is not None]

    def begin(self) -> None:
        """Forget everything: another run begins."""
        self._records: dict[tuple[int, int], StepRecord] = {}
        self._losses: dict[int, float | None] = {}
        self._facts: dict[str, bytes] = {}

    def go_back(self, stages: Sequence[int], step: int) -> None:
        """Forget that the stages have finished `step` and later steps; losses stay."""
        self._records = {slot: r for slot, r in self._records.items() if r.stage not in stages or r.step < step}

    def close(self) -> None:
        """Do nothing: nothing is open."""
