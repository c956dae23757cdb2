"""Endpoint of --metrics: from http://127.0.0.1:9464/metrics, Prometheus scrapes a run.

    Prometheus ──GET──> thread of the endpoint ──"measures"──> broker          at most once a second

The broker answers a scrape as it answers a command that reads; its answers are never older than a second. While it does
not answer, the endpoint says so: `stageline_broker_up 0`.

An endpoint that goes away in a run is an alert. So that the end of a run is none, the endpoint of a run that has
finished stays until its next regular scrape, which tells of the end.
"""

import shutil
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from http.server import HTTPServer
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, pairwise
from pathlib import Path
from platform import python_version
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Event, Thread
from time import monotonic
from typing import Any

import click

from stageline.broker.control.measures import RunMeasures
from stageline.broker.errors import EndpointTaken
from stageline.broker.transports.sockets.bind import taken
from stageline.pipeline.addresses import is_elsewhere
from stageline.pipeline.printable import printable_line
from stageline.workers.cli.output import say
from stageline.workers.runs.folder import RESULT
from stageline.workers.runs.packages import imported
from stageline.workers.runs.series import PREFIX, Sample, SeriesFamily, SeriesKind, families

from .measured import AskBroker, CachedMeasures, Monitoring

HOST, PATH = "127.0.0.1", "/metrics"
READS = 5.0  # seconds for a client to send some more of its request, and to take some more of the answer
WHOLE = 10.0  # seconds for all of it: then the connection is closed
LAST = 70.0  # seconds for the scrape that tells of the end of a run, at most; Prometheus scrapes once a minute
TURN = 0.05  # seconds from one look to the next whether the endpoint is to close
MOST = 8  # scrapes at a time; further connections are closed
LONGEST = 400  # characters of the text of an error
_PORTS = range(2**16)


class Address(click.ParamType[tuple[str, int]]):
    """Place to listen at: PORT on this machine alone, or HOST:PORT."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return host and port; fail for any other text."""
        host, colon, port = str(value).rpartition(":")
        if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) in _PORTS) or (colon and not host):
            text = printable_line(str(value))[:100]
            self.fail(f"{text!r} is not PORT or HOST:PORT, such as 9464 or 0.0.0.0:9464 (port 0: a free one)", param)
        if host == "*":
            self.fail(f"{value!r}: all interfaces of this machine are 0.0.0.0:{port}", param)
        return host.removeprefix("[").removesuffix("]") or HOST, int(port)


option = click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    type=Address(),
    help="Serve the run's measurements to Prometheus, at http://127.0.0.1:PORT/metrics or at HOST. 0: a free port.",
)


def surroundings(run: Path) -> Iterator[SeriesFamily]:
    """Yield the series about this process and the disk of the run's folder, which need no broker."""
    versions = {"version": _version("stageline"), "python": python_version(), "torch": _version("torch")}
    info = "1, with the versions of stageline, Python and torch as labels."
    yield SeriesFamily(f"{PREFIX}_build_info", SeriesKind.GAUGE, info, "", [Sample(1.0, versions)])
    with suppress(OSError):  # there is no such folder, or it cannot be asked
        disk = shutil.disk_usage(run)
        for name, text, value in (
            ("disk_free_bytes", "Free space on the disk of the run's folder, on this machine.", disk.free),
            ("disk_size_bytes", "Size of the disk of the run's folder, on this machine.", disk.total),
        ):
            yield SeriesFamily(f"{PREFIX}_{name}", SeriesKind.GAUGE, text, "bytes", [Sample(float(value), {})])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Collector:
    """Collector of prometheus_client, whose metrics are a run's series as of the scrape."""

    def __init__(self, series: Callable[[], Iterable[SeriesFamily]]) -> None:
        """Take the function that returns the series."""
        self._core = imported("prometheus_client.core", "metrics", "--metrics")
        self._series = series

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; a series without values is left out."""
        core = self._core
        kinds: Mapping[SeriesKind, Any] = {
            SeriesKind.COUNTER: core.CounterMetricFamily,
            SeriesKind.GAUGE: core.GaugeMetricFamily,
        }
        for each in self._series():
            if each.buckets is not None:
                found = core.HistogramMetricFamily(each.name, each.text, labels=(), unit=each.unit)
                found.add_metric((), each.buckets.bounds, each.buckets.sum)
                yield found
            elif each.samples:
                names = list(each.samples[0].labels)
                found = kinds[each.kind](each.name, each.text, labels=names, unit=each.unit)
                for sample in each.samples:
                    found.add_metric([sample.labels[name] for name in names], sample.value)
                yield found


class _Server(ThreadingMixIn, HTTPServer):
    """HTTP server with a bounded number of threads, and a bounded time for each connection.

    While it does not answer, before a run and after it, it closes connections at once.
    """

    daemon_threads = True
    request_queue_size = 64
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: Any, answers: Event) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        self.address_family = found[0]
        self._free = BoundedSemaphore(MOST)
        self._answers = answers
        self._open: dict[Any, float] = {}  # connections, with the times at which they are closed
        self._is_told = False
        super().__init__(found[4][:2], handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind, without a look for this machine's name, which may take seconds."""
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection if there are `MOST` threads, or nothing is answered now."""
        if self._answers.is_set() and self._free.acquire(blocking=False):
            self._open[request] = monotonic() + WHOLE
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(request, None)
            self._free.release()

    def service_actions(self) -> None:
        """End the connections whose time is over, which their threads notice."""
        for request, until in list(self._open.items()):
            if monotonic() >= until:
                with suppress(OSError):  # its thread has closed it
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell the first failure to answer; say nothing about a client that has left or sends no request."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) and not self._is_told:
            self._is_told = True
            text = printable_line(f"{type(error).__name__}: {error}")[:LONGEST]
            say(f"stageline: warning: --metrics: a scrape was answered with an error: {text}", err=True)


class Scrapes:
    """The newest scrapes of an endpoint, by which the next one is expected. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        """Start without any."""
        self._times: deque[float] = deque(maxlen=4)

    def note(self, now: float) -> None:
        """Note a scrape."""
        self._times.append(now)

    def due(self, now: float) -> float:
        """Return the seconds until the next scrape at the latest, up to LAST; 0 if none is expected."""
        apart = max((later - earlier for earlier, later in pairwise(self._times)), default=None)
        return 0.0 if apart is None else min(LAST, max(0.0, self._times[-1] + 1.5 * apart + 1.0 - now))


