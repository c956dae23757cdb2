"""A script's run whose workers are on other machines, and join its broker.

script ──forks──> launcher ──forks──> template ──forks──> broker (bound to `Line`'s broker=)
                                                             ▲
on each other machine:  stageline worker --join ADDRESS ─────┘  gets the plan, compares the code, and works

The script sees neither the workers' snapshots nor the weights that they save. So it keeps the positions of checkpoints
and the metrics of steps itself, has the weights sent before the run ends, and the state of all stages for each
checkpoint that it saves.

positions.json    {"20": [23, 2], ...}    after 20 steps, 23 calls and 2 evaluated batches were done
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import cast

import msgspec
import structlog
from msgspec import UNSET
from torch import Tensor

from stageline.broker.control.messages import Assigned
from stageline.broker.coordinator.run import RunPhase, ScriptCode
from stageline.pipeline.addresses import EVERY_INTERFACE, host_of
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import Plan
from stageline.pipeline.printable import printable_line
from stageline.pipeline.program import Program
from stageline.workers.checkpoint.sent import write_sent
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.disk.atomic_file import persist_json, write_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics import MetricsFile, MetricsNotWritten, StepMetrics
from stageline.workers.runtime.calls import Call, CallKind, Position
from stageline.workers.script.calls.calls import Replies, WeightNames, only
from stageline.workers.script.calls.news import command_there, say
from stageline.workers.script.processes.process_run import JOIN_TIMEOUT, ProcessRun

from .launcher import LocalProcesses, start_processes
from .saving import save_checkpoint

log = structlog.get_logger()

NAME = "positions.json"
_CHECKPOINTS = 8  # newest, of which one is complete or none was long ago
_STEPS = 16  # newest: the run may be stopped after any of them
LOOK = 0.05  # seconds between two looks at the broker, and at who is missing
ANSWER_TIMEOUT = 1.0  # seconds for the broker to answer a question


class PositionFile:
    """Positions of a run after its newest steps and checkpoints, in the file `positions.json`.

    One thread notes positions; any thread may write the file.
    """

    def __init__(self, folder: Path, every: int) -> None:
        """Read the file in the run's `folder`; `every` is the number of steps between snapshots, 0 for none."""
        self._file = folder / NAME
        self._every = every
        self._kept = self._written = self._read()
        self._writing = threading.Lock()

    def note(self, position: Position) -> None:
        """Note `position` before the call that leads to it; write it to the disk if a snapshot of it is due."""
        kept = {step: each for step, each in self._kept.items() if self._may_matter(step, position.step)}
        self._kept = {**kept, position.step: position}
        if self._every and position.step % self._every == 0:
            self._write(persist_json)

    def keep(self) -> None:
        """Write all positions, since the run ends and may be resumed after any step.

        The file is written in one attempt: an error is logged and does not keep the run from ending.
        """
        try:
            self._write(write_json)
        except OSError as error:
            log.warning("positions not written", reason=f"the run cannot be resumed at its last steps: {error}")

    def _write(self, write: Callable[[Path, object], None]) -> None:
        with self._writing:
            kept = self._kept
            if kept != self._written:
                write(self._file, {str(step): (each.calls, each.evaluations) for step, each in kept.items()})
                self._written = kept

    def read(self, step: int) -> Position:
        """Return the position of the checkpoint of `step`. Raises `SnapshotDamaged` if it is not known."""
        if not step:
            return Position()
        if step not in self._kept:
            raise SnapshotDamaged(self._file, [f"it does not say how many calls came before step {step}"])
        return self._kept[step]

    def _may_matter(self, step: int, newest: int) -> bool:
        """Return True if a run may resume from `step`.

        Steps from before the run went back to a checkpoint do not matter.
        """
        ahead = newest - step
        of_checkpoint = bool(self._every) and step % self._every == 0 and ahead <= _CHECKPOINTS * self._every
        return 0 < ahead <= _STEPS or (ahead > 0 and of_checkpoint)

    def _read(self) -> dict[int, Position]:
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=dict[int, tuple[int, int]])
        except FileNotFoundError:
            return {}
        except msgspec.MsgspecError as error:
            raise SnapshotDamaged(self._file, [str(error)]) from error
        return {step: Position.of_checkpoint(step, *counts) for step, counts in found.items()}


