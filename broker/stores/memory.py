"""Keeps a run as long as the process lives: the reference, and the store of a run in one process."""

from collections.abc import Mapping, Sequence

import msgspec

from stageline.broker.control.records import StepRecord

from .base import KEPT_STEPS, Fact, StoredRun, steps_finished


class MemoryStore:
    """See `Store`."""

    def __init__(self, kept_steps: int = KEPT_STEPS) -> None:
        self._kept_steps = kept_steps
        self.begin()

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        for record in records:
            slot = record.stage, record.step % self._kept_steps
            if slot not in self._records or self._records[slot].step < record.step:
                self._records[slot] = record
        for step, loss in losses.items():
            self._losses.setdefault(step, loss)

    def put(self, name: str, fact: Fact) -> None:
        self._facts[name] = msgspec.json.encode(fact)  # what comes back is what any other store gives back

    def load(self) -> StoredRun:
        facts = {name: msgspec.json.decode(text, type=Fact) for name, text in self._facts.items()}
        return StoredRun(facts, steps_finished(self._records.values()), dict(self._losses))

    def record(self, stage: int, step: int) -> StepRecord | None:
        record = self._records.get((stage, step % self._kept_steps))
        return StepRecord(stage, step, record.times) if record is not None and record.step == step else None

    def begin(self) -> None:
        self._records: dict[tuple[int, int], StepRecord] = {}
        self._losses: dict[int, float | None] = {}
        self._facts: dict[str, bytes] = {}

    def go_back(self, stages: Sequence[int], step: int) -> None:
        self._records = {slot: r for slot, r in self._records.items() if r.stage not in stages or r.step < step}

    def close(self) -> None:
        """Nothing is open."""
