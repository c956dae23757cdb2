"""OpenTelemetry of --otel: the run's numbers are metrics, its steps are traces, and a collector gets both over HTTP."""

import gzip
import http.server
import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.monitoring import measured, telemetry
from stageline.workers.cli.monitoring.telemetry import LastExports, observed
from stageline.workers.runs.series import EMPTY, families
from support.measured import measures
from support.workspace import Workspace, until, wait_for


def action(kind: str, stage: int, start: float) -> dict[str, Any]:
    return {"kind": kind, "stage": stage, "microbatch": 3, "worker": stage, "start": start, "end": start + 0.5}


def step(number: int) -> dict[str, Any]:
    return {
        "step": number,
        "schedule": "1f1b",
        "start": 100.0 + number,
        "seconds": 2.0,
        "actions": [action("F", 0, 100.0 + number), action("B", 1, 101.0 + number), action("G", 1, 101.5 + number)],
        "idle": [{"worker": 1, "cause": "wire", "stage": 0, "start": 100.5 + number, "end": 101.0 + number}],
        "planned": [],
    }


class BrokerOfSteps:
    """Answers of a broker: each question about steps is answered with the next one of `steps`, the last for ever."""

    def __init__(self, *steps: int) -> None:
        self._steps = list(steps)

    def __call__(self, what: str) -> Mapping[str, Any] | None:
        if what == "measures":
            found: Mapping[str, Any] = msgspec.to_builtins(measures())
            return found
        if not self._steps:
            return {"step": None, "steps": []}
        number = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        return {"step": number, "steps": [step(number)]}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "EVERY", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # else a proxy of the machine is sent what is for the collector here
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # which comes first
    for name in ("OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def points(reader: InMemoryMetricReader) -> dict[str, list[tuple[dict[str, Any], float]]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: [(dict(point.attributes or {}), point.value) for point in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_every_series_is_a_metric_with_its_labels(tmp_path: Path):
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    with (
        LastExports() as ends,
        observed(tmp_path / "digits-1", BrokerOfSteps(), reader, SimpleSpanProcessor(spans), ends),
    ):
        found = points(reader)
    assert found["stageline_steps"] == [({}, 102)]
    assert ({"queue": "forward-1"}, 501) in found["stageline_queue_put_messages"]
    assert ({"stage": "1.0", "worker": "1", "cause": "disk"}, 404.5) in found["stageline_stage_idle_seconds"]
    assert (found["stageline_step_seconds_sum"], found["stageline_step_seconds_count"]) == ([({}, 42.5)], [({}, 4)])
    plain = {family.name for family in families(EMPTY)} - {"stageline_step_seconds"}
    assert plain <= found.keys()


def test_series_are_made_once_for_all_instruments_and_values_that_are_no_numbers_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(measured, "FRESH", 3600.0)
    made: list[object] = []
    monkeypatch.setattr(telemetry, "families", lambda of: made.append(of) or families(of))
    reader = InMemoryMetricReader()
    spans = SimpleSpanProcessor(InMemorySpanExporter())
    with LastExports() as ends, observed(tmp_path, BrokerOfSteps(), reader, spans, ends):
        made.clear()
        found = points(reader)
        assert len(made) == 1
    assert found["stageline_evaluation"] == [({"metric": "accuracy"}, 108.5)]
    assert not caplog.records


def test_only_ratios_have_the_unit_that_stands_for_them(tmp_path: Path):
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    telemetry.register(meters.get_meter("stageline"), measures)
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    assert {each.name for each in metrics if each.unit == "1"} == {
        "stageline_bubble_ratio", "stageline_planned_bubble_ratio", "stageline_worker_idle_ratio",
    }  # fmt: skip


def test_the_environment_names_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,place=lab")
    spans = InMemorySpanExporter()
    with (
        LastExports() as ends,
        observed(tmp_path / "digits-1", BrokerOfSteps(7), InMemoryMetricReader(), SimpleSpanProcessor(spans), ends),
    ):
        wait_for(lambda: len(spans.get_finished_spans()) > 0)
    named = spans.get_finished_spans()[0].resource.attributes
    assert (named["service.name"], named["place"], named["stageline.run"]) == ("mine", "lab", "digits-1")


def test_a_step_is_a_trace_of_its_actions_and_waits(tmp_path: Path):
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    with (
        LastExports() as ends,
        observed(tmp_path / "digits-1", BrokerOfSteps(7, 7, 8), reader, SimpleSpanProcessor(spans), ends),
    ):
        wait_for(lambda: len(spans.get_finished_spans()) >= 10)
    found = spans.get_finished_spans()
    roots = [each for each in found if each.parent is None]
    assert [(each.name, each.attributes["stageline.step"]) for each in roots] == [("step", 7), ("step", 8)]
    assert (roots[0].start_time, roots[0].end_time) == (107 * 10**9, 109 * 10**9)
    children = [each for each in found if each.parent and each.parent.span_id == roots[0].context.span_id]
    assert [each.name for each in children] == ["forward", "backward", "operation", "wait"]
    assert dict(children[0].attributes or {}) == {
        "stageline.stage": 0, "stageline.worker": 0, "stageline.microbatch": 3, "stageline.kind": "F",
    }  # fmt: skip
    assert dict(children[-1].attributes or {}) == {
        "stageline.worker": 1, "stageline.cause": "wire", "stageline.stage": 0,
    }  # fmt: skip
    assert children[0].resource.attributes["stageline.run"] == "digits-1"
    assert children[0].resource.attributes["service.name"] == "stageline"


def test_large_steps_are_exported_seldom(monkeypatch: pytest.MonkeyPatch):
    """Of every four answers, one is exported, as each has four spans and one a look is allowed."""
    exported: list[int] = []
    monkeypatch.setattr(telemetry, "EVERY", 1.0)
    monkeypatch.setattr(telemetry, "SPANS", 1)
    spans = telemetry.StepSpans(None)
    monkeypatch.setattr(spans, "_export", lambda found: exported.append(found["step"]))
    for number in range(12):
        spans.add({"step": number, "steps": [step(number)]})
    assert exported == [0, 4, 8]


class OtlpCollector(http.server.ThreadingHTTPServer):
    """A collector of OTLP over HTTP, on this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        self.metrics: list[str] = []
        self.spans: list[str] = []
        self.runs: set[str] = set()
        super().__init__(("127.0.0.1", 0), OtlpReceived)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, path: str, text: bytes) -> None:
        if path == "/v1/metrics":
            metrics = ExportMetricsServiceRequest.FromString(text)
            self.metrics += [m.name for r in metrics.resource_metrics for s in r.scope_metrics for m in s.metrics]
        elif path == "/v1/traces":
            traces = ExportTraceServiceRequest.FromString(text)
            self.spans += [span.name for r in traces.resource_spans for s in r.scope_spans for span in s.spans]
            resources = [each.resource for each in traces.resource_spans]
            self.runs |= {a.value.string_value for r in resources for a in r.attributes if a.key == "stageline.run"}


class OtlpReceived(http.server.BaseHTTPRequestHandler):
    server: OtlpCollector

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        packed = self.headers.get("Content-Encoding") == "gzip"
        self.server.take(self.path, gzip.decompress(text) if packed else text)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_gets_metrics_and_traces_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        monkeypatch.setattr(telemetry, "LAST", 60.0)
        with telemetry.telemetry(on=True) as shown, shown(tmp_path / "digits-1", BrokerOfSteps(7)):
            wait_for(lambda: "step" in server.spans)
            for _ in range(3):
                logging.getLogger("opentelemetry.exporter").warning("the collector is gone\n" + 1000 * "x")
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "gone" in line]  # once, in one line
    assert len(told) < 500
    assert sorted(server.spans) == ["backward", "forward", "operation", "step", "wait"]
    assert {"stageline_steps", "stageline_loss", "stageline_step_seconds_sum"} <= set(server.metrics)  # at the end
    assert server.runs == {"digits-1"}


class StuckProcessor(SimpleSpanProcessor):
    """A processor whose last export does not return before it is `released`, as with a collector that is silent."""

    def __init__(self) -> None:
        super().__init__(InMemorySpanExporter())
        self.began, self.released, self.returned = Event(), Event(), Event()
        self.was_waited_for = False

    def shutdown(self) -> None:
        self.began.set()
        self.was_waited_for = not self.released.wait(30)
        self.returned.set()


def test_a_collector_that_is_silent_holds_a_run_up_until_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The result is printed while the last exports go on; they are left alone when the command ends."""
    monkeypatch.setattr(telemetry, "LAST", 0.05)
    stuck = StuckProcessor()
    with LastExports() as ends:
        with observed(tmp_path, BrokerOfSteps(), InMemoryMetricReader(), stuck, ends):
            pass
        assert stuck.began.wait(30)
        assert not stuck.returned.is_set()
    stuck.released.set()
    assert stuck.returned.wait(60)
    assert not stuck.was_waited_for


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "often"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "nan"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_before_the_run(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
):
    monkeypatch.setenv(name, value)
    assert workspace.here("train", ".", "--otel") == ExitCode.USAGE
    assert f"{name} is {value!r}" in capsys.readouterr().err
    assert not workspace.runs()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "20000", "max_export_batch_size"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"),
    ],
)
def test_what_the_sdk_refuses_is_refused_before_the_run(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, value: str, told: str,
):  # fmt: skip
    monkeypatch.setenv(name, value)
    assert workspace.here("broker", ".", "--otel") == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "--otel: a variable OTEL_... has a value that cannot be used" in said
    assert told in said
    assert not workspace.runs()


@pytest.mark.parametrize("command", ["train", "broker"])
def test_without_the_package_the_command_to_install_it_is_named(
    command: str, workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics.export", None)
    assert workspace.here(command, ".", "--otel") == ExitCode.USAGE
    assert 'pip install "stageline[otel]"' in capsys.readouterr().err
    assert not workspace.runs()


@pytest.mark.slow
def test_a_run_is_exported_while_it_trains(workspace: Workspace):
    with collector() as server:
        settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": server.url, "OTEL_METRIC_EXPORT_INTERVAL": "200"}
        train = workspace.start("train", ".", "--otel", "--set", "run.steps=200000", **settings)
        until(train.stderr, "running")
        wait_for(lambda: "forward" in server.spans and "stageline_steps" in server.metrics)
        train.send_signal(signal.SIGINT)
        train.communicate()  # else a full pipe would hold it up
        assert train.wait() in (ExitCode.SAVED, ExitCode.INTERRUPTED)
    assert server.runs == {workspace.runs()[0].name}
