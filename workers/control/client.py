"""Asks the broker: one question, one answer, within a bound."""

from time import monotonic
from types import TracebackType
from typing import Any, Self

from stageline.broker.control.open import open_client
from stageline.broker.control.protocol import (
    Answer,
    Ask,
    Exited,
    FromBroker,
    Refused,
    StopRun,
    ToBroker,
    decode_from_broker,
    encode,
)
from stageline.broker.errors import AddressUnusable, BadMessage
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.plan.passwords import masked


class BrokerUnreachable(StagelineError):
    """No broker answers where one was looked for."""

    exit_code = ExitCode.NO_BROKER


class Client:
    """A command's line to the broker at `url`. Not for more than one thread. Raises `BrokerUnreachable`."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._box = open_client(url, keeps=True)
        except AddressUnusable as error:
            raise BrokerUnreachable(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._box.close()

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
        if self._box.trouble:
            raise BrokerUnreachable(f"no broker can be reached: {self._box.trouble}")
        raise BrokerUnreachable(
            f"no broker answered at {masked(self._url)} within {timeout:g} s. Is the run still going, and is this its "
            f"broker? Name another with --broker."
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
        """If it does not get there, `ask` will say so."""
        try:
            self._box.send(encode(sentence))
        except AddressUnusable as error:
            raise BrokerUnreachable(str(error)) from error

    def _receive(self, timeout: float) -> FromBroker | None:
        words = self._box.receive(timeout)
        try:
            return None if words is None else decode_from_broker(words)
        except BadMessage:
            return None
