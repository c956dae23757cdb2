"""The broker process: receives sentences over a ZeroMQ ROUTER, lets the core decide, sends what it says."""

from collections.abc import Callable, Iterator
from time import monotonic, time

import structlog
import zmq

from .binding import bind
from .control import CONTROL_VERSION, Refused, ToBroker, decode_to_broker, encode
from .core import Core
from .crew import Send

TURN = 50  # milliseconds that a turn waits for something to come
LINGER = 30.0  # seconds that a broker stays after its run and its workers, for whoever asks how it ended
PARTING = 2.0  # seconds that it waits for the workers to leave once somebody has stopped the run
STEP_END = 7.0  # seconds that it waits for workers which finish a step, and leave a snapshot of it
_BATCH = 1000  # sentences handled in one turn at most, so that leases and trims are not put off for ever
_LARGEST = 64 * 2**20  # bytes of a sentence; the digests of a very large model are the longest
_UNREADABLE = Refused(
    f"this is not a sentence of control version {CONTROL_VERSION}, the only one this broker speaks; "
    "install the same stageline on both sides",
    code=1,
)

log = structlog.get_logger()


def serve(
    core: Core,
    url: str,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_bound: Callable[[str], None] = lambda endpoint: None,
    linger: float = LINGER,
) -> None:
    """Serves until `stop()` is true, or the run is over and nobody needs the broker any more.

    `stop` is asked some twenty times a second; `on_bound` is called with the endpoint that can be connected to.
    `linger`: seconds to stay after the run for commands that ask about it. Raises `EndpointTaken`, `StoreUnusable`.
    """
    clock = wall_clock()
    with zmq.Context() as context, _router(context) as router:
        on_bound(bind(router, url))
        leaving = _Leaving(core, linger)
        while not (stop() or leaving.is_due()):
            router.poll(TURN)
            _turn(core, router, clock)


def wall_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, from then on by a clock that is never set back."""
    offset = time() - monotonic()
    return lambda: monotonic() + offset


def _router(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    router = context.socket(zmq.ROUTER)
    router.set(zmq.ROUTER_MANDATORY, 1)  # a recipient that is gone is an error here, not silence
    router.set(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects takes its old connection's place
    router.set(zmq.MAXMSGSIZE, _LARGEST)
    router.set(zmq.HANDSHAKE_IVL, 5000)
    router.set(zmq.TCP_KEEPALIVE, 1)
    router.set(zmq.LINGER, 500)
    return router


def _turn(core: Core, router: "zmq.Socket[bytes]", clock: Callable[[], float]) -> None:
    for sender, sentence in _heard(router):
        _say(router, core.handle(sender, sentence, clock()) if sentence else [(sender, _UNREADABLE)])
    _say(router, core.tick(clock()))
    _log_news(core)


def _heard(router: "zmq.Socket[bytes]") -> Iterator[tuple[bytes, ToBroker | None]]:
    """What has come, with its sender; None for what cannot be read."""
    for _ in range(_BATCH):
        try:
            sender, *frames = router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield sender, _read(frames)


def _read(frames: list[bytes]) -> ToBroker | None:
    if len(frames) != 1:
        return None
    try:
        return decode_to_broker(frames[0])
    except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError that msgspec does not make its own
        return None


def _say(router: "zmq.Socket[bytes]", sends: list[Send]) -> None:
    for recipient, sentence in sends:
        try:
            router.send_multipart([recipient, encode(sentence)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Gone, or so slow that its pipe is full. Whatever matters to it, it will ask for again.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise


def _log_news(core: Core) -> None:
    journal = core.journal
    for news in journal.news:
        log.info(news)
    for warning in journal.warnings:
        log.warning(warning)
    journal.news.clear()
    journal.warnings.clear()


class _Leaving:
    """Knows when nobody needs the broker any more."""

    def __init__(self, core: Core, linger: float) -> None:
        self._core = core
        self._linger = linger
        self._over: float | None = None  # since when

    def is_due(self) -> bool:
        core = self._core
        if core.outcome is None:
            return False
        if self._over is None:
            self._over = monotonic()
        if core.dismissed and core.everyone_left:
            return True
        return monotonic() - self._over >= self._patience()

    def _patience(self) -> float:
        core = self._core
        if core.outcome is not None and core.outcome.at_step_end and not core.everyone_left:
            return STEP_END
        return min(PARTING, self._linger) if core.stop_asked else self._linger
