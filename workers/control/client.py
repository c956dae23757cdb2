"""A command's questions to the broker: one question, one answer, within a time limit."""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic, time
from typing import Any

from stageline.broker.control.channel import ClientChannel
from stageline.broker.control.leaves import LeaveWorker
from stageline.broker.control.messages import (
    Answer,
    Ask,
    Declined,
    Exited,
    FromBroker,
    Refused,
    Request,
    StopRun,
    ToBroker,
)
from stageline.broker.control.pauses import PauseRun
from stageline.broker.control.protocol import Sealer, decode_from_broker
from stageline.broker.control.records import LONGEST_NAME
from stageline.broker.errors import AddressUnusable, BadMessage
from stageline.broker.keys.admission import KeyRefusal
from stageline.broker.keys.changes import KeyChange
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.base import open_client
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode, StagelineError

from .refusals import explained

REPEAT = 0.25  # seconds between two looks whether a connection broke, and a question with it


class BrokerUnreachable(StagelineError):
    """Error that no broker can be reached at an address.

    Mend: Start the broker or the script, or name its address with `--broker` or `--join`; docs/guides/two-machines.md
    has the ports that a firewall has to let through.

    Example: no broker answered at tcp://desk:7000 within 10 s. Start one with `stageline broker`, or name another with
    --broker.
    """

    error_code = "SL311"
    exit_code = ExitCode.NO_BROKER


class NoAnswer(BrokerUnreachable):
    """Error that nothing at an address answers as a broker does.

    Mend: See that the run is still going, and that the address is that of its broker; name another with `--broker`.

    Example: no broker answered at tcp://desk:7000 within 5 s. Is the run still going, and is this its broker? Name
    another with --broker.
    """

    error_code = "SL312"


class KeyRefused(BrokerUnreachable):
    """Error that what is at a broker's address takes no connection with the keys of this process.

    Mend: Run the command that the message names on the broker's machine, or paste the line that the broker prints.

    Example: the broker at tcp://desk:7000 does not admit the key of this machine. On the broker's machine:
    stageline keys admit k1.2n8Fh0XQb5q9Zr1jv7d3mS6tYcAeKpWuLxGiOoNnHfM

    Attributes:
        refusal: Reason. Only a key that is not admitted may be admitted later.
    """

    error_code = "SL606"
    exit_code = ExitCode.NOT_ADMITTED

    def __init__(self, refusal: KeyRefusal, url: str, pair: KeyPair | None) -> None:
        """Explain why `url`, which was dialled with `pair`, gives no connection."""
        super().__init__(explained(refusal, url, pair))
        self.refusal = refusal


class KeyMissing(BrokerUnreachable):
    """Error that the address of a broker on another machine has no key, by which the broker would be known.

    Mend: Paste the whole line that the broker printed. In a network that you trust, `broker.insecure = true` in the
    plan, or in `settings` of a script, on all sides does without keys.

    Example: tcp://desk:7000 has no key: paste the line that its broker printed, as in stageline worker --join
    'tcp://desk:7000#k1....', or set broker.insecure = true on all sides
    """

    error_code = "SL607"
    exit_code = ExitCode.NOT_ADMITTED


class RequestRefused(ValueError):
    """The error that a broker does not do what it was asked for: its reason, and the exit code `code`."""

    def __init__(self, reason: str, code: int) -> None:
        """Take the broker's words and its exit code."""
        super().__init__(reason)
        self.code = code


