"""Time series of a run for monitoring systems: each with its kind, unit and help text, and its values by labels.

`families` makes them of the broker's measures. Prometheus and OpenTelemetry get the same ones, so that a dashboard
knows them by one name. Names and units follow the conventions of Prometheus: seconds, bytes, ratios from 0 to 1. Labels
are places, stages, queues, causes and kinds: as many as the plan has, however long a run is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from stageline.broker.control.measures import QueueMeasures, RunMeasures, WorkerMeasures

PREFIX = "stageline"
EMPTY = RunMeasures(
    run="", name="", schedule="", mode="", phase="", paused=False, stalled=None, began=None,
    steps=0, finished=0, planned=None, bounds=[],
    took=[0], took_seconds=0.0, best=None, bubble=None, planned_bubble=None, loss=None, gradient_norm=None,
    evaluation={}, checkpoint=None, checkpoint_at=None, faulty=False, recovering=0, recoveries=0, recovery_seconds=0.0,
    oddities={}, workers=[], stages=[], queues=[],
)  # fmt: skip
"""Measures of a run of which nothing is known: their families are all that there are."""
PHASES = ("waiting", "running", "finished", "failed")


class SeriesKind(StrEnum):
    """Kind of a series: a counter never becomes less while a broker runs."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    """A value with its labels."""

    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's values: for each upper bound how many are at most so large, "+Inf" last, and their sum."""

    bounds: Sequence[tuple[str, float]]
    sum: float


@dataclass(frozen=True, slots=True)
class SeriesFamily:
    """A series with all its values.

    Attributes:
        name: Name, without the `_total` of a counter.
        kind: Kind.
        text: What it measures.
        unit: Unit, such as "seconds"; "" for a number of things.
        samples: Values; none of a histogram.
        buckets: Values of a histogram.
    """

    name: str
    kind: SeriesKind
    text: str
    unit: str
    samples: Sequence[Sample]
    buckets: Buckets | None = None

    @property
    def shown(self) -> str:
        """Name under which Prometheus knows it: "stageline_steps_total"."""
        return f"{self.name}_total" if self.kind is SeriesKind.COUNTER else self.name


Value = float | None
Values = Iterable[tuple[Value, Mapping[str, str]]]


def _family(kind: SeriesKind, name: str, text: str, values: Values, unit: str = "") -> SeriesFamily:
    samples = [Sample(float(value), labels) for value, labels in values if value is not None]
    return SeriesFamily(f"{PREFIX}_{name}", kind, text, unit, samples)


def _one(value: Value) -> Values:
    return [(value, {})]


def families(measures: RunMeasures | None) -> Iterator[SeriesFamily]:
    """Yield all series of a run; without measures, since no broker has answered, only the one that says so.

    The names and kinds are always the same; a series of which nothing is known has no values.
    """
    answered = 1.0 if measures is not None else 0.0
    yield _family(SeriesKind.GAUGE, "broker_up", "1 if the broker has answered this time, else 0.", _one(answered))
    if measures is not None:
        yield from _of_run(measures)
        yield from _of_steps(measures)
        yield from _of_recovery(measures)
        yield from _of_stages(measures)
        yield from _of_workers(measures)
        yield from _of_queues(measures)


