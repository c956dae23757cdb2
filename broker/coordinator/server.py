"""The broker process: receives sentences, lets the core decide, sends what it says."""

from collections.abc import Callable, Sequence
from contextlib import closing
from time import monotonic, time

import structlog

from stageline.broker.control.channel import ServerChannel, open_server
from stageline.broker.control.protocol import CONTROL_VERSION, Refused, decode_to_broker, encode
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.pipeline.exit_code import ExitCode

from .assignments import Outgoing
from .coordinator import Coordinator

TURN = 0.05  # seconds that a turn waits for something to come
LINGER = 30.0  # seconds that a broker stays after its run and its workers, for whoever asks how it ended
PARTING = 2.0  # seconds that it waits for the workers to leave once somebody has stopped the run
STEP_END = 7.0  # seconds that it waits for workers which finish a step, and leave a snapshot of it
_UNREADABLE = Refused(
    f"this is not a sentence of control version {CONTROL_VERSION}, the only one this broker speaks; "
    "install the same stageline on both sides",
    code=ExitCode.FAILED,
)

log = structlog.get_logger()


def serve(
    core: Coordinator,
    url: str,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_bound: Callable[[str], None] = lambda endpoint: None,
    linger: float = LINGER,
) -> None:
    """Serves until `stop()` is true, or the run is over and nobody needs the broker any more.

    `stop` is asked some twenty times a second; `on_bound` is called with the endpoint that can be connected to.
    `linger`: seconds to stay after the run for commands that ask about it. Raises `EndpointTaken`, `StoreUnusable`;
    at a Redis server `RedisUnfit`, and `RedisAway` if it is not there at the start.
    """
    with closing(open_server(url)) as office:
        on_bound(office.endpoint)
        attend(core, office, stop=stop, linger=linger)


def attend(
    core: Coordinator, office: ServerChannel, *, stop: Callable[[], bool] = lambda: False, linger: float = LINGER
) -> None:
    """`serve` in an office that is open."""
    clock, leaving = wall_clock(), _Leaving(core, linger)
    while not (stop() or leaving.is_due()):
        heard = office.heard(TURN)
        if heard is not None:  # else the core learns from its next turn that it was away
            _turn(core, office, heard, clock)


def wall_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, from then on by a clock that is never set back."""
    offset = time() - monotonic()
    return lambda: monotonic() + offset


def _turn(
    core: Coordinator, office: ServerChannel, heard: Sequence[tuple[bytes, bytes | None]], clock: Callable[[], float]
) -> None:
    sends: list[Outgoing] = []
    for sender, words in heard:
        try:
            sends += core.handle(sender, decode_to_broker(words or b""), clock())
        except ForeignMessage:
            sends.append((sender, _UNREADABLE))
        except BadMessage:  # what matters is said again
            core.journal.odd("damaged", "a sentence arrived damaged")
    sends += core.tick(clock())
    office.say((recipient, encode(sentence)) for recipient, sentence in sends)
    _log_news(core)


def _log_news(core: Coordinator) -> None:
    journal = core.journal
    for warning in journal.warnings:  # first: what else is news often follows from them
        log.warning(warning)
    for news in journal.news:
        log.info(news)
    journal.news.clear()
    journal.warnings.clear()


class _Leaving:
    """Knows when nobody needs the broker any more."""

    def __init__(self, core: Coordinator, linger: float) -> None:
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
