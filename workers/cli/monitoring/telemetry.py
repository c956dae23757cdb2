"""OpenTelemetry of --otel: a run's numbers as metrics, and steps with their actions as spans, exported by OTLP.

    train or broker ──"measures", "timetable"──> broker          every few seconds
                    ──OTLP over HTTP──> collector                as the environment says

The metrics are those that Prometheus gets, by the same names. A step is a trace: its root is the step, its children are
the actions of all workers, and their waits. Of fast steps, the newest one is exported every few seconds. The SDK reads
the usual variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and OTEL_METRIC_EXPORT_INTERVAL.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import isfinite
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import click

from stageline.pipeline.printable import printable_line
from stageline.workers.cli.output import say
from stageline.workers.runs.packages import imported
from stageline.workers.runs.series import EMPTY, SeriesFamily, SeriesKind, families

from .measured import AskBroker, CachedMeasures, Monitoring
from .scraping import endpoint_at

EVERY = 5.0  # seconds between two looks at the steps: the broker computes what was planned for each
SPANS = 4000  # spans a second, on average
LAST = 2.0  # seconds for the last exports, of metrics and of spans at the same time
INTERVAL = "60000"  # milliseconds from one export of metrics to the next, unless the environment has another number
LONGEST_INTERVAL = 2.0**31  # milliseconds
SILENT, LONGEST = 60.0, 400  # seconds between two lines about a collector that does not answer; characters of one
_SDK, _OTLP = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"
_PROTOCOLS = ("", "http/protobuf")
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "": ""}
_KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "U": "update"}

_Read = Callable[[SeriesFamily], Iterable[tuple[float, Mapping[str, str]]]]  # values of a series with their labels

option = click.option(
    "--otel",
    is_flag=True,
    help="Export metrics, and steps as traces, by OpenTelemetry (OTLP), where OTEL_EXPORTER_OTLP_ENDPOINT says.",
)


def module(name: str) -> Any:
    """Return a module of OpenTelemetry. Raises `ExporterMissing`."""
    return imported(name, "otel", "--otel")


@contextmanager
def telemetry(*, on: bool) -> Iterator[Monitoring]:
    """Return a context whose value is `exporting`, or does nothing unless it is `on`.

    Raises:
        ExporterMissing: The packages are not installed.
        click.UsageError: The environment asks for another protocol than OTLP over HTTP, or has a value that is none.
    """
    if not on:
        yield lambda run, ask: nullcontext()
        return
    for name in (
        f"{_SDK}.metrics.export",
        f"{_SDK}.trace.export",
        f"{_OTLP}.metric_exporter",
        f"{_OTLP}.trace_exporter",
    ):
        module(name)
    with _told_seldom(logging.getLogger("opentelemetry")), LastExports() as ends:
        _demand_settings(os.environ)
        yield lambda run, ask: exporting(run, ask, ends)


def _demand_settings(environment: Mapping[str, str]) -> None:
    """Raise `click.UsageError` if the SDK would refuse the environment once the run has begun."""
    for signal in ("TRACES", "METRICS"):
        own, shared = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        name = own if environment.get(own) else shared
        if environment.get(name, "") not in _PROTOCOLS:
            raise click.UsageError(
                f"--otel: {name} is {environment[name]!r}, and only http/protobuf is built in: take that, and the "
                "collector's port for it, which is usually 4318"
            )
    try:
        module(f"{_OTLP}.metric_exporter").OTLPMetricExporter()
        module(f"{_SDK}.metrics").MeterProvider(shutdown_on_exit=False)
        module(f"{_SDK}.trace").TracerProvider(shutdown_on_exit=False)
        _span_processor().shutdown()
        _interval(environment)
    except ValueError as error:
        text = printable_line(str(error))[:LONGEST]
        raise click.UsageError(f"--otel: a variable OTEL_... has a value that cannot be used: {text}") from error


def _interval(environment: Mapping[str, str]) -> float:
    """Return the milliseconds from one export of metrics to the next. Raises `ValueError`."""
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    text = environment.get(name) or INTERVAL
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1 <= found < LONGEST_INTERVAL:
        raise ValueError(f"{name} is {text!r}, and has to be a number of milliseconds, such as 15000")
    return found


def _span_processor() -> Any:
    exporter = module(f"{_OTLP}.trace_exporter").OTLPSpanExporter()
    return module(f"{_SDK}.trace.export").BatchSpanProcessor(exporter, max_queue_size=4 * SPANS)


class LastExports(AbstractContextManager["LastExports"]):
    """Context of the last exports, which go on while a command prints its result, and end with one deadline.

    A collector that is gone, or takes and never answers, would be tried for long.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._threads: list[Thread] = []
        self._until = 0.0

    def begin(self, *shutdowns: Callable[[], object]) -> None:
        """Begin all at once; they have `LAST` seconds from now on."""
        self._until = monotonic() + LAST
        self._threads = [Thread(target=each, name="last-export", daemon=True) for each in shutdowns]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        """Wait until they are over, or the deadline is."""
        for thread in self._threads:
            thread.join(max(0.0, self._until - monotonic()))


