"""Looks for rows of the data in what leaves the stages that stay with it: the promise of `data.stays` that only a trial
can show to be broken."""

from collections.abc import Iterator

import torch

from stageline.pipeline.tree import Tree, leaves, tensors
from stageline.workers.runtime.job import Job

SHORTEST = 16  # bytes: what is shorter is found in anything
LOOKED_AT = 16  # rows: a layer treats all alike


def demand_changed(job: Job, stage: int, given: Tree) -> None:
    """Raises `PlanRefused` if what the `stage` gives to one at another worker has in it, as they are, the values of a
    row of the first microbatch: the row is only reshaped, joined with others, or passed on."""
    schedule = job.schedule
    if stage + 1 >= schedule.stages or schedule.owner(stage) != schedule.owner(0):
        return
    if schedule.owner(stage + 1) != schedule.owner(0) and (found := _found(given, job.feed.microbatch(0, 0).inputs)):
        raise job.plan.refused(
            "data.stays",
            f"what stage {stage} gives to stage {stage + 1} at worker {schedule.owner(stage + 1)} has {found} of the "
            "data in it, unchanged; cut after a layer that computes something of it: model.cut",
        )


def _found(given: Tree, inputs: Tree) -> str:
    """What of `inputs` is in `given`, in words; "" for nothing."""
    sent = [_bytes(tensor) for tensor in tensors(given)]
    texts = {leaf for _, leaf in leaves(given) if isinstance(leaf, str)}
    for _, leaf in leaves(inputs):
        if isinstance(leaf, str) and leaf in texts:
            return "a text"
        if isinstance(leaf, torch.Tensor) and any(row in each for row in _rows(leaf) for each in sent):
            return "a row"
    return ""


def _rows(tensor: torch.Tensor) -> Iterator[bytes]:
    """The bytes of each row that can be told from others, as they are and in the dtypes that a stage may give."""
    for row in tensor[:LOOKED_AT] if tensor.dim() else ():
        if (row != row.flatten()[:1]).any():  # a row of one value, such as a mask of ones, is found everywhere
            for dtype in dict.fromkeys((row.dtype, torch.float32, torch.bfloat16, torch.float16, torch.float64)):
                if len(needle := _bytes(row.to(dtype))) >= SHORTEST:
                    yield needle


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
