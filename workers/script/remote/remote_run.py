"""A script's run whose workers are on other machines, and join its broker.

script ──forks──> launcher ──forks──> template ──forks──> broker (bound to `Line`'s broker=)
                                                             ▲
on each other machine:  stageline worker --join ADDRESS ─────┘  gets the plan, compares the code, and works

The script sees neither their snapshots nor the weights that they save. So it keeps the positions of checkpoints itself,
and has the weights sent before the run ends.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import cast

from torch import Tensor

from stageline.broker.control.messages import Assigned
from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.addresses import EVERY_INTERFACE, host_of
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Schedule
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.saved import NotSaved
from stageline.workers.control.client import Client
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.program.calls import CallKind, Position
from stageline.workers.script.arguments.checks import command_there
from stageline.workers.script.calls.calls import Replies, WeightNames
from stageline.workers.script.calls.driver import Driver
from stageline.workers.script.calls.news import say
from stageline.workers.script.processes.local_processes import LocalProcesses, start_processes
from stageline.workers.script.processes.process_run import JOIN_TIMEOUT, ProcessRun

from .arrival import LOOK, await_workers, missing_line, workers_named
from .positions import PositionFile


class RemoteRun(ProcessRun):
    """Like `ProcessRun`, but the broker alone is started, at `broker.url` of `plan`; the workers have `code`."""

    def __init__(
        self, plan: Plan, schedule: Schedule, names: WeightNames, resume: str | None, code: ScriptCode
    ) -> None:
        self._code = code
        self._weights: dict[bool, dict[str, Tensor]] = {}  # at the end; those of True are averages
        self._workers_timeout = plan.broker.patience
        super().__init__(plan, schedule, names, resume)
        self.cannot_save = (
            "the workers are on other machines, and have their snapshots there: keep the line's state_dict(), or go on "
            f"with the run itself: Line.resume({str(self.folder)!r}, ...)"
        )

    def submit(
        self,
        kind: CallKind,
        inputs: Tree = None,
        targets: Tree = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        ema: bool = False,
    ) -> "Future[Replies]":
        if kind is CallKind.TRAIN:
            self._positions.note(self._driver.position.after(kind))
        return super().submit(kind, inputs, targets, state, ema=ema)

    def close(self) -> None:
        self._open.detach()
        try:
            self._weights = {ema: self._fetched(ema=ema) for ema in (False, self._plan.averages)}
        except BaseException:
            self._stack.close()
            raise
        super().close()

    def save(self, folder: Path, call: Callable[[str], Replies]) -> None:
        raise NotSaved(self.cannot_save)

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        return dict(self._weights[ema])

    def abort(self, reason: str, *, knows_failure: bool = False, interrupted: bool = False) -> None:
        try:
            self._positions.keep()
        finally:
            super().abort(reason, knows_failure=knows_failure, interrupted=interrupted)

    def _fetched(self, *, ema: bool) -> dict[str, Tensor]:
        parts = cast("Mapping[int, dict[str, Tensor]]", self.submit(CallKind.STATE, ema=ema).result())
        return {name: tensor for part in parts.values() for name, tensor in part.items()}

    def _start(self, run: str, *, resume: bool) -> LocalProcesses:
        self._positions = PositionFile(self.folder, self._plan.recovery.snapshot_every)
        runs.remove_broker_url(self.folder)  # of a broker that was killed
        return start_processes(self._plan, run, resume=resume, code=self._code)

    def _join(self) -> Assigned:
        """Not before the broker listens: at an address that is in use, another one answers."""
        deadline = monotonic() + JOIN_TIMEOUT
        while runs.read_broker_url(self.folder) is None:
            if (outcome := self._processes.poll()) is not None:
                raise self._failure(outcome.reason, outcome.code)
            if monotonic() > deadline:
                raise self._failure(f"the broker does not listen after {JOIN_TIMEOUT:g} s", ExitCode.NO_BROKER)
            sleep(LOOK)
        every = list(range(len(self._plan.workers)))  # none can have joined yet
        say(*(f"warning: {warning}" for warning in self._plan.warnings), missing_line(every, self._plan.broker.url))
        return super()._join()

    def _drive(self, stack: ExitStack) -> Driver:
        """However the run ends, it may be resumed at any step's end: also by the broker, while the script computes."""
        driver = super()._drive(stack)
        driver.at_end = self._positions.keep
        stack.callback(self._positions.keep)
        return driver

    def _await_workers(self) -> None:
        patience, broker = self._plan.broker.patience, self._plan.broker.url
        with Client(self._processes.broker, lambda: runs.read_control_secret(self.folder)) as client:
            absence = await_workers(client, len(self._plan.workers), patience, self._driver.ended, say)
        self._driver.raise_failure()
        if absence is None:
            return
        said = f"{workers_named(absence.workers)} did not join within {patience:g} s (broker.patience)"
        if absence.unreachable:
            raise self._failure(f"{said}: {absence.unreachable}", ExitCode.NO_BROKER)
        if absence.declined:
            said += f"; {'; '.join(absence.declined)}"
        raise self._failure(
            f"{said}. Start it on its machine, in the folder with your code: {command_there(broker)}",
            ExitCode.NO_WORKER,
        )

    def _position_of(self, assigned: Assigned) -> Position:
        return self._positions.read(assigned.step)

    def _reachable(self, endpoint: str) -> str:
        """At all interfaces of the broker's machine, others find it where they find the broker."""
        everywhere = EVERY_INTERFACE
        beside = host_of(endpoint) in everywhere and host_of(self._plan.broker.url) in everywhere
        return endpoint if beside else super()._reachable(endpoint)
