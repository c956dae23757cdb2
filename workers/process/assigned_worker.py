"""What an assigned worker works with: its stages and its loop, and what writes to its disk."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic

import structlog

from stageline.broker.control.messages import Assigned
from stageline.broker.queues.base import WorkerQueues
from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.retry import ResourceFault
from stageline.pipeline.stage.stage import Stage
from stageline.workers.checkpoint.hooks import LONGEST_WRITE, SOURCE, CheckpointHooks, open_snapshots
from stageline.workers.checkpoint.saved import save_stages
from stageline.workers.checkpoint.weights import save_weights
from stageline.workers.control.commands import CommandHandler
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.disk.offload_files import ScratchFiles
from stageline.workers.extras.prefix_cache.cache import PrefixCache
from stageline.workers.extras.prefix_cache.opening import open_prefix_cache
from stageline.workers.extras.replay.recorder import RecordWriter, record_failure
from stageline.workers.extras.taps.tap_writer import LIMITS, TapWriter
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics_file import MetricsFile
from stageline.workers.runtime.disk_wait import has_room
from stageline.workers.runtime.executor.executor import Executor
from stageline.workers.runtime.executor.losses import ComputeFailed
from stageline.workers.runtime.executor.skipping import SkipLog
from stageline.workers.runtime.executor.stage_bytes import HeldBytes, StageBytesMeter
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import CarryOut, WorkerLoop
from stageline.workers.runtime.program.calls import Position
from stageline.workers.runtime.program.orders import StepOrders
from stageline.workers.runtime.state_files import offload_state

log = structlog.get_logger()


class AssignedWorker:
    """What an assigned worker works with, each part made once those that it needs are there; and what it does when one
    of them has to wait."""

    queues: WorkerQueues
    executor: Executor
    metrics: MetricsFile | None
    scratch: ScratchFiles | None  # of activations
    recorder: RecordWriter | None
    taps: TapWriter | None
    writer: BackgroundWriter | None  # of snapshots, and of what is tapped
    loop: WorkerLoop
    commands: CommandHandler
    cache: PrefixCache | None = None

    def __init__(self, job: Job, assigned: Assigned, *, joined: bool, make: Callable[[int], Stage]) -> None:
        self._job = job
        self._make = make
        self._joined = joined
        self._assigned = assigned
        self._folder = runs.folder(job.plan, assigned.run)

    def make_loop(self, queues: WorkerQueues) -> None:
        """Makes the loop over `queues`, with the stages and what records and taps them."""
        job, assigned = self._job, self._assigned
        stages, decisions = job.schedule.placement[assigned.index], SkipLog(self._folder)
        self.queues = queues
        self.metrics = MetricsFile(self._folder, assigned.step) if job.program.last in stages else None
        self.executor = executor = job.executor(stages, decisions, make=self._make)
        self.scratch = self._new_scratch()
        self.recorder = self._new_recorder(stages)
        self.writer = self._new_writer()
        self.taps = self._new_taps()
        found: dict[int, HeldBytes] = {}
        auto = job.plan.schedule.is_auto
        meter = StageBytesMeter(executor.stages, executor.carry_out, found) if auto else None
        self.loop = WorkerLoop(
            job.program,
            assigned.index,
            executor,
            queues,
            carry_out=self._watched(executor.carry_out if meter is None else meter.carry_out),
            codecs=job.codecs,
            run=assigned.run,
            incarnation=assigned.incarnation,
            start=assigned.step,
            orders=self._orders(),
        )
        offload_state(job.plan, executor.stages.values(), self._folder / "offload", self._note_offload)
        progress = self.loop.progress
        progress.stages, progress.queues, progress.stage_bytes = executor.stages, queues, found
        progress.digests = queues.digests
        if self.taps is not None:
            self.taps.progress = progress
        if not self._joined:
            self.loop.saves_with(self.save_checkpoint)
        if self.metrics is not None:
            self.loop.measures_with(self.metrics.add)
            self.metrics.note = partial(progress.note_fault, "metrics")
        decisions.note, decisions.wait = partial(progress.note_fault, "skip log"), self.serve

    def open_cache(self) -> None:
        """Makes the cache of what leaves the frozen first stages, if this worker needs it. Takes long if it is lost."""
        assigned, progress = self._assigned, self.loop.progress
        self.cache = self.executor.prefix = open_prefix_cache(
            self._job,
            assigned.index,
            assigned.run,
            assigned.step,
            stages=self.executor.stages,
            note=partial(progress.note_fault, "prefix cache"),
            going_on=partial(self.queues.pump, 0),
        )

    def serve_others(self) -> None:
        """From now on, others are served while this worker waits for a disk."""
        if self.cache is not None:
            self.cache.wait = self.serve

    def make_room(self, reason: str) -> None:
        """A `put` waits for room, which a trim makes."""
        if self.loop.progress.full is None:
            log.warning("waiting", reason=reason)
        self.loop.lacks_room()
        self.commands.handle()

    def serve(self, seconds: float) -> None:
        """Waits so long for a disk, and goes on serving the other workers and the broker."""
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self.queues.pump(left)
            self.commands.handle()

    def explain(self, error: ComputeFailed) -> str:
        run, incarnation = self._assigned.run, self._assigned.incarnation
        return record_failure(self._job, self.executor, self.queues, error, run, incarnation)

    def save_checkpoint(self, folder: Path, position: Position) -> None:
        """A script calls for it."""
        plan, stages = self._job.plan, self.executor.stages
        save_stages(folder, plan, self._assigned, stages, position.step, self.loop.progress)

    def hooks(self) -> CheckpointHooks:
        """Restores the checkpoint that the worker begins at."""
        if not self._job.plan.recovery.on:
            return CheckpointHooks()
        recorder, metrics = self.recorder, self.metrics
        return open_snapshots(
            self._job,
            self._assigned,
            self.executor,
            self.loop.progress,
            forgotten=(lambda step: None) if recorder is None else recorder.delete_before,
            measured=(lambda: None) if metrics is None else metrics.flush,
            writer=self.writer,
        )

    def save(self) -> dict[str, TensorDigest]:
        if self.taps is not None:
            self.taps.flush()
        if self.metrics is not None:
            self.metrics.finish(self.serve)
        note = partial(self.loop.progress.note_fault, "weights")
        return save_weights(self.executor.stages, self._folder, note, self.serve)

    def _orders(self) -> StepOrders | None:
        """By which schedules the steps go, if the run chooses them."""
        assigned, job = self._assigned, self._job
        if not job.plan.schedule.is_auto:
            return None
        return StepOrders(job.schedule, assigned.orders, assigned.closed, assigned.step)

    def _watched(self, carry_out: CarryOut) -> CarryOut:
        """`carry_out`, tapped and recorded."""
        if self.taps is not None:
            carry_out = self.taps.tapping(carry_out)
        return carry_out if self.recorder is None else self.recorder.recording(carry_out)

    def _new_writer(self) -> BackgroundWriter | None:
        if not self._job.plan.recovery.on and self._job.plan.taps is None:
            return None
        return BackgroundWriter("snapshots", limit=1, limits=LIMITS, note=self._note_write)

    def _new_taps(self) -> TapWriter | None:
        if self.writer is None or self._job.plan.taps is None:
            return None
        return TapWriter(self._job, self.executor, self._folder, self.writer)

    def _new_scratch(self) -> ScratchFiles | None:
        """Given to the stages."""
        offloaded = self._job.plan.offloaded_of
        stages = [stage for stage in self.executor.stages.values() if "activations" in offloaded(stage.index)]
        if not stages:
            return None
        scratch = ScratchFiles(self._folder / "offload", self._note_offload, self._wait_for_scratch)
        for stage in stages:
            stage.offload_activations(scratch)
        return scratch

    def _note_offload(self, fault: ResourceFault | None) -> None:
        self.loop.progress.note_fault("offload", fault)

    def _wait_for_scratch(self, writer: BackgroundWriter) -> None:
        progress = self.loop.progress
        done = has_room(writer, None, progress, "activations are", LONGEST_WRITE)
        progress.waits = False
        writer.demand(done, LONGEST_WRITE)

    def _note_write(self, fault: ResourceFault | None) -> None:
        self.loop.progress.note_fault(SOURCE, fault)

    def _new_recorder(self, stages: Sequence[int]) -> RecordWriter | None:
        if self._job.plan.recovery.record != "all":
            return None
        run, incarnation, start = self._assigned.run, self._assigned.incarnation, self._assigned.step
        return RecordWriter(self._job.plan, run, stages, incarnation, start, self._note_record)

    def _note_record(self, fault: ResourceFault | None) -> None:
        self.loop.progress.note_fault("records", fault)
