"""Runs a whole plan in this one process: all workers in turn in one thread, over `memory://` queues.

The same machines, executors, messages and coordinator as in a run of many processes; only the sockets are missing.
"""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

import torch

from stageline.broker.control.messages import CONTROL_VERSION, Answer, Ask, Assigned, Finished, Hello, Trim
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.records import EVERY
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.errors import BrokerError
from stageline.broker.queues.base import Queues
from stageline.broker.queues.memory import MemoryQueues
from stageline.broker.stores.base import Store
from stageline.broker.stores.sqlite import SqliteStore
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.features.ties import copies_in
from stageline.workers.checkpoint.weights import save_weights
from stageline.workers.control.reporter import Reporter
from stageline.workers.control.session import Stopped
from stageline.workers.disk.background_writer import BackgroundWriter, WriteFailed
from stageline.workers.extras.prefix_cache.opening import open_prefix_cache
from stageline.workers.extras.replay.recorder import record_failure
from stageline.workers.extras.taps.tap_writer import BACKLOG, TapWriter
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics_file import MetricsFile
from stageline.workers.runs.result import Facts, LaunchOutcome
from stageline.workers.runtime.executor.executor import Executor
from stageline.workers.runtime.executor.losses import ComputeFailed
from stageline.workers.runtime.executor.skipping import SkipLog
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.turns import Stuck, take_turns

REPORT_EVERY = 0.1  # seconds between two reports to the coordinator


def run_memory(
    job: Job,
    run: str,
    folder: Path,
    on_status: Callable[[Facts], None] = lambda facts: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> LaunchOutcome:
    """Runs `job` to the end under the run id `run`; saves weights in `folder`. `interrupted` is asked in between."""
    torch.set_num_threads(job.plan.workers[0].threads)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        closing(SqliteStore(folder / runs.STORE)) as store,
        MetricsFile(folder, 0) as metrics,
        _Local(job, run, store, metrics) as local,
    ):
        outcome = _run(local, folder, on_status, interrupted)
        local.keep(outcome)
    return outcome


def _run(
    local: "_Local", folder: Path, on_status: Callable[[Facts], None], interrupted: Callable[[], bool]
) -> LaunchOutcome:
    try:
        local.run(on_status, interrupted)
    except Stopped as stop:
        return LaunchOutcome(stop.code, str(stop), local.status())
    except ComputeFailed as error:
        return LaunchOutcome(ExitCode.FAILED, local.explain(error), local.status())
    except (BrokerError, Stuck, WriteFailed) as error:
        return LaunchOutcome(ExitCode.FAILED, str(error), local.status())
    return local.finish(folder)


@dataclass(frozen=True, slots=True)
class _Place:
    """One worker of the plan, and how it reports."""

    sender: bytes
    executor: Executor
    loop: WorkerLoop
    reporter: Reporter
    taps: TapWriter | None


class _Local(AbstractContextManager["_Local"]):
    """All workers of a job, and the coordinator that they report to."""

    def __init__(self, job: Job, run: str, store: Store, metrics: MetricsFile) -> None:
        self._job = job
        self._metrics = metrics
        config = RunConfig.of(job.plan, job.schedule, job.length)
        store.begin()  # nothing of an earlier attempt is continued here
        self._coordinator = Coordinator(config, store, run_of(store, config.plan, run, b"", new=True), time())
        self._queues: Queues = MemoryQueues(run, job.schedule.microbatches, windows=job.windows())
        for key, queue in job.program.queues.table.items():
            self._queues.inbound(key).rewind(queue.begins)
        self._decisions = SkipLog(runs.folder(job.plan, run))
        self._open = ExitStack()
        self._places = [self._place(index) for index in range(len(job.plan.workers))]

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, on_status: Callable[[Facts], None], interrupted: Callable[[], bool]) -> None:
        due = observed = 0.0

        def until(worker: WorkerLoop) -> bool:
            nonlocal due, observed
            if monotonic() >= due:
                due = monotonic() + REPORT_EVERY
                self._report()
                if monotonic() >= observed:
                    observed = monotonic() + EVERY
                    self._coordinator.keep_observation(time())
                on_status(self.status())
                if interrupted():
                    raise Stopped("interrupted, nothing saved", ExitCode.INTERRUPTED)
            return worker.finished

        take_turns([place.loop for place in self._places], until)
        self._report()

    def explain(self, error: ComputeFailed) -> str:
        """Why the run stops, with its bad microbatch kept."""
        stage = error.culprit.action.stage if error.culprit is not None else 0
        place = self._places[self._job.schedule.owner(stage)]
        run, incarnation = self._coordinator.run.id, place.reporter.incarnation
        return record_failure(self._job, place.executor, self._queues, error, run, incarnation)

    def finish(self, folder: Path) -> LaunchOutcome:
        self._metrics.finish()
        for place in self._places:
            if place.taps is not None:
                place.taps.flush()
            stages = place.executor.stages
            digests, copies = save_weights(stages, folder), copies_in(stages.values())
            finished = Finished(place.reporter.incarnation, digests, copies)
            self._coordinator.handle(place.sender, finished, time())
        facts = self.status()
        return LaunchOutcome(int(facts["code"] or 0), str(facts["reason"]), facts)

    def keep(self, outcome: LaunchOutcome) -> None:
        """Records how the run ended, for those who ask later."""
        if outcome.code:
            self._coordinator.run.fail(outcome.reason, outcome.code)
        self._coordinator.keep_observation(time())

    def status(self) -> Facts:
        answers = (answer for _, answer in self._coordinator.handle(b"local", Ask("status"), time()))
        return next({"schema": each.schema, **each.facts} for each in answers if isinstance(each, Answer))

    def _place(self, index: int) -> _Place:
        sender, job = str(index).encode(), self._job
        hello = Hello(
            CONTROL_VERSION, job.plan.digest(), f"worker-{index}", socket.gethostname(), os.getpid(), "memory://", index
        )
        incarnation = next(
            answer.incarnation
            for _, answer in self._coordinator.handle(sender, hello, time())
            if isinstance(answer, Assigned)
        )
        executor = job.executor(job.schedule.placement[index], self._decisions)
        run = self._coordinator.run.id
        executor.prefix = open_prefix_cache(job, index, run)
        taps = self._taps(executor, run)
        carry_out = None if taps is None else taps.tapping(executor.carry_out)
        loop = WorkerLoop(
            job.program,
            index,
            executor,
            self._queues,
            carry_out=carry_out,
            codecs=job.codecs,
            run=run,
            incarnation=incarnation,
        )
        loop.measures_with(self._metrics.add)
        if taps is not None:
            taps.progress = loop.progress
        return _Place(sender, executor, loop, Reporter(loop.progress, incarnation, job.training_steps), taps)

    def _taps(self, executor: Executor, run: str) -> TapWriter | None:
        """Each worker's has a writer of its own, whose thread ends with this."""
        if self._job.plan.taps is None:
            return None
        writer = BackgroundWriter("taps", limit=BACKLOG)
        return self._open.enter_context(TapWriter(self._job, executor, runs.folder(self._job.plan, run), writer))

    def _report(self) -> None:
        for place in self._places:
            report = place.reporter.report(monotonic())
            self._coordinator.handle(place.sender, report, time())
            place.reporter.confirmed(report.number)
        for _, message in self._coordinator.tick(time()):
            if isinstance(message, Trim):
                position = self._job.program.position(message.step)
                for key, queue in self._job.program.queues.table.items():
                    self._queues.outbound(key).trim(queue.within(position.of(key.flow)))