def _of_run(run: RunMeasures) -> Iterator[SeriesFamily]:
    gauge = SeriesKind.GAUGE
    labels = {"run": run.run, "name": run.name, "schedule": run.schedule, "mode": run.mode}
    yield _family(gauge, "run_info", "1, with the id of the run and its schedule as labels.", [(1, labels)])
    phases = [(float(run.phase == phase), {"phase": phase}) for phase in PHASES]
    yield _family(gauge, "run_phase", "1 for the phase that the run is in, 0 for the others.", phases)
    yield _family(gauge, "run_paused", "1 while a person has paused the run, else 0.", _one(float(run.paused)))
    yield _family(
        gauge, "run_start_timestamp_seconds", "When workers first reported to this broker, since the epoch.",
        _one(run.began), "seconds",
    )  # fmt: skip
    yield _family(gauge, "finished_steps", "Steps that every stage has finished, in the whole run.", _one(run.finished))
    yield _family(gauge, "planned_steps", "Steps that the run trains.", _one(run.planned))
    yield _family(
        gauge, "last_step_age_seconds", "Time without a finished step, while the run goes on.", _one(run.stalled),
        "seconds",
    )  # fmt: skip
    yield _family(gauge, "best_steps_per_second", "Most steps per second so far, over 5 s or more.", _one(run.best))
    yield _family(
        gauge,
        "bubble_ratio",
        "Share of a step in which the busiest worker does not compute.",
        _one(run.bubble),
        "ratio",
    )
    yield _family(
        gauge, "planned_bubble_ratio", "The bubble that the schedule has if all stages take equally long.",
        _one(run.planned_bubble), "ratio",
    )  # fmt: skip
    yield _family(gauge, "loss", "Loss of the newest finished step.", _one(run.loss))
    yield _family(gauge, "gradient_norm", "Norm of the newest step's gradients.", _one(run.gradient_norm))
    found = [(float(value), {"metric": name}) for name, value in run.evaluation.items()]
    yield _family(gauge, "evaluation", "Values of the newest evaluation.", found)


def _of_steps(run: RunMeasures) -> Iterator[SeriesFamily]:
    yield _family(
        SeriesKind.COUNTER, "steps", "Steps that every stage has finished, each counted once.", _one(run.steps)
    )
    names = [*map(str, run.bounds), "+Inf"]
    buckets = Buckets(list(zip(names, map(float, accumulate(run.took)), strict=True)), run.took_seconds)
    yield SeriesFamily(
        f"{PREFIX}_step_seconds", SeriesKind.HISTOGRAM, "Time of a step at the last stage.", "seconds", (), buckets
    )


def _of_recovery(run: RunMeasures) -> Iterator[SeriesFamily]:
    gauge, counter = SeriesKind.GAUGE, SeriesKind.COUNTER
    yield _family(gauge, "checkpoint_step", "Step of the newest complete checkpoint.", _one(run.checkpoint))
    yield _family(
        gauge, "checkpoint_timestamp_seconds", "When the newest checkpoint was complete, since the epoch.",
        _one(run.checkpoint_at), "seconds",
    )  # fmt: skip
    yield _family(
        gauge, "broker_faulty", "1 while the broker cannot write its records, else 0.", _one(float(run.faulty))
    )
    yield _family(gauge, "recovering_workers", "Workers that are being replaced.", _one(run.recovering))
    yield _family(counter, "recoveries", "Lost workers whose place is at work again.", _one(run.recoveries))
    yield _family(
        counter, "recovery_seconds", "Time from a worker's loss until its place was at work again.",
        _one(run.recovery_seconds), "seconds",
    )  # fmt: skip
    kinds = [(count, {"kind": kind}) for kind, count in run.oddities.items()]
    yield _family(counter, "oddities", "Unexpected and harmless events that the broker has counted.", kinds)


def _of_stages(run: RunMeasures) -> Iterator[SeriesFamily]:
    counter = SeriesKind.COUNTER
    labelled = [(each, {"stage": each.stage, "worker": str(each.worker)}) for each in run.stages]
    yield _family(
        counter, "stage_steps", "Steps that a stage has computed, repeated ones included.",
        [(each.steps, labels) for each, labels in labelled],
    )  # fmt: skip
    yield _family(
        counter, "stage_compute_seconds", "Time in which a stage has computed.",
        [(each.computed, labels) for each, labels in labelled], "seconds",
    )  # fmt: skip
    idle = [
        (seconds, {**labels, "cause": cause}) for each, labels in labelled for cause, seconds in each.waited.items()
    ]
    yield _family(counter, "stage_idle_seconds", "Time in which a stage has waited, by cause.", idle, "seconds")


