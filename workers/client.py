"""Asks the broker: one question, one answer, within a bound."""

from time import monotonic
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from broker.control import Answer, Ask, Exited, FromBroker, Refused, StopRun, ToBroker, decode_from_broker, encode


class BrokerUnreachable(Exception):
    """No broker answers where one was looked for."""


class Client:
    """A command's line to the broker at `url`. Not for more than one thread. Raises `BrokerUnreachable`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 200)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        try:
            self._socket.connect(url)
        except zmq.ZMQError as error:
            self.close()
            raise BrokerUnreachable(f"cannot use {url}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def ask(self, what: str, timeout: float = 3.0, **of: str) -> dict[str, Any]:
        """The facts the broker answers with. Raises `BrokerUnreachable`, or `ValueError` if it will not answer."""
        self._send(Ask(what, of))
        deadline = monotonic() + timeout
        while (left := deadline - monotonic()) > 0:
            match self._receive(left):
                case Answer(schema, facts) if schema.startswith(f"{what}/"):
                    return {"schema": schema, **facts}
                case Refused(reason, _):
                    raise ValueError(reason)
                case _:
                    continue
        raise BrokerUnreachable(
            f"no broker answered at {self._url} within {timeout:g} s. Is the run still going, and is this its broker? "
            f"Name another with --broker."
        )

    def stop_run(self, reason: str, code: int, *, at_step_end: bool = False) -> None:
        """Ends the run for everybody; `code` is the exit code that the workers leave with.

        `at_step_end`: where snapshots are written, the stages finish a step and leave with a checkpoint of it.
        """
        self._send(StopRun(reason, code, at_step_end))

    def exited(self, index: int, pid: int, status: int) -> None:
        """Tells that the process of a worker is gone; `status` as `subprocess` gives it."""
        self._send(Exited(index, pid, status))

    def _send(self, sentence: ToBroker) -> None:
        try:
            self._socket.send(encode(sentence), zmq.NOBLOCK)
        except zmq.Again:  # hundreds of unanswered questions: the broker is away, which `ask` will say
            return

    def _receive(self, timeout: float) -> FromBroker | None:
        if not self._socket.poll(int(timeout * 1000)):
            return None
        try:
            return decode_from_broker(self._socket.recv())
        except msgspec.MsgspecError:
            return None
