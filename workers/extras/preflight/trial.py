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
from collections.abc import Iterator

import msgspec
import torch
from zlib_ng.zlib_ng import crc32

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.model.patterns import groups_of
from stageline.pipeline.model.plan_stage import optimizer_of
from stageline.pipeline.model.segment import layouts_of
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Leaf, Tree, describe, leaves
from stageline.workers.runtime.job import Job, prepare

from .dry_run import TrialWatch
from .estimate import estimate_of
from .measure import measured_cut, measured_layers
from .trial_result import (
    DOING,
    RESULT,
    ROWS,
    ChosenMemory,
    LeafRecord,
    MeasuredCut,
    MeasuredLayers,
    Transcript,
    TrialRefusal,
    TriedPlan,
)


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
