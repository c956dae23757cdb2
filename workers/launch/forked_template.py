"""A template process that is a fork of this one: what it forks has this process's objects, a script's model among them.

It is forked once. If it is killed, the processes that it forked go on, but none can be started in place of another.
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TextIO

from stageline.broker.ledger.losses import describe_status
from stageline.workers.process.system.fork import Fork

from .template import PROGRAM, Template

_LOG = 2  # stderr of this process, which its template writes to as well


class ForkedTemplate(Template):
    """Forks with the first request, or by `warm`, which comes before this process starts a thread."""

    def warm(self) -> None:
        if self._running is None:
            self._start()

    @property
    def gone(self) -> str:
        if self._running is None or (status := self._running.process.poll()) is None:
            return ""
        how = describe_status(status)
        return f"the process that has the script's model and functions (pid {self.pid}) {how}, and no other has them"

    def _ask(self, arguments: Sequence[str], log: TextIO, report: int) -> None:
        if self.gone:
            raise ProcessLookupError(self.gone)
        super()._ask(arguments, log, report)

    def _execute(self, arguments: Sequence[str], passed: Sequence[int]) -> Fork:
        return Fork(partial(_serve, arguments), _LOG, passed)

    def _give_up(self) -> str:
        super()._give_up()
        return self.gone


def _serve(arguments: Sequence[str]) -> int:
    code: int = import_module(PROGRAM).main(arguments)
    return code
