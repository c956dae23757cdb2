"""Trial of the frozen first stages: their output can be kept by sample only if it follows from each sample alone.

the first microbatch, twice under different seeds     the same bits, and no buffer has changed
the same without its last row                         one row less in each tensor
the other microbatches of the step                    rows of the same form
samples of batch 0, drawn again in the next epoch     the same inputs
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from stageline.pipeline.data.batch import rows, slice_rows
from stageline.pipeline.data.source import NumberedSource, samples_of
from stageline.pipeline.errors import DataError, ModelRefused, describe_error, raised_by_user_code
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, describe, map_tensors, tensors
from stageline.workers.runtime.job import Job

from .trial_result import CacheEstimate

MICROBATCHES = 4  # of the first step that are tried
_OFF = "or leave model.prefix_cache out"
_PREFIX = "model.prefix_cache: what leaves the frozen stages"


@dataclass(frozen=True, slots=True)
class _Tried:
    """Microbatch that is tried, at one place on its way through the stages.

    `twin` is the same microbatch computed under other seeds; `fewer` lacks the last row, or is None if the microbatch
    has too few rows; `others` are other microbatches of the step.
    """

    first: Tree
    twin: Tree
    fewer: Tree
    others: list[Tree]


def try_prefix(job: Job, doing: Callable[[str], None]) -> CacheEstimate | None:
    """Return the estimate of a run's prefix cache; None if the run has none.

    Args:
        job: Plan, model and data. The frozen stages are computed.
        doing: Called with the next action, in words.

    Raises:
        ModelRefused: The output of the frozen stages cannot be kept by sample.
        DataError: A sample has other inputs in the next epoch, or sample numbers are wrong.
    """
    first, numbering = job.replayed_from, job.numbering
    if first is None or numbering is None:
        return None
    doing("the trial of model.prefix_cache: the samples of two epochs")
    _demand_same_inputs(job)
    tried = _tried_microbatches(job)
    count = rows(tried.first)
    for index in range(job.schedule.first_trainable):
        doing(f"the trial of model.prefix_cache: stage {index}, forward")
        tried = _through(job, index, tried)
    _demand_rows(tried, count)
    samples = numbering.count(first)
    size = sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors(tried.first))
    stage = job.schedule.first_trainable
    return CacheEstimate(stage, job.schedule.owner(stage), first, samples, size, samples * size)


def _tried_microbatches(job: Job) -> _Tried:
    every = [job.feed.microbatch(0, number) for number in range(min(MICROBATCHES, job.schedule.microbatches))]
    first = every[0].inputs
    fewer = (
        slice_rows(first, slice(every[0].rows - 1)) if every[0].rows > 2 else None
    )  # one row alone may be another case for a traced model
    return _Tried(first, first, fewer, [each.inputs for each in every[1:] if each.rows])


def _through(job: Job, index: int, tried: _Tried) -> _Tried:
    """Return the outputs of stage `index` for the inputs `tried`.

    Raises:
        ModelRefused: A buffer of the stage changes, or the stage draws random numbers.
    """
    executor = job.executor([index])
    stage = executor.stages[index]
    before = stage.buffers()
    steps = iter(range(3 + len(tried.others)))  # other seeds for each
    run = partial(_forward, stage)
    found = _Tried(
        run(tried.first, next(steps)),
        run(tried.twin, next(steps)),
        None if tried.fewer is None else run(tried.fewer, next(steps)),
        [run(each, next(steps)) for each in tried.others],
    )
    changed = [name for name, buffer in stage.buffers().items() if not torch.equal(buffer, before[name])]
    if changed:
        raise ModelRefused(
            f"model.prefix_cache: the buffer {changed[0]} of stage {index}, which is frozen, changes in a forward: the "
            f"module that has it counts. Call eval() on it in model.factory, {_OFF}"
        )
    if not _same(found.first, found.twin):
        raise ModelRefused(
            f"model.prefix_cache: stage {index}, which is frozen, draws random numbers: it gave the same microbatch "
            f"other values under other seeds. Call eval() on what draws, in model.factory, {_OFF}"
        )
    if job.plan.loads_weights:
        del executor, stage
        job.segments[index].unload()
        gc.collect()
    return found


def _forward(stage: Stage, x: Tree, step: int) -> Tree:
    """Return the stage's output for `x`, computed as in the run. `x` is not changed."""
    try:
        return stage.forward(x, step=step, microbatch=0)
    except BaseException as error:  # user code may raise anything; the cause is chained
        if not raised_by_user_code(error):
            raise
        raise ModelRefused(
            f"the trial of model.prefix_cache failed in stage {stage.index}, {stage.where}, on {describe(x)}: "
            f"{describe_error(error)}"
        ) from error