@dataclass(frozen=True, slots=True)
class Absence:
    """Workers that did not join.

    Attributes:
        workers: Indexes of the missing workers.
        unreachable: Why the broker did not answer when it was last asked; "" if it did.
        declined: Lines on processes that cannot join.
    """

    workers: list[int]
    unreachable: str
    declined: tuple[str, ...] = ()


def await_workers(
    client: Client,
    workers: int,
    patience: float,
    ended: threading.Event,
    tell: Callable[[str], object] = lambda line: None,
) -> Absence | None:
    """Wait for all workers; return None once they have joined or the run has ended.

    Args:
        client: Client of the broker.
        workers: Number of workers.
        patience: Seconds to wait.
        ended: Set when the run has ended.
        tell: Called with a line, once for each process that cannot join.

    Returns:
        The absence after `patience` seconds: all workers are missing until the broker has said otherwise.
    """
    missing, unreachable, deadline = list(range(workers)), "", monotonic() + patience
    told: dict[str, None] = {}  # in order
    while not ended.is_set() and monotonic() < deadline:
        try:
            status = client.ask("status", timeout=ANSWER_TIMEOUT)
        except BrokerUnreachable as error:  # it is started again
            unreachable = str(error)
        else:
            if status["phase"] != RunPhase.WAITING:
                return None
            missing, unreachable = status["missing"], ""
            for row in status["declined"]:  # whose words come from the network
                who = f"a worker (process {row['pid']} on {row['host']})"
                line = printable_line(f"{who} cannot join: {row['reason']}")
                if line not in told:
                    told[line] = None
                    tell(line)
        ended.wait(LOOK)
    return None if ended.is_set() else Absence(missing, unreachable, tuple(told))


def missing_line(missing: list[int], command: str) -> str:
    """Return the script's line on workers that are `missing`, which `command` starts."""
    return f"waiting for {workers_named(missing)}. On each machine, in the folder with your code: {command}"


def workers_named(missing: list[int]) -> str:
    """Return the workers as text: "worker 0", "workers 0 and 1"."""
    names = list(map(str, missing))
    if len(names) < 2:
        return f"worker {''.join(names)}"
    return f"workers {', '.join(names[:-1])} and {names[-1]}"


