"""Run of a whole plan in this one process: all workers in turn in one thread, over `memory://` queues.

Machines, executors, messages and the coordinator are those of a run of many processes; only the sockets are missing.
"""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, thread_time

import torch

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import CONTROL_VERSION, Answer, Ask, Assigned, Finished, Hello
from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.control.store import Store
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.records import EVERY
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.errors import BrokerError
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.features.ties import copies_in
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.program import Program
from stageline.workers.checkpoint.trained_weights import save_weights
from stageline.workers.control.joining import Stopped
from stageline.workers.control.questions import Questions
from stageline.workers.control.session import Reporter
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts, LaunchOutcome
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.losses import ComputeFailed
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.stage_memory import OffloadFiles
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace, explained, features_of, loop_of

REPORT_EVERY = 0.1  # seconds between two reports to the coordinator


def run_memory(
    job: Job,
    run: str,
    folder: Path,
    on_status: Callable[[Facts], None] = lambda facts: None,
    interrupted: Callable[[], bool] = lambda: False,
    questions: Questions | None = None,
) -> LaunchOutcome:
    """Run `job` to the end, and save its weights. Returns the outcome; failures are in it, too.

    Args:
        job: Job to run.
        run: Id of the run.
        folder: Folder for the run's files, made if absent.
        on_status: Called with the run's status about ten times a second.
        interrupted: Called as often; the run stops, with nothing saved, once it returns True.
        questions: Questions of other threads, answered as often.
    """
    torch.set_num_threads(job.plan.workers[0].threads)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        closing(SqliteStore(folder / runs.STORE)) as store,
        _Local(job, run, folder, store, questions or Questions()) as local,
    ):
        outcome = _run(local, on_status, interrupted)
        local.keep(outcome)
    return outcome


def _run(local: "_Local", on_status: Callable[[Facts], None], interrupted: Callable[[], bool]) -> LaunchOutcome:
    try:
        local.run(on_status, interrupted)
    except Stopped as stop:
        return LaunchOutcome(stop.exit_code, str(stop), local.status())
    except ComputeFailed as error:
        return LaunchOutcome(ExitCode.FAILED, local.explain(error), local.status())
    except (BrokerError, Stuck, WriteFailed) as error:
        return LaunchOutcome(ExitCode.FAILED, str(error), local.status())
    return local.finish()


@dataclass(frozen=True, slots=True)
class _LocalWorker:
    """A worker of the plan, and its reporter."""

    sender: bytes
    place: WorkerPlace
    features: list[WorkerFeature]
    loop: WorkerLoop
    reporter: Reporter