@contextmanager
def monitoring(metrics: tuple[str, int] | None, *, otel: bool) -> Iterator[Monitoring]:
    """Return a context whose value shows a run to the monitoring systems of --metrics and --otel.

    Raises what `endpoint_at` and `telemetry` raise.

    Args:
        metrics: Address of --metrics; None without it.
        otel: True with --otel.
    """
    with endpoint_at(metrics) as serving, telemetry(on=otel) as telling:

        @contextmanager
        def shown(run: Path, ask: AskBroker) -> Iterator[None]:
            with serving(run, ask), telling(run, ask):
                yield

        yield shown


@contextmanager
def exporting(run: Path, ask: AskBroker, ends: LastExports) -> Iterator[None]:
    """Return a context in which a run is exported to the collector.

    Args:
        run: Folder of the run.
        ask: Asks its broker.
        ends: Takes the last exports.
    """
    metric_exporter = module(f"{_OTLP}.metric_exporter").OTLPMetricExporter()
    read_every = module(f"{_SDK}.metrics.export").PeriodicExportingMetricReader
    reader = read_every(metric_exporter, export_interval_millis=_interval(os.environ))
    say("stageline: metrics and traces go to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names", err=True)
    with observed(run, ask, reader, _span_processor(), ends):
        yield


class _Seldom(logging.Handler):
    """Handler that prints a line of the SDK once in `SILENT` seconds: it has one for each attempt to export."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._until = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        if monotonic() >= self._until:
            self._until = monotonic() + SILENT
            text = printable_line(record.getMessage())[:LONGEST]
            say(f"stageline: warning: OpenTelemetry: {text} (told once in {SILENT:g} s)", err=True)


@contextmanager
def _told_seldom(logger: logging.Logger) -> Iterator[None]:
    handler = _Seldom()
    logger.addHandler(handler)
    propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


@contextmanager
def observed(run: Path, ask: AskBroker, reader: Any, processor: Any, ends: LastExports) -> Iterator[None]:
    """Return a context in which a run is handed to OpenTelemetry.

    Args:
        run: Folder of the run.
        ask: Asks its broker.
        reader: Reader of metrics, of the SDK.
        processor: Processor of spans, of the SDK.
        ends: Takes the last exports.
    """
    resource = _resource(run)
    meters = module(f"{_SDK}.metrics").MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    register(meters.get_meter("stageline"), CachedMeasures(ask))
    tracers = module(f"{_SDK}.trace").TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(processor)
    over, tracer = Event(), tracers.get_tracer("stageline")
    thread = Thread(target=_follow, args=(StepSpans(tracer), ask, over), name="telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()

        def end_spans() -> None:
            thread.join()
            tracers.shutdown()

        ends.begin(end_spans, meters.shutdown)


def _resource(run: Path) -> Any:
    resources = module(f"{_SDK}.resources")
    attributes = {"stageline.run": run.resolve().name}
    if not resources.OTELResourceDetector().detect().attributes.get("service.name"):
        attributes["service.name"] = "stageline"
    return resources.Resource.create(attributes)


class _Found:
    """Series by name, which are made once of the same measures: there are some sixty instruments."""

    def __init__(self, measured: Callable[[], Any]) -> None:
        self._measured = measured
        self._of: object = self
        self._families: Mapping[str, SeriesFamily] = {}

    def __call__(self, name: str) -> SeriesFamily | None:
        measures = self._measured()
        if measures is not self._of:
            self._families = {family.name: family for family in families(measures)}
            self._of = measures
        return self._families.get(name)


def register(meter: Any, measured: Callable[[], Any]) -> None:
    """Register an instrument for each series of a run; a histogram becomes its sum and its count.

    Args:
        meter: Meter of OpenTelemetry.
        measured: Returns the measures of the run: the same object as long as they are the same.
    """
    observation, found = module("opentelemetry.metrics").Observation, _Found(measured)

    def observe(name: str, read: _Read, _: Any) -> list[Any]:
        """Return the values of a series; those that are not finite are left out, as the SDK would warn of each."""
        family = found(name)
        read_values = [] if family is None else read(family)
        return [observation(value, dict(labels)) for value, labels in read_values if isfinite(value)]

    def add(family: SeriesFamily, suffix: str, unit: str, read: _Read) -> None:
        counts = family.kind is not SeriesKind.GAUGE
        create = meter.create_observable_counter if counts else meter.create_observable_gauge
        create(f"{family.name}{suffix}", [partial(observe, family.name, read)], unit, family.text)

    for family in families(EMPTY):
        unit = _UNITS[family.unit]
        if family.kind is SeriesKind.HISTOGRAM:
            add(family, "_sum", unit, lambda each: [(each.buckets.sum, {})] if each.buckets else [])
            add(family, "_count", "", lambda each: [(each.buckets.bounds[-1][1], {})] if each.buckets else [])
        else:
            add(family, "", unit, lambda each: [(sample.value, sample.labels) for sample in each.samples])


class StepSpans:
    """Spans of steps: each step is exported once, and not more often than `SPANS` allows."""

    def __init__(self, tracer: Any) -> None:
        """Take the tracer."""
        self._tracer = tracer
        self._newest = -1
        self._pause = 0.0

    def add(self, facts: Mapping[str, Any]) -> None:
        """Add the newest step of an answer to "timetable"."""
        self._pause -= EVERY
        if self._pause > 0 or facts["step"] is None or facts["step"] <= self._newest:
            return
        step = facts["steps"][-1]
        self._newest = facts["step"]
        self._pause = (len(step["actions"]) + len(step["idle"])) / SPANS
        self._export(step)

    def _export(self, step: Mapping[str, Any]) -> None:
        root = self._span("step", {"step": step["step"], "schedule": step["schedule"]}, step["start"], None)
        within = module("opentelemetry.trace").set_span_in_context(root)
        for action in step["actions"]:
            attributes = {name: action[name] for name in ("stage", "worker", "microbatch", "kind")}
            name = _KINDS.get(action["kind"], "operation")
            _end(self._span(name, attributes, action["start"], within), action["end"])
        for idle in step["idle"]:
            attributes = {name: idle[name] for name in ("worker", "cause", "stage") if idle[name] is not None}
            _end(self._span("wait", attributes, idle["start"], within), idle["end"])
        _end(root, step["start"] + step["seconds"])

    def _span(self, name: str, attributes: Mapping[str, Any], start: float, within: Any) -> Any:
        named = {f"stageline.{key}": value for key, value in attributes.items()}
        return self._tracer.start_span(name, context=within, attributes=named, start_time=int(start * 1e9))


def _end(span: Any, at: float) -> None:
    span.end(int(at * 1e9))


def _follow(spans: StepSpans, ask: AskBroker, over: Event) -> None:
    """Export the newest step every `EVERY` seconds, until the run is over."""
    while not over.wait(EVERY):
        facts = ask("timetable")
        if facts is not None:
            spans.add(facts)
