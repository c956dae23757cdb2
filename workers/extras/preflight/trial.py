"""Tries a plan in this process: loads model and data, trains one microbatch, and writes down what came of it.

This process runs the user's code, so it may hang, crash or exit at any moment: the one that started it watches it.
Both write to the log of this process: the user's code what it prints, the trial lines of its own, which begin with a
mark that the user's code does not know.

    MARK doing data.source = "data.py:batches"
    a line that the user's code has printed
    MARK doing the trial of one microbatch: stage 0, forward
    MARK result {"type": "tried", ...}

All stages train one microbatch, with an update and the metrics: errors of a user's model, loss, optimizer or metric
show here, before the run begins. The bytes that stages and messages take are measured on the way.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import partial

import msgspec
import torch
from zlib_ng.zlib_ng import crc32

from stageline.pipeline.errors import DataError, StagelineError
from stageline.pipeline.model.plan_stage import groups_of, optimizer_of
from stageline.pipeline.model.segment import layouts_of
from stageline.pipeline.plan import Plan, PlanRefused
from stageline.pipeline.tree import Leaf, Tree, describe, leaves
from stageline.workers.runtime.job import Job, prepare

from .dry_run import UNWATCHED, TrialWatch, dry_run, further_copies
from .measure import measured_cut, measured_layers
from .memory_choice import chosen_memory
from .pure_prefix import try_prefix
from .trial_result import DOING, RESULT, ROWS, Estimate, LeafRecord, Outcome, Transcript, TrialRefusal, TriedPlan
from .worker_memory import choosable, queue_estimates, refusals, spills, worker_estimates


def estimate(plan: Plan) -> Estimate:
    """Load model and data of `plan`, run one microbatch, and return the memory and messages that the plan needs.

    Raises:
        PlanRefused: The plan cannot work.
        ModelRefused: The model cannot be trained.
        DataError: The data cannot be read.
    """
    return estimate_of(prepare(plan))


def estimate_of(job: Job, watch: TrialWatch = UNWATCHED) -> Estimate:
    """Return the estimate for a loaded job. The job's stages are used up, as by `dry_run`.

    Raises:
        PlanRefused: The run has no room for its messages, stages or workers.
        ModelRefused: The model cannot be trained.
        DataError: The data cannot be read, or the model takes no batch as small as the last one.
    """
    plan = job.plan
    _demand_last_batches(job, watch)
    kept = try_prefix(job, watch.doing)
    stages, messages = dry_run(job, watch)
    queues = queue_estimates(job, messages)
    replicas = [*further_copies(job, stages)]
    workers = worker_estimates(job, [*stages, *replicas], queues)
    if errors := [*refusals(job, stages, queues, workers)]:
        raise PlanRefused(errors)
    return Estimate(
        digest=plan.digest(),
        plan=plan.as_mapping(),
        origins=dict(plan.origins),
        warnings=(*plan.warnings, *spills(job, queues), *_unused(job)),
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
    """Raise `DataError` if the model refuses the inputs of a last batch, which may have fewer rows than the first.

    Only the first batch is tried by the dry run. Checked here are the last batch of an epoch and the last batch that is
    evaluated, and only if the model is known to refuse some inputs.
    """
    if not job.segments[0].refuses_inputs:
        return
    feed, choice, rounds = job.feed, job.plan.schedule, job.rounds.batches
    held_out = "the last batch of the rows held out"
    last = [(f"batch({feed.last_of_epoch})", partial(feed.batch, feed.last_of_epoch), choice.microbatches)]
    if rounds:
        last.append((held_out, partial(feed.held_out_batch, rounds - 1), choice.in_step))
    for name, ask, microbatches in last:
        watch.doing(f"{job.plan.data.origin}: {name}")
        inputs, _ = ask()
        try:
            job.segments[0].check_inputs(inputs, microbatches)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error


def _unused(job: Job) -> Iterator[str]:
    """Yield a warning if the plan asks for a prefix cache that is never read."""
    if job.plan.caches_prefix and job.replayed_from is None:
        yield (
            f"model.prefix_cache: the run has {job.steps} steps, an epoch has {job.known_length.epoch}: nothing would "
            "be used a second time, so nothing is kept."
        )


def record(tree: Tree, name: str, *, by_row: bool = False) -> Iterator[LeafRecord]:
    """Return the record of each leaf of `tree`.

    Args:
        tree: Tensors and plain values.
        name: Beginning of the names of the records; the leaf's path in `tree` follows.
        by_row: Give each row of a tensor (the first `ROWS` rows) a checksum of its own.
    """
    return (_record(leaf, f"{name}{path}", by_row=by_row) for path, leaf in leaves(tree))


def _record(leaf: Leaf, name: str, *, by_row: bool) -> LeafRecord:
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or leaf.layout != torch.strided:  # there are no bytes
        return LeafRecord(name, describe(leaf))
    raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # in the order of the elements
    held = (ctypes.c_ubyte * raw.numel()).from_address(raw.data_ptr())  # `raw` keeps the memory alive
    memory = memoryview(held).cast("B")
    rows = leaf.shape[0] if by_row and leaf.dim() else 0
    each = len(memory) // rows if rows else 0
    sums = tuple(crc32(memory[row * each : (row + 1) * each]) for row in range(min(rows, ROWS)))
    return LeafRecord(name, describe(leaf), crc32(memory), sums)


class TrialWriter:
    """Writer of the trial's own lines, which begin with `mark`, to stderr: the log of this process."""

    def __init__(self, mark: str) -> None:
        """Create a writer whose lines begin with `mark`, a word that the user's code does not know."""
        self._mark = mark

    def doing(self, what: str) -> None:
        """Write a line that says what the trial does next."""
        self._write(DOING, what.replace("\n", " ").encode(errors="replace"))

    def result(self, found: Outcome | TrialRefusal) -> None:
        """Write the result of the trial. Readers ignore all later lines."""
        self._write(RESULT, msgspec.json.encode(found))

    def _write(self, word: str, content: bytes) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        line = memoryview(f"{self._mark} {word} ".encode() + content + b"\n")
        while line:
            line = line[os.write(sys.stderr.fileno(), line) :]


