"""The broker process's loop: receives messages, lets the coordinator decide, sends what it returns."""

from collections.abc import Callable, Sequence
from time import monotonic, time

import structlog

from stageline.broker.control.channel import Received, ServerChannel
from stageline.broker.control.protocol import CONTROL_VERSION, Refused, decode_to_broker, encode
from stageline.broker.coordinator.assignments import Outgoing
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.events import EventLog
from stageline.broker.coordinator.run_state import RunState
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.pipeline.errors import ExitCode

TURN = 0.05  # seconds that a turn waits for the first message
LINGER = 30.0  # seconds that a broker stays after its run and its workers, to answer how it ended
LEAVING = 2.0  # seconds that it waits for the workers to leave after a stop request
STEP_END = 7.0  # seconds that it waits for workers which finish a step, and write a snapshot of it
_UNREADABLE = Refused(
    f"this is not a message of control protocol version {CONTROL_VERSION}, the only one this broker supports; "
    "install the same stageline on both sides",
    code=ExitCode.FAILED,
)

log = structlog.get_logger()


def serve_channel(
    coordinator: Coordinator,
    channel: ServerChannel,
    *,
    stop: Callable[[], bool] = lambda: False,
    linger: float = LINGER,
) -> None:
    """Serves until `stop()` is true, or the run is over and the broker is no longer needed.

    `stop` is called some twenty times a second. `linger`: seconds to stay after the run for commands that ask about it.
    Raises `StoreUnusable`.
    """
    clock, departure = _wall_clock(), _Departure(coordinator, linger)
    while not (stop() or departure.is_due()):
        received = channel.receive(TURN)
        if received is not None:  # else the coordinator learns from its next turn that it was away
            _turn(coordinator, channel, received, clock)


def _wall_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, from then on by a clock that is never set back."""
    offset = time() - monotonic()
    return lambda: monotonic() + offset


def _turn(
    coordinator: Coordinator, channel: ServerChannel, received: Sequence[Received], clock: Callable[[], float]
) -> None:
    sends: list[Outgoing] = []
    for sender, frame in received:
        try:
            sends += coordinator.handle(sender, decode_to_broker(frame or b""), clock())
        except ForeignMessage:
            sends.append((sender, _UNREADABLE))
        except BadMessage:  # its sender repeats what matters
            coordinator.events.count("damaged", "a message arrived damaged")
    sends += coordinator.tick(clock())
    channel.send((recipient, encode(message)) for recipient, message in sends)
    _write_log(coordinator.events)


def _write_log(events: EventLog) -> None:
    for warning in events.warnings:  # first: the other lines often follow from them
        log.warning(warning)
    for line in events.infos:
        log.info(line)
    events.infos.clear()
    events.warnings.clear()


class _Departure:
    """Decides when the broker is no longer needed."""

    def __init__(self, coordinator: Coordinator, linger: float) -> None:
        self._coordinator = coordinator
        self._linger = linger
        self._over: float | None = None  # since when

    def is_due(self) -> bool:
        if self._coordinator.outcome is None:
            return False
        if self._over is None:
            self._over = monotonic()
        if self._coordinator.state is RunState.DISMISSED and self._coordinator.all_left:
            return True
        return monotonic() - self._over >= self._patience()

    def _patience(self) -> float:
        """Seconds."""
        outcome = self._coordinator.outcome
        if outcome is not None and outcome.at_step_end and not self._coordinator.all_left:
            return STEP_END
        return min(LEAVING, self._linger) if self._coordinator.stop_requested else self._linger
