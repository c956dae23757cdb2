"""The process around a broker's coordinator: it obeys signals, watches its lifeline, and writes the run's files."""

from pathlib import Path
from threading import Event
from time import monotonic, time

import structlog

from stageline.broker.control.messages import Answer, Ask, StopRun
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.records import EVERY
from stageline.broker.coordinator.state import Life
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.signals import Signals
from stageline.pipeline.retry import reason_of
from stageline.workers.control.questions import Questions
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import result_of

log = structlog.get_logger()


class BrokerHost:
    """Host of a coordinator, asked in every turn of the broker."""

    def __init__(
        self, core: Coordinator, plan: Plan, folder: Path, orphaned: Event, signals: Signals, questions: Questions
    ) -> None:
        """Host `core`.

        Args:
            core: Coordinator of the run.
            plan: Plan of the run.
            folder: Folder of the run.
            orphaned: Set once the process that started this one is gone.
            signals: Counter of the process's signals.
            questions: Questions of this process's other threads.
        """
        self._core = core
        self._plan = plan
        self._folder = folder
        self._orphaned = orphaned
        self._signals = signals
        self._questions = questions
        self._started = self._observed = monotonic()
        self._over = core.run.outcome is not None

    def should_exit(self) -> bool:
        """Return True if the broker is to exit at once; called in every turn.

        After a first signal the run is stopped; workers learn of it with their next report. A run that is over does not
        keep the broker running after a signal.
        """
        if self._signals.count and self._core.run.lifecycle.state is not Life.DISMISSED:
            self._core.handle(b"", StopRun("the broker was interrupted"), time())
        if not self._over and self._core.run.outcome is not None:
            self._over = True
            self._observed = 0.0  # the end is to be found in the records at once
            self._keep_result()
        if monotonic() - self._observed >= EVERY:
            self._observed = monotonic()
            self._core.keep_observation(time())
        self._questions.answer(self._core, time())
        return self._signals.count > 1 or self._orphaned.is_set()

    def _keep_result(self) -> None:
        for _, answer in self._core.handle(b"", Ask("status"), time()):
            if isinstance(answer, Answer) and answer.facts["weights_sha256"] and answer.facts["training_steps"]:
                run, seconds = self._core.run.id, monotonic() - self._started
                result, file = (
                    result_of(run, self._plan.schedule.in_step, answer.facts, seconds),
                    self._folder / runs.RESULT,
                )
                try:
                    persist_json(file, result)
                except OSError as error:  # the run has ended well, and the records say so
                    log.error("the result is not kept", reason=f"{file} cannot be written: {reason_of(error)}")
                else:
                    log.info("result", weights_sha256=result.weights_sha256, file=file)