_WORKERS: Sequence[tuple[SeriesKind, str, str, str, str]] = (  # kind, field, name, text, unit
    (SeriesKind.GAUGE, "present", "worker_up", "1 if a process has the place and is not lost, else 0.", ""),
    (SeriesKind.COUNTER, "losses", "worker_losses", "Workers that were lost at this place, in the whole run.", ""),
    (SeriesKind.GAUGE, "heard", "worker_report_age_seconds", "Time since the worker's last report.", "seconds"),
    (SeriesKind.GAUGE, "idle", "worker_idle_ratio", "Share of the recent time without anything to compute.", "ratio"),
    (SeriesKind.COUNTER, "actions", "worker_actions", "Actions that the worker's process has completed.", ""),
    (SeriesKind.GAUGE, "memory", "worker_memory_bytes", "Memory of the worker's process.", "bytes"),
    (SeriesKind.GAUGE, "retained", "worker_retained_bytes", "Messages that the worker keeps for others.", "bytes"),
    (
        SeriesKind.GAUGE,
        "faulty",
        "worker_faulty",
        "1 while the worker lacks disk space, memory or descriptors, else 0.",
        "",
    ),
    (SeriesKind.GAUGE, "cut_off", "worker_cut_off", "1 while the server of its queues moves no messages, else 0.", ""),
    (
        SeriesKind.GAUGE,
        "ahead",
        "worker_clock_offset_seconds",
        "Seconds by which the broker's clock is ahead.",
        "seconds",
    ),
)
_QUEUES: Sequence[tuple[SeriesKind, str, str, str, str]] = (
    (SeriesKind.COUNTER, "put", "queue_put_messages", "Messages that were put.", ""),
    (SeriesKind.COUNTER, "taken", "queue_taken_messages", "Messages that were taken.", ""),
    (SeriesKind.COUNTER, "put_bytes", "queue_put_bytes", "Bytes that the producer's process has put.", "bytes"),
    (SeriesKind.COUNTER, "resent", "queue_resent_messages", "Messages that were sent again.", ""),
    (SeriesKind.COUNTER, "duplicates", "queue_duplicate_messages", "Messages that came again.", ""),
    (SeriesKind.COUNTER, "damaged", "queue_damaged_messages", "Messages that came damaged.", ""),
    (SeriesKind.COUNTER, "lost", "queue_requested_again", "Times that a message was requested again.", ""),
    (SeriesKind.GAUGE, "ready", "queue_ready_messages", "Messages put and not yet sent.", ""),
    (SeriesKind.GAUGE, "in_flight", "queue_in_flight_messages", "Messages sent, and not known to have arrived.", ""),
    (SeriesKind.GAUGE, "retained", "queue_retained_messages", "Messages kept for a replacement.", ""),
    (SeriesKind.GAUGE, "bytes", "queue_retained_bytes", "Bytes of the retained messages.", "bytes"),
    (SeriesKind.GAUGE, "credit_used", "queue_credit_used_messages", "Granted messages put and not yet taken.", ""),
    (SeriesKind.GAUGE, "credit_limit", "queue_credit_limit_messages", "Messages that the producer may be ahead.", ""),
    (SeriesKind.GAUGE, "oldest", "queue_oldest_age_seconds", "Age of the oldest retained message.", "seconds"),
)


def _of_workers(run: RunMeasures) -> Iterator[SeriesFamily]:
    rows: Sequence[WorkerMeasures] = run.workers
    for kind, field, name, text, unit in _WORKERS:
        yield _family(kind, name, text, [(getattr(row, field), {"worker": str(row.worker)}) for row in rows], unit)


def _of_queues(run: RunMeasures) -> Iterator[SeriesFamily]:
    rows: Sequence[QueueMeasures] = run.queues
    for kind, field, name, text, unit in _QUEUES:
        yield _family(kind, name, text, [(getattr(row, field), {"queue": row.queue}) for row in rows], unit)