def _demand_rows(tried: _Tried, count: int) -> None:
    """Raise `ModelRefused` if the output of the frozen stages has no row for each sample.

    Args:
        tried: Output of the last frozen stage.
        count: Number of rows of the first microbatch.

    Raises:
        ModelRefused: A tensor does not have one row for each sample, or rows have another shape or dtype in another
            microbatch.
    """
    for number, tensor in enumerate(tensors(tried.first)):
        if not tensor.dim() or len(tensor) != count:
            raise ModelRefused(_without_rows(number, tensor, count))
    for number, tensor in enumerate([] if tried.fewer is None else tensors(tried.fewer)):
        if not tensor.dim() or len(tensor) != count - 1:
            raise ModelRefused(_without_rows(number, tensor, count - 1))
    form = _form(tried.first)
    for other in (*tried.others, *([] if tried.fewer is None else [tried.fewer])):
        if _form(other) != form:
            raise ModelRefused(
                f"{_PREFIX} has sample shapes that vary: {describe(tried.first)} in one microbatch, {describe(other)} "
                f"in another. Pad all samples to one length, {_OFF}"
            )


def _without_rows(number: int, tensor: Tensor, count: int) -> str:
    return (
        f"{_PREFIX} has no row for each sample: tensor {number} of it has the shape {list(tensor.shape)}, of a "
        f"microbatch of {count} rows. Cut elsewhere, {_OFF}"
    )


def _demand_same_inputs(job: Job) -> None:
    """Raise `DataError` if a sample has other inputs in the next epoch, or if there are not as many samples as rows."""
    for sample, one, other in islice(_pairs(job), 64):
        if _form(one) != _form(other):
            raise DataError(
                f"model.prefix_cache: sample shapes that vary: the inputs of sample {sample} are {describe(one)} in "
                f"one epoch and {describe(other)} in the next. Pad all samples to one length, {_OFF}"
            )
        if not _same(one, other):
            raise DataError(
                f"model.prefix_cache: the inputs of sample {sample} differ between two epochs: it is augmented, or "
                f"samples(step) does not say what batch(step) has. What is kept of it in the first epoch is of no use "
                f"in the next: leave the augmentation out, {_OFF}"
            )


def _pairs(job: Job) -> Iterator[tuple[int, Tree, Tree]]:
    """Yield each sample of batch 0 that returns in the next epoch, with its inputs in either batch."""
    source = job.feed.numbered
    if source is None:
        return
    inputs, first = _numbered_batch(job, source, 0)
    places = {sample: place for place, sample in enumerate(first.tolist())}
    for step in range(source.steps_per_epoch, 2 * source.steps_per_epoch):
        if places.keys() & set(samples_of(source, step).tolist()):
            others, numbers = _numbered_batch(job, source, step)
            for place, sample in enumerate(numbers.tolist()):
                if sample in places:
                    yield sample, _row(inputs, places[sample]), _row(others, place)


def _numbered_batch(job: Job, source: NumberedSource, number: int) -> tuple[Tree, Tensor]:
    """Return the inputs of a batch, and the number of each row's sample, int64 [rows].

    Raises:
        DataError: There are not as many sample numbers as rows.
    """
    inputs, _ = job.feed.batch(number)
    found = samples_of(source, number)
    if len(found) != rows(inputs):
        raise DataError(f"the data source's samples({number}) has {len(found)} numbers for {rows(inputs)} rows")
    return inputs, found


def _row(tree: Tree, place: int) -> Tree:
    return map_tensors(lambda leaf: leaf[place : place + 1], tree)


def _form(tree: Tree) -> Tree:
    """Return `tree` with the dtype and the row shape in place of each tensor."""
    return map_tensors(lambda leaf: f"{leaf.dtype} {list(leaf.shape[1:])}", tree)


def _same(one: Tree, other: Tree) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return _form(one) == _form(other) and all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, for a comparison in which NaN equals itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
