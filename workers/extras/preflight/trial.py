"""Tries a plan in this process: loads model and data, trains one microbatch, and writes down what came of it.

This process runs the user's code, so it may hang, crash or exit at any moment: the one that started it watches it.
Both write to the log of this process: the user's code what it prints, the trial lines of its own, which begin with a
mark that the user's code does not know.

    MARK doing data.source = "data.py:batches"
    a line that the user's code has printed
    MARK doing the trial of one microbatch: stage 0, forward
    MARK result {"type": "tried", ...}
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil

import msgspec
import torch
from zlib_ng.zlib_ng import crc32

from stageline.broker.queues.log import SPILL
from stageline.pipeline.errors import DataError, StagelineError
from stageline.pipeline.model.patterns import groups_of
from stageline.pipeline.model.plan_stage import optimizer_of
from stageline.pipeline.model.segment import layouts_of
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.program import check_schedule
from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule, schedule_names
from stageline.pipeline.tree import Leaf, Tree, describe, leaves
from stageline.workers.runtime.job import Job, prepare

from .dry_run import UNWATCHED, TrialWatch, dry_run, further_copies
from .measure import measured_cut, measured_layers
from .pure_prefix import try_prefix
from .trial_result import (
    DOING,
    RESULT,
    ROWS,
    ChosenMemory,
    Estimate,
    LeafRecord,
    MeasuredCut,
    MeasuredLayers,
    QueueEstimate,
    ScheduleEstimate,
    StageEstimate,
    Transcript,
    TrialRefusal,
    TriedPlan,
)
from .worker_memory import over_limit, queue_estimates, steps_kept, worker_estimates

# MERGED: What a plan comes to before it runs: the split, memory by stage, bytes by queue, idle time; or why it cannot work.
# MERGED:
# MERGED: One microbatch is trained by all stages in this process, with an update and the metrics: errors of a user's model, loss,
# MERGED: optimizer or metric show here, before the run begins. The bytes that stages and messages take are measured on the way.
# MERGED:
# MERGED: A plan that chooses its schedule lists those that accept its placement, and for which its workers have room.


def choosable(job: Job, stages: Sequence[StageEstimate]) -> Iterator[ScheduleEstimate]:
    """Every schedule of the catalogue but the window, which is made as large as the links need and memory allows. What
    halves of a backward take is measured in the run."""
    limit = job.plan.schedule.memory or 0
    for name in schedule_names():
        if name == "window":
            continue
        try:
            made = _made(job, name)
        except ScheduleRefused as refused:
            yield ScheduleEstimate(name, (), 0, refused.reason)
            continue
        in_flight, taken = _room(made, stages)
        reason = "" if taken <= limit else "takes more than schedule.memory"
        halves = made.halves_backwards
        yield ScheduleEstimate(name, in_flight, taken, (_unsplit(stages) if halves else "") or reason, halves)


def without_room(job: Job, stages: Sequence[StageEstimate]) -> Iterator[PlanError]:
    """An error if the schedule that the run begins with has no room: it holds the fewest microbatches."""
    limit = job.plan.schedule.memory
    if limit is None:
        return
    _, taken = _room(job.schedule, stages)
    if taken > limit:
        yield PlanError(
            "schedule.memory",
            f"a worker takes {taken} bytes with {job.schedule.name}, with which the run begins, and which holds the "
            f'fewest microbatches that keep every worker busy. Use "{-(-taken // 2**20)}MiB" or more, more stages, or '
            f'smaller microbatches; or name = "window" with fewer of them in flight',
            value=str(limit),
        )


def _made(job: Job, name: str) -> Schedule:
    placement, first = job.schedule.placement, job.schedule.first_trainable
    return make_schedule(name, placement, job.schedule.microbatches, first_trainable=first)


def _room(schedule: Schedule, stages: Sequence[StageEstimate]) -> tuple[tuple[int, ...], int]:
    """The microbatches in flight, and the bytes of the worker that takes most."""
    verdict = check_schedule(schedule)
    peaks, halfway = verdict.stage_peak, verdict.halfway_peak
    taken = [
        sum(stages[n].with_in_flight(peaks[n]).total + (stages[n].halfway or 0) * halfway[n] for n in owned)
        for owned in schedule.placement
    ]
    return peaks, max(taken)


def _unsplit(stages: Sequence[StageEstimate]) -> str:
    """Why not all of them can split a backward; "" if they can."""
    whole = [str(each.stage) for each in stages if each.halfway is None]
    if not whole:
        return ""
    named = f"stage {whole[0]}" if len(whole) == 1 else f"stages {', '.join(whole)}"
    return f"splits backwards in two halves, and {named} cannot, since activations are recomputed there"


def estimate(plan: Plan) -> Estimate:
    """Loads model and data and runs a microbatch.

    Raises `PlanRefused`, `ModelRefused` or `DataError` if the plan cannot work.
    """
    return estimate_of(prepare(plan))


def estimate_of(job: Job, watch: TrialWatch = UNWATCHED) -> Estimate:
    """`estimate` for a job that is loaded. Its stages cannot be trained afterwards: see `dry_run`."""
    plan = job.plan
    _demand_last_batches(job, watch)
    kept = try_prefix(job, watch.doing)
    stages, messages = dry_run(job, watch)
    queues = queue_estimates(job, messages)
    replicas = [*further_copies(job, stages)]
    workers = worker_estimates(job, [*stages, *replicas], queues)
    stage_errors = [*_overflows(job, queues), *_over_limit(plan, stages), *without_room(job, stages)]
    if errors := [*stage_errors, *over_limit(job, workers)]:
        raise PlanRefused(errors)
    return Estimate(
        digest=plan.digest(),
        plan=plan.as_mapping(),
        origins=dict(plan.origins),
        warnings=(*plan.warnings, *_spills(job, queues), *_unused(job)),
        steps=job.steps,
        stages=stages,
        queues=queues,
        workers=workers,
        idle=job.verdict.idle,
        prefix_cache=kept,
        replicas=replicas,
        schedules=tuple(choosable(job, stages)) if plan.schedule.is_auto else (),
    )


def _demand_last_batches(job: Job, watch: TrialWatch) -> None:
    """The first batch is tried; the last of an epoch, and the last that is evaluated, may have fewer rows. Raises
    `DataError` if the model is known not to take one of them."""
    if not job.segments[0].refuses_inputs:
        return
    feed, choice = job.feed, job.plan.schedule
    last = [(f"batch({feed.last_of_epoch})", partial(feed.batch, feed.last_of_epoch), choice.microbatches)]
    held_out = "the last batch of the rows held out"
    if job.rounds.batches:
        last.append((held_out, partial(feed.held_out_batch, job.rounds.batches - 1), choice.in_step))
    for name, ask, microbatches in last:
        watch.doing(f"{job.plan.data.origin}: {name}")
        inputs, _ = ask()
        try:
            job.segments[0].check_inputs(inputs, microbatches)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error


def _unused(job: Job) -> Iterator[str]:
    """A warning of a cache that is never read."""
    if job.plan.caches_prefix and job.replayed_from is None:
        yield (
            f"model.prefix_cache: the run has {job.steps} steps, an epoch has {job.known_length.epoch}: nothing would "
            "be used a second time, so nothing is kept."
        )


def _spills(job: Job, queues: list[QueueEstimate]) -> Iterator[str]:
    """Warnings of workers whose messages have no room in memory: the rest goes to the disk until it is trimmed."""
    limit = job.plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > limit:
            yield (
                f"worker {worker} keeps {needed} bytes of messages, {limit} of them in memory, the rest on disk. Use "
                f'queues.retain_bytes = "{ceil(needed / 2**20)}MiB" or more if there is memory for it.'
            )


def _overflows(job: Job, queues: list[QueueEstimate]) -> Iterator[PlanError]:
    """Where snapshots are written, only a checkpoint lets messages go: all since the last one must have room.

    Without room for the next one's step too, every worker would wait for a checkpoint that none comes to write.
    """
    plan = job.plan
    if plan.queues.in_one_process:
        return
    every = plan.recovery.snapshot_every
    room = (1 + SPILL) * plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > room:
            steps = max(steps_kept(job, stage) for stage in job.schedule.placement[worker])
            of = f"{steps} steps (recovery.snapshot_every is {every})" if plan.recovery.on else "one step"
            smaller = ", or a smaller recovery.snapshot_every" if plan.recovery.on else ""
            yield PlanError(
                "queues.retain_bytes",
                f"worker {worker} keeps the messages of {of}, {needed} bytes, and has room for {room} in memory and on "
                f'disk: it would wait for ever. Use "{ceil(needed / (1 + SPILL) / 2**20)}MiB" or more{smaller}',
                value=str(plan.queues.retain_bytes),
            )


def _over_limit(plan: Plan, stages: list[StageEstimate]) -> Iterator[PlanError]:
    """The stages that take more than the plan allows, as far as that is known."""
    limit = plan.model.stage_memory
    for stage in stages:
        if limit is not None and stage.group == 1 and stage.total > limit:
            yield PlanError(
                "model.stage_memory",
                f"stage {stage.stage}, of layers {stage.layers[0]} to {stage.layers[-1]}, takes {stage.total} bytes; "
                f"raise the limit, cut elsewhere, or leave model.cut out, to be cut so that stages fit",
                value=str(limit),
            )


def _by_worker(job: Job, queues: list[QueueEstimate]) -> list[int]:
    """The bytes of messages that each worker keeps at most."""
    return [sum(queue.retained for queue in queues if queue.producer in stages) for stages in job.plan.placement]


def record(tree: Tree, name: str, *, by_row: bool = False) -> Iterator[LeafRecord]:
    """Each leaf of `tree`, whose names begin with `name`."""
    return (_record(leaf, f"{name}{path}", by_row=by_row) for path, leaf in leaves(tree))


def _record(leaf: Leaf, name: str, *, by_row: bool) -> LeafRecord:
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or leaf.layout != torch.strided:  # there are no bytes
        return LeafRecord(name, describe(leaf))
    memory = _memory(leaf)
    rows = leaf.shape[0] if by_row and leaf.dim() else 0
    return LeafRecord(name, describe(leaf), crc32(memory), _rows(memory, rows))


def _rows(memory: memoryview, rows: int) -> tuple[int, ...]:
    each = len(memory) // rows if rows else 0
    return tuple(crc32(memory[row * each : (row + 1) * each]) for row in range(min(rows, ROWS)))


def _memory(tensor: torch.Tensor) -> memoryview:
    """Its bytes, in the order of its elements."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    held = (ctypes.c_ubyte * raw.numel()).from_address(raw.data_ptr())
    held.tensor = raw  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(held).cast("B")


