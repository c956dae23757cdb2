"""The broker process: finds the run in its store, serves it, and exits when the run has ended or on a signal."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

import structlog

from stageline.broker.control.open import REDIS, open_server
from stageline.broker.control.protocol import Answer, Ask, StopRun
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunConfig, RunPhase, run_of
from stageline.broker.coordinator.run_state import RunState
from stageline.broker.errors import BrokerError
from stageline.broker.stores.base import StoreUnusable
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.addresses import masked
from stageline.pipeline.schedule import Schedule, make_schedule
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.result import result_of
from stageline.workers.runs.store import open_store

from .broker_loop import LINGER, serve_channel
from .signals import Signals

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Where a broker serves which run. `parent`: a process without which it exits (0: none). `resume`: the run is
    continued, however it was stopped."""

    url: str
    run: str
    parent: int = 0
    resume: bool = False


def run_broker(plan: Plan, place: BrokerOptions, on_bound: Callable[[str], None] = lambda endpoint: None) -> int:
    """Serves the run until it has ended and its workers have exited; returns the run's exit code.

    The run's records are where `broker.store` says: a broker of the same `run` continues where one was killed.
    Queues at a Redis server are removed from it once the run has finished.
    The first SIGINT or SIGTERM stops the run, the second ends the broker at once.
    Raises `EndpointTaken`, `OtherRun`, `StoreUnusable`, `FolderUnusable`, and `PlanRefused` or `ModelRefused` for an
    unusable plan.
    """
    plan, schedule = _scheduled(plan)
    folder = runs.make_folder(plan, place.run)
    signals = Signals()
    # First the address: a broker that does not get it must leave the records to the one that has it.
    with (
        closing(open_server(place.url)) as channel,
        closing(open_store(plan, place.run, _until_signal(signals))) as store,
    ):
        terms = RunConfig.of(plan, schedule)
        if place.resume and not store.load().facts:  # else they tell of which plan the run is
            runs.require_same_plan(plan, folder)
        run = run_of(store, terms.plan, place.run, resume=place.resume, alone=bool(place.parent))
        # Not before: another plan's broker must leave this run's alone.
        write_json(folder / runs.PLAN, plan.as_mapping())
        core = Coordinator(terms, store, run, time())
        host = _Host(core, plan, folder, place.parent, signals)
        runs.write_broker_url(folder, channel.endpoint)
        try:
            on_bound(channel.endpoint)
            serve_channel(core, channel, stop=host.should_exit, linger=1.0 if place.parent else LINGER)
            _clear_queues(core, plan.queues.url)
        finally:
            (folder / runs.BROKER).unlink(missing_ok=True)
    return _exit_code(core)


def _scheduled(plan: Plan) -> tuple[Plan, Schedule]:
    """The plan with its number of stages, and its schedule. The model is loaded only if nothing else tells them."""
    if plan.model.stages is None:
        from stageline.workers.runtime.job import prepare

        job = prepare(plan)
        return job.plan, job.schedule
    choice = plan.schedule
    return plan, make_schedule(choice.name, plan.placement, choice.microbatches, mode=choice.mode, window=choice.window)


def _clear_queues(core: Coordinator, url: str) -> None:
    """Removes a finished run's queues from their server. Those of a stopped run are needed to go on with it."""
    if not url.startswith(REDIS) or core.phase is not RunPhase.FINISHED:
        return
    from stageline.broker.queues.redis.inspector import QueueInspector  # takes time to load

    if not core.all_left:  # a worker that still runs could put again what it keeps
        log.warning("the queues stay at the server", address=masked(url), reason="not every worker has exited")
        return
    try:
        with closing(QueueInspector(url, core.run)) as inspector:
            inspector.forget()
    except BrokerError as error:
        log.warning("the queues stay at the server", address=masked(url), reason=str(error))


def _exit_code(core: Coordinator) -> int:
    if core.outcome is None:
        log.error("left", reason=f"run {core.run} has not ended; start a broker with --run {core.run} to go on")
        return ExitCode.INTERRUPTED
    if core.outcome.code:
        log.error("the run has failed", reason=core.outcome.reason)
    return core.outcome.code


class _Host:
    """The process around the coordinator: it obeys signals, watches its parent, and writes the run's files."""

    def __init__(self, core: Coordinator, plan: Plan, folder: Path, parent: int, signals: Signals) -> None:
        self._core = core
        self._plan = plan
        self._folder = folder
        self._parent = parent
        self._signals = signals
        self._started = monotonic()
        self._over = core.outcome is not None

    def should_exit(self) -> bool:
        """Called in every turn. After a signal the run is stopped: workers learn of it with their next report. A run
        that is over does not keep the broker running after a signal."""
        if self._signals.count and self._core.state is not RunState.DISMISSED:
            self._core.handle(b"", StopRun("the broker was interrupted", ExitCode.INTERRUPTED), time())
        if not self._over and self._core.outcome is not None:
            self._over = True
            self._keep_result()
        return self._signals.count > 1 or bool(self._parent and os.getppid() != self._parent)

    def _keep_result(self) -> None:
        for _, answer in self._core.handle(b"", Ask("status"), time()):
            if isinstance(answer, Answer) and answer.facts["weights_sha256"] and answer.facts["training_steps"]:
                result = result_of(
                    self._core.run, self._plan.schedule.microbatches, answer.facts, monotonic() - self._started
                )
                write_json(self._folder / runs.RESULT, result)
                log.info("result", weights_sha256=result.weights_sha256, file=self._folder / runs.RESULT)


def _until_signal(signals: Signals) -> Callable[[str], None]:
    """Called again and again while the records cannot be reached: the broker can do nothing meanwhile, but exit."""
    waits = False

    def note_waiting(reason: str) -> None:
        nonlocal waits
        if not waits:
            log.warning("the broker waits for its records", reason=reason)
        waits = True
        if signals.count:
            raise StoreUnusable(f"interrupted while the broker waited for its records: {reason}")

    return note_waiting