def _answer(handler: Any, answer: Callable[[Any], None], answered: Callable[[], None]) -> None:
    """Answer a scrape by `answer`, and with status 500 if that fails otherwise than by the connection."""
    try:
        answer(handler)
        answered()
    except OSError:
        raise
    except Exception:
        handler.send_error(500)
        raise


def _demand_host(address: tuple[str, int]) -> None:
    """Raise `EndpointTaken` if no address of this machine has the name."""
    try:
        socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except (socket.gaierror, ValueError) as error:
        raise EndpointTaken(
            f"--metrics: no address is known for the host {printable_line(address[0])[:100]!r}: take an address of "
            "this machine, 0.0.0.0 for all, or leave HOST out for this machine alone"
        ) from error


class ScrapeEndpoint(AbstractContextManager["ScrapeEndpoint"]):
    """Endpoint of a run, which has its port from the beginning and answers within `serving`."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Bind the port.

        Raises:
            EndpointTaken: The address cannot be bound.
            ExporterMissing: prometheus_client is not installed.
        """
        handler = imported("prometheus_client.exposition", "metrics", "--metrics").MetricsHandler
        registry = imported("prometheus_client.registry", "metrics", "--metrics").CollectorRegistry(auto_describe=False)
        self._registry, endpoint = registry, self
        host, port = address
        settings = {"registry": registry, "timeout": READS, "server_version": "stageline"}
        get = {"do_GET": lambda self: _answer(self, handler.do_GET, endpoint._answered)}
        made = type("Handler", (handler,), {**settings, **get})
        self._scrapes, self._told_end, self._end_is_known = Scrapes(), False, Event()
        _demand_host(address)
        self._answers = Event()
        try:
            self._server = _Server(address, made, self._answers)
        except OSError as error:
            where = f"[{host}]" if ":" in host else host
            raise EndpointTaken(f"--metrics: {taken(error, f'tcp://{where}:{port}').args[0]}") from error
        name = self._server.server_name
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{self._server.server_port}{PATH}"
        self._is_remote = is_elsewhere(host)
        self._thread = Thread(target=self._server.serve_forever, args=(TURN,), name="metrics-endpoint", daemon=True)

    def __enter__(self) -> "ScrapeEndpoint":
        """Begin to close connections, until `serving`."""
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Give the port back; of a run that has finished, once its end was scraped."""
        if kind is None and self._answers.is_set() and not self._end_is_known.is_set():
            self._await_scrape(self._scrapes.due(monotonic()))
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def serving(self, run: Path, ask: AskBroker) -> Iterator[None]:
        """Return a context in which scrapes are answered.

        Args:
            run: Folder of the run.
            ask: Asks its broker.
        """
        known = CachedMeasures(ask)
        self._registry.register(Collector(lambda: chain(surroundings(run), families(self._scraped(known)))))
        self._answers.set()  # before the address is told: who reads it may scrape at once
        say(f"stageline: metrics at {self.url}", err=True)
        if self._is_remote:
            say(
                "stageline: warning: every machine that reaches this port reads them, without a password: let a "
                "firewall decide, or leave HOST out of --metrics and put a proxy before it",
                err=True,
            )
        try:
            yield
            finished = (run / RESULT).exists()
        except BaseException:
            finished = False
            raise
        finally:
            if finished:
                known.finish()
            else:
                self._answers.clear()

    def _scraped(self, known: CachedMeasures) -> RunMeasures | None:
        """Return the measures for a scrape."""
        self._scrapes.note(monotonic())
        found = known()
        self._told_end = found is not None and found.phase == "finished"
        return found

    def _answered(self) -> None:
        """Note that a scrape has its answer."""
        if self._told_end:
            self._end_is_known.set()

    def _await_scrape(self, seconds: float) -> None:
        if seconds:
            say(
                f"stageline: --metrics: waits up to {seconds:.0f} s for the scrape that tells of the run's end; Ctrl-C "
                "ends the wait",
                err=True,
            )
            with suppress(KeyboardInterrupt):
                self._end_is_known.wait(seconds)


@contextmanager
def endpoint_at(address: tuple[str, int] | None) -> Iterator[Monitoring]:
    """Return a context whose value is `ScrapeEndpoint.serving` of an endpoint at `address`; None: it serves nothing.

    Raises `EndpointTaken` and `ExporterMissing`.
    """
    if address is None:
        yield lambda run, ask: nullcontext()
        return
    with ScrapeEndpoint(address) as endpoint:
        yield endpoint.serving
