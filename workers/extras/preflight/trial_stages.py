"""Executors of a trial's stages, and measurements on them: bytes of live tensors, and rows of data that leave a stage.

All stages exist at once, or one at a time if their weights are in files.

Bytes are those of tensors that operations make, while these exist: the memory that a stage takes besides the memory
that it holds. They are counted as torch's dispatcher sees operations, in backward too. Memory that an operation takes
and frees by itself is not seen, and memory mapped from files does not count.

Rows of the data are looked for in the results that leave the stages at the worker of the data: only a trial can show
that the promise of `data.stays` is broken.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.features.offload import Offload, in_memory
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.held import trained_parameters
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, leaves, tensors
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.stage_memory import OffloadFiles

SHORTEST = 16  # bytes: what is shorter is found in anything
LOOKED_AT = 16  # rows: a layer treats all alike


class TrialStages:
    """Executors of a trial, by stage.

    If the plan's weights are in files (`come_and_go`), each executor is made when it is needed and gives its memory
    back afterwards. Otherwise all executors are made at once and stay.
    """

    def __init__(self, job: Job, doing: Callable[[str], None], *, offloads: bool = False) -> None:
        """Make the executors of all stages, unless their weights are in files.

        Args:
            job: Plan, model and data.
            doing: Called with the trial's next action, in words.
            offloads: Keep in files what the run keeps in files.

        Raises:
            ModelRefused: The loss, a metric or the optimizer cannot be made, or a device is missing.
        """
        self.come_and_go = job.plan.loads_weights
        self._offloads = offloads
        self._job = job
        self._doing = doing
        self._made: dict[int, Executor] = {}
        for index in range(0 if self.come_and_go else job.schedule.stages):
            self._make(index)

    def __getitem__(self, index: int) -> Executor:
        """Return the executor of stage `index`, which must exist at this moment."""
        return self._made[index]

    @contextmanager
    def there(self, index: int, *, stays: bool = False) -> Iterator[None]:
        """Return a context in which the executor of stage `index` exists.

        Args:
            index: Number of the stage.
            stays: Keep the executor afterwards. By default an executor whose weights are in files is dropped at the
                end; no other object may refer to it then.

        Raises:
            ModelRefused: The weights cannot be read, the loss, a metric or the optimizer cannot be made, or the device
                is missing.
        """
        if index not in self._made:
            self._make(index)
        yield
        if self.come_and_go and not stays:
            del self._made[index]
            self._job.segments[index].unload()
            gc.collect()  # graphs of autograd may be in circles

    def _make(self, index: int) -> None:
        weights = "the weights, " if self.come_and_go else ""
        self._doing(f"{weights}the loss, the metrics, the optimizer")
        files = OffloadFiles(self._job.plan, _folder(self._job.plan), None)
        self._made[index] = _executor(self._job, index, files.of if self._offloads else in_memory)
        files.give_back()


def _folder(plan: Plan) -> Path:
    """Return an existing folder on the disk of the run's folder, for files without names. A trial makes no folders."""
    wanted = Path(plan.run.dir).absolute()
    return next(each for each in (wanted, *wanted.parents) if each.is_dir())


def _executor(job: Job, stage: int, offload: Callable[[int], Offload]) -> Executor:
    worker = job.schedule.owner(stage)
    device = job.plan.workers[worker].device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).partition("\n")[0]
        raise ModelRefused(f'workers.{worker}.device = "{device}" cannot be used here: {reason}') from error
    return job.executor([stage], offload=offload)


def with_gradients(stage: Stage) -> list[torch.Tensor]:
    """Return the parameters that `stage` trains, each with a gradient.

    The gradient of a parameter that the microbatch did not use is made of zeros.
    """
    parameters = trained_parameters(stage)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return parameters


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of tensors that operations made inside this context and that still exist.

    The context may be entered several times. `now` is the current number of bytes, `peak` the largest since `watched`
    began. Memory that existed before the context does not count.
    """

    def __init__(self) -> None:
        """Create a counter that has counted nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def watched(self) -> Iterator["LiveBytes"]:
        """Return a context in which tensors are counted; `peak` starts again from `now`."""
        self.peak = self.now
        with self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation `func`, and count the memory of its result."""
        for tensor in _tensors([*args, *(kwargs or {}).values()]):
            self._note(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            self._note(tensor, _size(tensor.untyped_storage()))
        return result

    def _note(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._known:
            self._known[place] = weakref.ref(storage, lambda _: self._gone(place, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, place: int, size: int) -> None:
        del self._known[place]
        self.now -= size


def _size(storage: torch.UntypedStorage) -> int:
    """Return the number of bytes of `storage`; 0 if they are mapped from a file."""
    return storage.nbytes() if storage.filename is None else 0


def _tensors(values: Tree) -> list[torch.Tensor]:
    return [each for each in tensors(values) if each.layout is torch.strided]


def demand_changed(job: Job, stage: int, given: Tree) -> None:
    """Raise `PlanRefused` if rows of the data leave their worker unchanged although `data.stays` is set.

    Checked are stages at the worker of stage 0 whose next stage is at another worker, for rows and texts of the first
    microbatch. A row counts as unchanged if it is only reshaped, joined with others, or passed on.

    Args:
        job: Plan, model and data.
        stage: Number of the stage that computed `given`.
        given: Result of the stage for the next one.

    Raises:
        PlanRefused: `given` contains a row or a text of the inputs.
    """
    schedule = job.schedule
    if not job.plan.data.stays or stage + 1 >= schedule.stages or schedule.owner(stage) != schedule.owner(0):
        return
    if schedule.owner(stage + 1) != schedule.owner(0) and (found := _found(given, job.feed.microbatch(0, 0).inputs)):
        raise job.plan.refused(
            "data.stays",
            f"what stage {stage} gives to stage {stage + 1} at worker {schedule.owner(stage + 1)} has {found} of the "
            "data in it, unchanged; cut after a layer that computes something of it: model.cut",
        )


def _found(given: Tree, inputs: Tree) -> str:
    """Return which part of `inputs` is contained in `given`, in words: "a text", "a row", or "" for none."""
    sent = [_bytes(tensor) for tensor in tensors(given)]
    texts = {leaf for _, leaf in leaves(given) if isinstance(leaf, str)}
    for _, leaf in leaves(inputs):
        if isinstance(leaf, str) and leaf in texts:
            return "a text"
        if isinstance(leaf, torch.Tensor) and any(row in each for row in _rows(leaf) for each in sent):
            return "a row"
    return ""


def _rows(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield the bytes of each recognizable row, in its own dtype and in each dtype that a stage may return."""
    for row in tensor[:LOOKED_AT] if tensor.dim() else ():
        if (row != row.flatten()[:1]).any():  # a row of one value, such as a mask of ones, is found everywhere
            for dtype in dict.fromkeys((row.dtype, torch.float32, torch.bfloat16, torch.float16, torch.float64)):
                if len(needle := _bytes(row.to(dtype))) >= SHORTEST:
                    yield needle


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
