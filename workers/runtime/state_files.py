"""Puts what stages hold from step to step into files, as the plan says."""

from collections.abc import Iterable
from pathlib import Path

from stageline.pipeline.plan import Plan
from stageline.pipeline.retry import Note
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.freed_memory import give_back_memory
from stageline.workers.disk.offload_files import MappedFiles


def offload_state(plan: Plan, stages: Iterable[Stage], folder: Path, note: Note | None) -> None:
    """What `plan` wants of weights and optimizers; if it offloads anything, memory that is freed goes back to the
    system from now on. `note` gets faults of the disk that may pass; without it, they are not waited for. Raises
    `WriteFailed` for one that did not."""
    memory = FileMemory(MappedFiles(folder, note))
    by_stage = [(stage, {*plan.offloaded_of(stage.index)}) for stage in stages]
    for stage, wanted in by_stage:
        if wanted & {"weights", "optimizer"}:
            stage.offload_state(memory, weights="weights" in wanted, optimizer="optimizer" in wanted)
    if any(wanted for _, wanted in by_stage):
        give_back_memory()