class RemoteRun(ProcessRun):
    """Run whose workers are on other machines: only the broker is started, at `broker.url` of the plan."""

    def __init__(
        self,
        plan: Plan,
        saved_as: Plan,
        program: Program,
        names: WeightNames,
        resume: str | None,
        code: ScriptCode,
    ) -> None:
        """Start the broker and wait for the workers.

        Args:
            plan: Plan with a known number of stages.
            saved_as: Plan of the same line without `broker`, which may go on from a checkpoint that this one saves.
            program: Program of its workers.
            names: Names of the weights that each worker has.
            resume: Id of the run to continue; None begins one.
            code: Code that the workers must have.
        """
        self._code = code
        self._saved_as = saved_as
        self._weights: dict[bool, dict[str, Tensor]] = {}  # at the end; those of True are averages
        self._workers_timeout = plan.broker.patience
        super().__init__(plan, program, names, resume)
        self._metrics = MetricsFile(self.folder, self.position, self._driver.progress.noting("metrics"))
        self._stack.callback(self._metrics.close)

    def submit(self, call: Call) -> "Future[Replies]":
        """Send a call as `ProcessRun.submit`; of a training step, note the position after it, and its metrics.

        Raises `MetricsNotWritten` once the metrics of earlier steps could not be written for a minute.
        """
        if call.kind is not CallKind.TRAIN:
            return super().submit(call)
        step, after = self._driver.position.step, self._driver.position.after(call.kind)
        self._metrics.demand_written()
        self._positions.note(after)
        done = super().submit(call)
        done.add_done_callback(lambda replies: self._measured(step, replies))
        return done

    def _measured(self, step: int, done: "Future[Replies]") -> None:
        """Note the metrics of a step, in the order of steps. A step that the run's end left out has none."""
        if done.cancelled() or done.exception() is not None:
            return
        loss, norm, rates, rows = only(done.result())
        clipped = UNSET if norm is None else norm
        with suppress(MetricsNotWritten):  # the next call raises it
            self._metrics.add(
                StepMetrics(
                    step=step, loss=loss, gradient_norm=clipped, learning_rates=tuple(rates), rows=rows, time=time()
                )
            )

    def close(self) -> None:
        """Fetch the weights, and end the run well."""
        self._open.detach()
        try:
            self._weights = {ema: self._fetched(ema=ema) for ema in (False, self._plan.averages)}
            self._metrics.finish()
        except BaseException:
            self._stack.close()
            raise
        super().close()

    def save(self, folder: Path, call: Callable[[str], Replies]) -> None:
        """Save a checkpoint in a folder of this machine, of what the workers send. Raises `NotSaved`."""
        run = self.folder.name

        def fetch(draft: str) -> Replies:
            replies = call("")
            write_sent(Path(draft), self._saved_as, run, self.position, replies)
            return replies

        save_checkpoint(folder, self._saved_as, run, lambda: self.position, fetch)

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return the weights, or their averages, that `close` has fetched."""
        return dict(self._weights[ema])

    def abort(self, reason: str, *, knows_failure: bool = False, interrupted: bool = False) -> None:
        """Write the positions, and end the run as it is; saved files stay, and stderr is told.

        Args:
            reason: Reason for the broker and the message.
            knows_failure: The script knows why the run failed.
            interrupted: Ctrl-C ended the run.
        """
        try:
            self._positions.keep()
        finally:
            super().abort(reason, knows_failure=knows_failure, interrupted=interrupted)

    def _fetched(self, *, ema: bool) -> dict[str, Tensor]:
        parts = cast("Mapping[int, dict[str, Tensor]]", self.submit(Call(CallKind.STATE, ema=ema)).result())
        return {name: tensor for part in parts.values() for name, tensor in part.items()}

    def _start(self, run: str, *, resume: bool) -> LocalProcesses:
        self._positions = PositionFile(self.folder, self._plan.recovery.snapshot_every)
        runs.remove_broker_url(self.folder)  # of a broker that was killed
        return start_processes(self._plan, run, resume=resume, code=self._code)

    def _join(self) -> Assigned:
        """Join once the broker listens: at an address in use, a foreign broker would answer."""
        deadline = monotonic() + JOIN_TIMEOUT
        while runs.read_broker_url(self.folder) is None:
            if (outcome := self._processes.poll()) is not None:
                raise self._failure(outcome.reason, outcome.code)
            if monotonic() > deadline:
                raise self._failure(f"the broker does not listen after {JOIN_TIMEOUT:g} s", ExitCode.NO_BROKER)
            sleep(LOOK)
        every = list(range(len(self._plan.workers)))  # none can have joined yet
        say(*(f"warning: {warning}" for warning in self._plan.warnings), missing_line(every, self._command))
        return super()._join()

    @property
    def _command(self) -> str:
        """Command that starts a worker on another machine."""
        return command_there(self._plan, self.folder.name)

    def _at_end(self) -> None:
        """Write the positions: a run may be resumed at any step's end, also if the broker ends it."""
        self._positions.keep()

    def _await_workers(self) -> None:
        patience = self._plan.broker.patience
        with Client(self._processes.broker, lambda: runs.read_control_secret(self.folder), self._pair) as client:
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
            f"{said}. Start it on its machine, in the folder with your code: {self._command}",
            ExitCode.NO_WORKER,
        )

    def _position_of(self, assigned: Assigned) -> Position:
        return self._positions.read(assigned.step)

    def _reachable(self, endpoint: str) -> str:
        """Return the address of an endpoint for others; one at all interfaces is found where the broker is."""
        everywhere = EVERY_INTERFACE
        beside = host_of(endpoint) in everywhere and host_of(self._plan.broker.url) in everywhere
        return endpoint if beside else super()._reachable(endpoint)