class Client(AbstractContextManager["Client"]):
    """A command's connection to the broker, for use by one thread."""

    def __init__(self, url: str, secret: Callable[[], bytes] = bytes, pair: KeyPair | None = None) -> None:
        """Open the connection.

        Args:
            url: The broker's address.
            secret: Returns the run's control secret as of now, which seals messages, or b"" if it is not known. Without
                the secret, the broker answers questions and refuses all other messages.
            pair: Pair by which the broker knows this process; None for an address without a key.

        Raises:
            BrokerUnreachable: The address cannot be used.
        """
        self._url = url
        self._pair = pair
        self._secret = secret
        self._sealer = Sealer(time)
        self._unsealed: list[ToBroker] = []
        self._connected = False  # ever
        self._channel = self._dial()

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._channel.close()

    def ask(self, what: str, timeout: float = 3.0, **of: str) -> dict[str, Any]:
        """Return the facts of the broker's answer, with the name of their schema under "schema".

        Args:
            what: The kind of facts, such as "status".
            timeout: Seconds to wait for the answer. The question is sent again after a lost connection.
            **of: Parameters of the question.

        Raises:
            BrokerUnreachable: No broker can be reached.
            KeyRefused: What is there takes no connection with these keys. The next question is sent over a new one.
            NoAnswer: No broker answered within `timeout`.
            ValueError: The broker refuses to answer.
        """
        return self._answer_to(Ask(what, of), what, timeout)

    def change_keys(self, wanted: KeyChange, timeout: float = 3.0) -> dict[str, Any]:
        """Have the broker change its keys; return the facts of its answer, as `ask` does.

        Args:
            wanted: The change.
            timeout: Seconds to wait for the answer. The request is sent again after a lost connection.

        Raises:
            BrokerUnreachable, KeyRefused, NoAnswer: As of `ask`.
            ValueError: The broker does not carry it out.
        """
        return self._answer_to(wanted, "keys", timeout)

    def stop_run(self, reason: str, *, at_step_end: bool = False) -> None:
        """Interrupt the run.

        Args:
            reason: The reason, for people.
            at_step_end: True to let the stages, where snapshots are written, finish a step and exit with its
                checkpoint.
        """
        self._send(StopRun(reason, at_step_end))

    def request_stop(self, reason: str, *, at_step_end: bool, timeout: float = 3.0) -> dict[str, Any]:
        """Interrupt the run, as `stop_run` does, and return the status that follows.

        The run's secret is not needed if the key of this process may stop the run.

        Args:
            reason: The reason, for people.
            at_step_end: True to let the stages finish a step.
            timeout: Seconds to wait for the broker. The request is sent again after a lost connection.

        Raises:
            BrokerUnreachable, KeyRefused, NoAnswer: As of `ask`.
            ValueError: The broker refuses.
        """
        self._forget_answers()
        return self._await_answer(Ask("status"), "status", timeout, StopRun(reason, at_step_end))

    def request_pause(self, request: PauseRun, timeout: float = 3.0) -> dict[str, Any]:
        """Have the run pause, or go on, and return the facts of the answer.

        The run's secret is not needed if the key of this process may stop the run.

        Args:
            request: The request. The broker puts the name of a key in the place of its `by`.
            timeout: Seconds to wait for the broker. The request is sent again after a lost connection.

        Raises:
            BrokerUnreachable, KeyRefused, NoAnswer: As of `ask`.
            RequestRefused: The broker refuses.
        """
        self._forget_answers()
        return self._await_answer(Ask("status"), "pause", timeout, request)

    def request_leave(self, request: LeaveWorker, timeout: float = 3.0) -> dict[str, Any]:
        """Have a worker leave the run, and return the facts of the answer.

        The run's secret is not needed if the key of this process may stop the run.

        Args:
            request: The request. The broker puts the name of a key in the place of its `by`.
            timeout: Seconds to wait for the broker. The request is sent again after a lost connection.

        Raises:
            BrokerUnreachable, KeyRefused, NoAnswer: As of `ask`.
            RequestRefused: The broker refuses.
        """
        self._forget_answers()
        return self._await_answer(Ask("status"), "leave", timeout, request)

    def dismiss(self) -> None:
        """Tell the broker that it may exit: the run is over, and no more queries will come."""
        self._send(StopRun("the run is over", over=True))

    def decline(self, reason: str, timeout: float = 1.0) -> None:
        """Tell the broker that this process does not join, so that the script can say why.

        Returns once that has arrived, or after `timeout` seconds. `reason` is cut to LONGEST_NAME characters.
        """
        self._send(Declined(socket.gethostname(), os.getpid(), reason[:LONGEST_NAME]))
        deadline = monotonic() + timeout
        while (left := deadline - monotonic()) > 0:
            match self._receive(left):
                case Answer("declined/1"):
                    return

    def exited(self, index: int, pid: int, status: int, result: int | None, detail: str) -> None:
        """Report that the process of a worker has exited.

        Args:
            index: The worker's index.
            pid: The process's id.
            status: The exit status as `subprocess` gives it; negative if a signal killed the process.
            result: The exit code that the worker's command returned; None if it ended without returning one.
            detail: End of a sentence about an exit without a result, such as "in forward (model.py, line 12)".
        """
        self._send(Exited(index, pid, status, result, detail))

    def _answer_to(self, message: Ask | KeyChange, schema: str, timeout: float) -> dict[str, Any]:
        """Return the facts of the answer to `message`, whose schema begins with `schema`."""
        self._forget_answers()
        return self._await_answer(message, schema, timeout)

    def _forget_answers(self) -> None:
        """Drop answers to questions that were given up."""
        while self._channel.receive(0) is not None:
            continue

    def _await_answer(
        self, message: Ask | KeyChange, schema: str, timeout: float, request: Request | None = None
    ) -> dict[str, Any]:
        """Send `request`, then `message`; return the facts of the answer. A refusal of the request counts, too."""
        self._put(request, message)
        deadline = monotonic() + timeout
        while (left := deadline - monotonic()) > 0:
            if self._broke():
                self._put(request, message)
            match self._receive(min(left, REPEAT)):
                case Answer(name, facts) if name.startswith(f"{schema}/"):
                    return {"schema": name, **facts}
                case Refused(reason, code):
                    raise RequestRefused(reason, code)
            self._demand_admission()
        if self._channel.trouble:
            raise BrokerUnreachable(f"no broker can be reached: {self._channel.trouble}")
        raise NoAnswer(
            f"no broker answered at {masked(self._url)} within {timeout:g} s. Is the run still going, and is this its "
            f"broker? Name another with --broker."
        )

    def _put(self, request: Request | None, message: Ask | KeyChange) -> None:
        """Send a request, sealed or not, and the message that brings its answer."""
        if request is not None:
            self._channel.send(self._sealer.sealed(request, self._secret()))
        self._send(message)

    def _send(self, message: ToBroker) -> None:
        """Send `message`, and what waited for the secret before it.

        A message that must be sealed waits until the secret is known, which is once the broker is there. Loss of a
        message shows in `ask`, which gets no answer. Raises `BrokerUnreachable` if the address cannot be used.
        """
        secret = self._secret()
        self._unsealed.append(message)
        due = self._unsealed if secret else [each for each in self._unsealed if isinstance(each, Ask | Declined)]
        self._unsealed = [each for each in self._unsealed if each not in due]
        try:
            for each in due:
                self._channel.send(self._sealer.sealed(each, secret))
        except AddressUnusable as error:
            raise BrokerUnreachable(str(error)) from error

    def _dial(self) -> ClientChannel:
        """Return a new connection. Raises `BrokerUnreachable`."""
        try:
            return open_client(self._url, self._pair, keeps=True)
        except AddressUnusable as error:
            raise BrokerUnreachable(str(error)) from error

    def _demand_admission(self) -> None:
        """Raise `KeyRefused` if the keys were refused, after a new connection was begun: the old one stays refused."""
        if refusal := KeyRefusal(self._channel.refusal):
            self._channel.close()
            self._channel = self._dial()
            raise KeyRefused(refusal, self._url, self._pair)

    def _broke(self) -> bool:
        """Return True if a new connection replaced one that ended, so that a question or its answer may be lost."""
        renewed = self._channel.renewed()
        again, self._connected = renewed and self._connected, renewed or self._connected
        return again

    def _receive(self, timeout: float) -> FromBroker | None:
        frame = self._channel.receive(timeout)
        try:
            return None if frame is None else decode_from_broker(frame).message
        except BadMessage:
            return None
