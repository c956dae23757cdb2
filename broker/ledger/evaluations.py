"""A run's rounds of evaluation, and the run's standing by them.

Each round is kept once. A replaced worker reports rounds again, with the same bits.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from math import isfinite

import msgspec

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.records import EvaluationRecord
from stageline.broker.control.store import Fact
from stageline.broker.errors import BrokerError
from stageline.pipeline.evaluation import Criterion, Rounds, Standing

_NAMED = "evaluation-"  # of the names under which rounds are stored


class EvaluationsDiffer(BrokerError):
    """Error that a round of evaluation, run twice, had two results: something is not deterministic.

    Mend: See that metric, data and model are deterministic (`stageline doctor`), and that software and hardware have
    not changed.

    Example: the evaluation after step 40 found loss 0.31, and loss 0.32 before: something in the run is not
    deterministic, or software or hardware have changed
    """

    error_code = "SL408"


class Evaluations:
    """The rounds of evaluation that workers have reported."""

    def __init__(self, criterion: Criterion | None = None) -> None:
        """Start without rounds; `criterion` compares them, None means that they are not compared."""
        self.criterion = criterion
        self._rounds: dict[int, EvaluationRecord] = {}
        self._steps: list[int] = []  # ascending
        self._standings: list[Standing] = []  # after the rounds of those

    def __iter__(self) -> Iterator[EvaluationRecord]:
        """Iterate over the rounds in the order of their steps."""
        return (self._rounds[step] for step in self._steps)

    @property
    def newest(self) -> EvaluationRecord | None:
        """The round of the highest step, or None."""
        return self._rounds[self._steps[-1]] if self._steps else None

    @property
    def newest_fact(self) -> Fact | None:
        """The newest round as a fact for JSON, or None."""
        return None if self.newest is None else fact_of(self.newest)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the newest round by name, empty without one."""
        return {} if self.newest is None else self.newest.metrics

    def add(self, record: EvaluationRecord) -> bool:
        """Add a round. Return False if it is known.

        Raises:
            EvaluationsDiffer: A known round had another result.
            KeyError: The round lacks the metric by which rounds are compared.
        """
        if (known := self._rounds.get(record.step)) is not None:
            if fact_of(known) != fact_of(record):
                raise EvaluationsDiffer(
                    f"the evaluation after step {record.step} found {told(record)}, and {told(known)} before: "
                    "something in the run is not deterministic, or software or hardware have changed"
                )
            return False
        if self.criterion is not None:
            _ = record.values[self.criterion.metric]
        self._rounds[record.step] = record
        in_order = not self._steps or record.step > self._steps[-1]
        insort(self._steps, record.step)
        self._judge(from_start=not in_order)
        return True

    def standing(self, step: int | None = None) -> Standing | None:
        """Return the standing after the rounds of up to `step` steps, or of all if `step` is None.

        Returns None if rounds are not compared.
        """
        if self.criterion is None:
            return None
        count = len(self._steps) if step is None else bisect_right(self._steps, step)
        return self._standings[count - 1] if count else Standing(self.criterion)

    def trim(self, step: int, rounds: Rounds | None) -> Trim | None:
        """Return the message that lets go of all before the checkpoint of `step`, except the best round's snapshots.

        The round after `step` steps does not count, even if it is known: what is kept then follows from the last
        stage's snapshot of `step`, which contains all earlier rounds.

        Returns None as long as one of those earlier rounds is not known, or `rounds`, all rounds of the run, is None. A
        broker that has lost its records is told them again.
        """
        if rounds is None or bisect_left(self._steps, step) < rounds.before(step):
            return None
        standing = self.standing(step - 1)
        return Trim(step, None if standing is None or standing.best is None else standing.best.step)

    def _judge(self, *, from_start: bool) -> None:
        """Bring the standings up to date, from the start or from the first round without one."""
        if self.criterion is None:
            return
        if from_start:
            self._standings.clear()
        standing = self._standings[-1] if self._standings else Standing(self.criterion)
        for step in self._steps[len(self._standings) :]:
            standing = standing.after(step, self._rounds[step].values)
            self._standings.append(standing)


def fact_of(record: EvaluationRecord) -> Fact:
    """Return the record as a fact for JSON.

    JSON has no number for "nan", "inf" and "-inf"; `float` reads these texts.
    """
    metrics = {name: _number(value) for name, value in record.metrics.items()}
    return {"step": record.step, "rows": record.rows, "loss": _number(record.loss), "metrics": metrics}


def record_of(fact: Mapping[str, object]) -> EvaluationRecord:
    """Return the record that a fact made by `fact_of` describes. Raises `ValueError` for any other fact."""
    found = msgspec.convert(fact, _Told)
    metrics = {name: float(value) for name, value in found.metrics.items()}
    return EvaluationRecord(found.step, found.rows, None if found.loss is None else float(found.loss), metrics)


def fact_name(record: EvaluationRecord) -> str:
    """Return the name under which the record is stored."""
    return f"{_NAMED}{record.step}"


def stored_in(facts: Mapping[str, Fact]) -> Iterator[EvaluationRecord]:
    """Return the rounds among a store's facts, in the order of their steps."""
    found = (record_of(fact) for name, fact in facts.items() if name.startswith(_NAMED) and fact)
    return iter(sorted(found, key=lambda record: record.step))


def told(record: EvaluationRecord) -> str:
    """Return the record as text for people: "loss 0.1234, accuracy 0.93"."""
    found = {"loss": record.loss, **record.metrics}
    return ", ".join(f"{name} {value:.6g}" for name, value in found.items() if value is not None)


def not_finite(record: EvaluationRecord) -> dict[str, float]:
    """Return the values of the record that are not finite, by name."""
    return {name: value for name, value in record.values.items() if value is not None and not isfinite(value)}


class _Told(msgspec.Struct, frozen=True):
    step: int
    rows: int
    loss: float | str | None
    metrics: dict[str, float | str]


def _number(value: float | None) -> float | str | None:
    return value if value is None or isfinite(value) else str(value)