class TrialWriter:
    """Writes the trial's own lines to stderr, which is this process's log."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def doing(self, what: str) -> None:
        self._write(DOING, what.replace("\n", " ").encode(errors="replace"))

    def result(self, found: TriedPlan | MeasuredCut | ChosenMemory | MeasuredLayers | TrialRefusal) -> None:
        self._write(RESULT, msgspec.json.encode(found))

    def _write(self, word: str, content: bytes) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        line = memoryview(f"{self._mark} {word} ".encode() + content + b"\n")
        while line:
            line = line[os.write(sys.stderr.fileno(), line) :]


def carry_out_trial(plan: Plan, writer: TrialWriter, *, layouts: bool = False, costs: bool = False) -> None:
    """Writes the result, with `layouts` those of the stages; whatever the user's code raises is one. If where to cut
    has yet to be measured, or what stages recompute and offload to be chosen, the result is that; with `costs`, it is
    what each layer costs."""
    try:
        if costs:
            writer.result(measured_layers(plan, writer.doing))
        elif plan.measures_cut:
            writer.result(measured_cut(plan, writer.doing))
        elif plan.chooses_memory:
            writer.result(_chosen(plan, writer))
        else:
            writer.result(_tried(plan, writer, layouts))
    except StagelineError as error:
        writer.result(TrialRefusal.of(error))


def _chosen(plan: Plan, writer: TrialWriter) -> ChosenMemory:
    from .memory_choice import chosen_memory

    return chosen_memory(plan, writer.doing)


def _tried(plan: Plan, writer: TrialWriter, layouts: bool) -> TriedPlan:
    computed: list[LeafRecord] = []

    def gave(name: str, tree: Tree) -> None:
        computed.extend(record(tree, name))

    job = prepare(plan, writer.doing)
    torch.set_num_threads(job.plan.workers[0].threads)
    of_stages = tuple(layouts_of(job.segments, optimizer_of(job.plan), groups_of(job.plan))) if layouts else ()
    first = _batch(job, writer)
    held_out = job.feed.held_out_sample
    kept = () if held_out is None else _record_batch(held_out)
    estimate = estimate_of(job, TrialWatch(writer.doing, gave))
    second = _batch(job, writer)
    schedule = job.schedule
    found = Transcript(first, second, kept, tuple(computed), plan.data.dataset is not None)
    return TriedPlan(estimate, job.known_length, schedule.first_trainable, found, of_stages)


def _batch(job: Job, writer: TrialWriter) -> tuple[LeafRecord, ...]:
    writer.doing(f"{job.plan.data.origin}: batch(0)")
    return _record_batch(job.feed.batch(0))


def _record_batch(batch: tuple[Tree, Tree]) -> tuple[LeafRecord, ...]:
    inputs, targets = batch
    return (*record(inputs, "inputs", by_row=True), *record(targets, "targets", by_row=True))