class _Local(AbstractContextManager["_Local"]):
    """All workers of a job, and the coordinator that they report to."""

    def __init__(self, job: Job, run: str, folder: Path, store: Store, questions: Questions) -> None:
        self._job = job
        self._questions = questions
        self._folder = folder
        config = RunConfig.of(job.plan, job.schedule, job.length)
        store.begin()  # nothing of an earlier attempt is continued here
        known = run_of(store, config.plan, run, b"", new=True)
        self._coordinator = Coordinator(config, store, known, STEADY.time(), thread_time)
        self._queues = SharedQueues(job.program, run)
        self._open = ExitStack()
        self._workers = [self._opened(index) for index in range(len(job.plan.workers))]

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, on_status: Callable[[Facts], None], interrupted: Callable[[], bool]) -> None:
        """Run all workers in turn to the end.

        Raises:
            Stopped: `interrupted` has returned True.
            ComputeFailed: The user's code has failed.
        """
        due = observed = 0.0

        def until(worker: WorkerLoop) -> bool:
            nonlocal due, observed
            if monotonic() >= due:
                due = monotonic() + REPORT_EVERY
                self._report()
                if monotonic() >= observed:
                    observed = monotonic() + EVERY
                    self._coordinator.keep_observation(STEADY.time(), STEADY.behind())
                on_status(self.status())
                self._questions.answer(self._coordinator, STEADY.time())
                if interrupted():
                    raise Stopped("interrupted, nothing saved", ExitCode.INTERRUPTED)
            return worker.finished

        take_turns([worker.loop for worker in self._workers], until)
        self._report()

    def explain(self, error: ComputeFailed) -> str:
        """Return why the run stops. The bad microbatch is kept, and named in the text."""
        stage = error.culprit.action.stage if error.culprit is not None else 0
        return explained(self._workers[self._job.schedule.owner(stage)].features, error)

    def finish(self) -> LaunchOutcome:
        """Finish the features, save the weights, and return the outcome."""
        for worker in self._workers:
            for feature in worker.features:
                feature.finish()
            stages = worker.place.executor.stages
            digests, copies = save_weights(stages, self._folder), copies_in(stages.values())
            finished = Finished(worker.reporter.incarnation, digests, copies)
            self._coordinator.handle(worker.sender, finished, STEADY.time())
        facts = self.status()
        return LaunchOutcome(int(facts["code"] or 0), str(facts["reason"]), facts)

    def keep(self, outcome: LaunchOutcome) -> None:
        """Record how the run ended, for later queries."""
        if outcome.code:
            self._coordinator.run.fail(outcome.reason, outcome.code)
        self._coordinator.keep_observation(STEADY.time(), STEADY.behind())

    def status(self) -> Facts:
        """Return the status of the run, as the broker answers it."""
        answers = (answer for _, answer in self._coordinator.handle(b"local", Ask("status"), STEADY.time()))
        return next({"schema": each.schema, **each.facts} for each in answers if isinstance(each, Answer))

    def _opened(self, index: int) -> _LocalWorker:
        sender, job = str(index).encode(), self._job
        host, queues = socket.gethostname(), job.program.ends_of(index)
        hello = Hello(
            CONTROL_VERSION, job.plan.digest(), f"worker-{index}", host, os.getpid(), "memory://", index, queues=queues
        )
        incarnation = next(
            answer.incarnation
            for _, answer in self._coordinator.handle(sender, hello, STEADY.time())
            if isinstance(answer, Assigned)
        )
        progress = Progress.of(job.calls, index)
        files = self._open.enter_context(OffloadFiles(job.plan, self._folder / "offload", progress))
        executor = job.executor(job.schedule.placement[index], offload=files.of)
        files.give_back()
        names = index, self._coordinator.run.id, incarnation, 0
        place = WorkerPlace(job, self._folder, *names, executor, self._queues, progress, sleep)
        features = features_of(place, self._open.enter_context)
        reporter = Reporter(progress, incarnation, job.training_steps)
        return _LocalWorker(sender, place, features, loop_of(place, features, job.calls), reporter)

    def _report(self) -> None:
        for worker in self._workers:
            worker.loop.count_queues()
            report = worker.reporter.report(monotonic())
            self._coordinator.handle(worker.sender, report, STEADY.time())
            worker.reporter.confirmed(report.number)
        for _, message in self._coordinator.tick(STEADY.time()):
            if isinstance(message, Trim):
                self._queues.trim(self._job.calls.position(message.step))


class Stuck(Exception):
    """Error that all workers wait for each other in a circle; the text says what each one waits for."""


class SharedQueues(MemoryQueues):
    """The queues of a program for all of its workers, which share a thread."""

    def __init__(self, program: Program, run: str) -> None:
        """Open all queues of `program`; each begins where the program says. `run` is the id of the run."""
        super().__init__(run)
        self._all = tuple(program.queues.values())
        for queue in self._all:
            self.inbound(queue).rewind(queue.begins)

    def trim(self, position: Position) -> None:
        """Let all messages before `position` go."""
        for queue in self._all:
            self.outbound(queue).trim(queue.within(position.of(queue.per)))


def take_turns(workers: Sequence[WorkerLoop], until: Callable[[WorkerLoop], bool]) -> None:
    """Give each worker a turn in this thread, again and again until `until` holds for all of them.

    Raises `Stuck` when a whole round changes nothing: within one thread, no message can still be on its way.
    """
    while waiting := [worker for worker in workers if not until(worker)]:
        if not sum(worker.poll(0) for worker in waiting):
            raise Stuck(f"no worker can go on: {'; '.join(worker.doing for worker in waiting)}")
