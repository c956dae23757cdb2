"""Writes what the tapped layers of a worker's stages return, while the compute loop goes on.

forward of a tapped microbatch    each tapped layer's output is copied as it is returned
after the forward                 one file of them   -- BackgroundWriter -->   taps/stage-2/step-120-3.safetensors
on the last stage, before it      rows and targets   -- BackgroundWriter -->   taps/samples/step-120-3.safetensors

What waits to be written is bounded: beyond `BACKLOG` bytes the compute loop waits for the disk. With recovery,
snapshots go through the same writer, in the order in which they were handed over: what was tapped before a snapshot is
on the disk when the snapshot is, so a worker that begins there has lost nothing of it.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import structlog
import torch
from torch import Tensor

from stageline.broker.codec.structure import is_emptied
from stageline.pipeline.feature import Compute
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.disk.atomic_file import make_folder, write_json
from stageline.workers.disk.background_writer import LONGEST_WRITE, BackgroundWriter, WriteFailed
from stageline.workers.disk.tensor_file import Unsaveable, publish_tensors
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.left_out import is_left_out
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace, awaited

from .tapped_files import ABOUT, FOLDER, SAMPLES, TARGETS, TapPlace, about, named_tensors, stage_folder

KEY = "taps"  # under which files wait at the writer
BACKLOG = 256 * 2**20  # bytes that may wait to be written; then the compute loop waits too

log = structlog.get_logger()


class TapFailed(WriteFailed):
    """Error that tapped outputs cannot be written.

    Mend: Make room on the disk or make the folder writable, and resume the run.

    Example: runs/a/taps cannot be written to: No space left on device
    """

    error_code = "SL215"


class TapWriter(WorkerFeature):
    """Feature that taps the stages of one worker's `executor` and writes their outputs into the folder `run`."""

    name = "taps"

    def __init__(self, job: Job, executor: Executor, run: Path, writer: BackgroundWriter, progress: Progress) -> None:
        """Create the feature.

        Args:
            job: Plan, model and data.
            executor: Executor of the worker's stages.
            run: Folder of the run.
            writer: Writer of the files, in a thread of its own.
            progress: Told while this worker waits for the disk.
        """
        self._job, self._taps = job, job.plan.taps
        self._progress = progress
        self._executor = executor
        self._folder = run / FOLDER
        self._writer = writer
        self._layers = {stage: frozenset(layers) for stage, layers in job.tapped.items()}
        self._told: set[int] = set()  # stages whose files' size was logged
        writer.grant(KEY, BACKLOG)

    def __enter__(self) -> Self:
        """Have the folders made by the writer's thread."""
        self._writer.submit(self._prepare, what=f"write to {self._folder}")
        return self

    def __exit__(self, *_: object) -> None:
        """Close the writer without waiting."""
        self._writer.close(0.0)

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        """Return `compute`, wrapped so that the outputs of tapped layers, samples and targets are written.

        Returns `compute` itself where nothing is to be written.

        Args:
            stage: Stage that is computed.
            kind: Kind of the stage's actions; only forwards are tapped.
            compute: Function that carries out an instruction.
        """
        if kind != Kind.FORWARD or not (stage.index in self._layers or stage.index == self._executor.last):
            return compute

        def tapped(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            if not self._has(instruction):
                return compute(instruction, received)
            self._put_samples(instruction)
            result = self._put_layers(stage, compute, instruction, received)
            if self._job.runs_once(instruction):  # no checkpoint brings a worker back to it
                self.finish()
            return result

        return tapped

    def finish(self) -> None:
        """Wait until all files are on the disk.

        Raises:
            TapFailed: Not all was written in time, or a write failed. Failures of the writer's other files are raised,
                too.
        """
        self._demand(self._writer.flush(LONGEST_WRITE))

    def _has(self, instruction: Instruction) -> bool:
        if self._taps is None:
            return False
        if instruction.evaluates:
            return self._taps.evaluation and not self._executor.gives_up
        return self._taps.has(instruction.step)

    def _put_layers(self, stage: Stage, compute: Compute, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        """Return the result of `compute`, and hand the outputs of the stage's tapped layers to the writer."""
        if stage.index not in self._layers:
            return compute(instruction, received)
        found: dict[str, Tensor] = {}
        with stage.tapped(partial(_collect, self._layers[stage.index], found)):
            result = compute(instruction, received)
        if not _is_left_out(result):
            self._tell_size(stage.index, sum(each.nbytes for each in found.values()))
            self._put(stage_folder(self._folder, stage.index), _place(instruction), found)
        return result

    def _put_samples(self, instruction: Instruction) -> None:
        """Hand the targets and the numbers of the rows, if any, to the writer, on the last stage, which has them."""
        feed, executor = self._executor.feed, self._executor
        if instruction.action.stage != executor.last or feed is None:
            return
        step, microbatch = instruction.step, instruction.action.microbatch
        held_out = instruction.evaluates
        supplied = (feed.held_out_microbatch if held_out else feed.microbatch)(step, microbatch)
        if not supplied.rows:  # no stage computes it
            return
        known = named_tensors(TARGETS, supplied.targets)
        numbers = (feed.held_out_samples if held_out else feed.samples)(step, microbatch)
        if numbers is not None:
            known[SAMPLES] = numbers
        self._put(self._folder / SAMPLES, _place(instruction), _copies(known))

    def _put(self, folder: Path, place: TapPlace, tensors: Mapping[str, Tensor]) -> None:
        path, size = folder / place.file, sum(each.nbytes for each in tensors.values())
        self._demand(awaited(partial(self._writer.has_room, KEY), self._progress, "what was tapped is", LONGEST_WRITE))
        self._writer.submit(partial(_write, path, tensors), KEY, size + 1, what=f"write {path}")

    def _demand(self, done: bool) -> None:
        self._writer.demand(done, LONGEST_WRITE, TapFailed)

    def _prepare(self) -> None:
        """Make the folders, and remove drafts that a killed worker left. Raises `TapFailed`."""
        stages = [stage for stage in self._executor.stages if stage in self._layers]
        folders = [stage_folder(self._folder, stage) for stage in stages]
        folders += [self._folder / SAMPLES] if self._executor.last in self._executor.stages else []
        try:
            for folder in folders:
                make_folder(folder)
                for draft in folder.glob(".*"):
                    draft.unlink(missing_ok=True)
            write_json(self._folder / ABOUT, about(self._job.plan, self._job.tapped, self._job.schedule.microbatches))
        except OSError as error:
            raise TapFailed(f"{self._folder} cannot be written to: {error.strerror}") from error

    def _tell_size(self, stage: int, size: int) -> None:
        if stage not in self._told:
            self._told.add(stage)
            log.info("taps", stage=stage, bytes_of_a_microbatch=size)


def taps(place: WorkerPlace) -> TapWriter | None:
    """Return the feature that taps the stages of the worker at `place`; None if the plan taps no layer."""
    if place.job.plan.taps is None:
        return None
    return TapWriter(place.job, place.executor, place.folder, place.writer, place.progress)


def _place(instruction: Instruction) -> TapPlace:
    return TapPlace(instruction.evaluates, instruction.step, instruction.action.microbatch)


def _collect(layers: Collection[str], found: dict[str, Tensor], layer: str, output: Tree) -> None:
    if layer in layers:
        found.update(_copies(named_tensors(layer, output)))


def _is_left_out(result: Tree) -> bool:
    """Return True if the layers did not run: the microbatch is left out, or the script has the evaluation's result."""
    return is_left_out(result) or is_emptied(result)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file. It replaces a file that an earlier incarnation wrote, which has the same bytes."""
    try:
        publish_tensors(path, tensors)
    except (OSError, Unsaveable) as error:
        raise TapFailed(f"{path} could not be written: {error}") from error


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return row-major copies on the CPU, in memory of their own."""
    return {name: torch.empty(each.shape, dtype=each.dtype).copy_(each.detach()) for name, each in tensors.items()}