def carry_out_trial(plan: Plan, writer: TrialWriter, *, layouts: bool = False, costs: bool = False) -> None:
    """Try `plan` and write the result. An error of the user's code is written as a `TrialRefusal`.

    The result is a `MeasuredCut` if the plan's cut has yet to be measured, a `ChosenMemory` if its use of memory has
    yet to be chosen, otherwise a `TriedPlan`.

    Args:
        plan: The plan to try.
        writer: Receives the trial's actions and its result.
        layouts: Put the layouts of the stages into the result.
        costs: Write the cost of each layer, a `MeasuredLayers`, in place of any other result.
    """
    try:
        if costs:
            writer.result(measured_layers(plan, writer.doing))
        elif plan.measures_cut:
            writer.result(measured_cut(plan, writer.doing))
        elif plan.chooses_memory:
            writer.result(chosen_memory(plan, writer.doing))
        else:
            writer.result(_tried(plan, writer, layouts))
    except StagelineError as error:
        writer.result(TrialRefusal.of(error))


def _tried(plan: Plan, writer: TrialWriter, layouts: bool) -> TriedPlan:
    computed: list[LeafRecord] = []

    def gave(name: str, tree: Tree) -> None:
        computed.extend(record(tree, name))

    def drawn() -> tuple[LeafRecord, ...]:
        writer.doing(f"{plan.data.origin}: batch(0)")
        return _record_batch(job.feed.batch(0))

    job = prepare(plan, writer.doing)
    torch.set_num_threads(job.plan.workers[0].threads)
    of_stages = tuple(layouts_of(job.segments, optimizer_of(job.plan), groups_of(job.plan))) if layouts else ()
    first = drawn()
    held_out = job.feed.held_out_sample
    kept = () if held_out is None else _record_batch(held_out)
    made = estimate_of(job, TrialWatch(writer.doing, gave))
    found = Transcript(first, drawn(), kept, tuple(computed), plan.data.dataset is not None)
    return TriedPlan(made, job.known_length, job.schedule.first_trainable, found, of_stages)


def _record_batch(batch: tuple[Tree, Tree]) -> tuple[LeafRecord, ...]:
    inputs, targets = batch
    return (*record(inputs, "inputs", by_row=True), *record(targets, "targets", by_row=True))
