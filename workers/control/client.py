"""Asks the broker: one question, one answer, within a bound."""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic, time
from typing import Any

from stageline.broker.control.messages import (
    Answer,
    Ask,
    Declined,
    Exited,
    FromBroker,
    Refused,
    StopRun,
    ToBroker,
)
from stageline.broker.control.protocol import Sealer, decode_from_broker
from stageline.broker.control.records import LONGEST_NAME
from stageline.broker.errors import AddressUnusable, BadMessage
from stageline.broker.transports.base import open_client
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode, StagelineError

REPEAT = 0.25  # seconds between two looks whether a connection broke, and a question with it


class BrokerUnreachable(StagelineError):
    """No broker answers at the given address."""

    exit_code = ExitCode.NO_BROKER


class NoAnswer(BrokerUnreachable):
    """The address can be used, but nothing there answers as a broker does."""


class Client(AbstractContextManager["Client"]):
    """A command's connection to the broker at `url`, for one thread. Raises `BrokerUnreachable`.

    `secret` gives the run's control secret as of now, with which messages are sealed (b"": it is not known). Without
    it, the broker answers questions, and refuses all else.
    """

    def __init__(self, url: str, secret: Callable[[], bytes] = bytes) -> None:
        self._url = url
        self._secret = secret
        self._sealer = Sealer(time)
        self._unsealed: list[ToBroker] = []
        self._connected = False  # ever
        try:
            self._channel = open_client(url, keeps=True)
        except AddressUnusable as error:
            raise BrokerUnreachable(str(error)) from error

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def ask(self, what: str, timeout: float = 3.0, **of: str) -> dict[str, Any]:
        """The facts of the broker's answer. Raises `BrokerUnreachable`, or `ValueError` if it refuses to answer."""
        while self._channel.receive(0) is not None:  # answers to questions that were given up
            continue
        self._send(Ask(what, of))
        deadline = monotonic() + timeout
        while (left := deadline - monotonic()) > 0:
            if self._broke():
                self._send(Ask(what, of))
            match self._receive(min(left, REPEAT)):
                case Answer(schema, facts) if schema.startswith(f"{what}/"):
                    return {"schema": schema, **facts}
                case Refused(reason, _):
                    raise ValueError(reason)
        if self._channel.trouble:
            raise BrokerUnreachable(f"no broker can be reached: {self._channel.trouble}")
        raise NoAnswer(
            f"no broker answered at {masked(self._url)} within {timeout:g} s. Is the run still going, and is this its "
            f"broker? Name another with --broker."
        )

    def stop_run(self, reason: str, *, at_step_end: bool = False) -> None:
        """Interrupts the run.

        `at_step_end`: where snapshots are written, the stages finish a step, and exit with its checkpoint.
        """
        self._send(StopRun(reason, at_step_end))

    def dismiss(self) -> None:
        """The run is over, and no more queries will come: the broker may exit."""
        self._send(StopRun("the run is over", over=True))

    def decline(self, reason: str, timeout: float = 1.0) -> None:
        """Tells that this process does not join, so that the script can say why. Returns once that has arrived, or
        after `timeout` seconds."""
        self._send(Declined(socket.gethostname(), os.getpid(), reason[:LONGEST_NAME]))
        deadline = monotonic() + timeout
        while (left := deadline - monotonic()) > 0:
            match self._receive(left):
                case Answer("declined/1"):
                    return

    def exited(self, index: int, pid: int, status: int, result: int | None, detail: str) -> None:
        """Reports that the process of a worker has exited, with `status` as `subprocess` gives it; the other two are
        described at `Exited`."""
        self._send(Exited(index, pid, status, result, detail))

    def _send(self, message: ToBroker) -> None:
        """A message that is lost shows in `ask`, which gets no answer. What must be sealed waits for the secret, which
        is there once the broker is."""
        secret = self._secret()
        self._unsealed.append(message)
        due = self._unsealed if secret else [each for each in self._unsealed if isinstance(each, Ask | Declined)]
        self._unsealed = [each for each in self._unsealed if each not in due]
        try:
            for each in due:
                self._channel.send(self._sealer.sealed(each, secret))
        except AddressUnusable as error:
            raise BrokerUnreachable(str(error)) from error

    def _broke(self) -> bool:
        """Whether there is a new connection in place of one that ended, and with it a question or its answer."""
        renewed = self._channel.renewed()
        again, self._connected = renewed and self._connected, renewed or self._connected
        return again

    def _receive(self, timeout: float) -> FromBroker | None:
        frame = self._channel.receive(timeout)
        try:
            return None if frame is None else decode_from_broker(frame).message
        except BadMessage:
            return None
