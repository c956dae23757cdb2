"""The stages of a trial, all at once, or one at a time where their weights are in files; their bytes and their rows.

Bytes are those of tensors that operations make, while these are there: what a stage takes besides what it holds. They
are counted as torch's dispatcher sees operations, in backward too: memory that an operation takes and frees by itself
is not seen, and that of files does not count.

Rows of the data are looked for in what leaves the stages that stay with it: only a trial can show that the promise of
`data.stays` is broken.
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
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.held import trained_parameters
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, leaves, tensors
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.stage_memory import offload_state

SHORTEST = 16  # bytes: what is shorter is found in anything
LOOKED_AT = 16  # rows: a layer treats all alike


class TrialStages:
    """The executors of a trial, by stage. With `come_and_go`, each is made when it is needed and gives its memory back
    afterwards, since its weights are in files; otherwise all are made at once and stay. With `offloads`, what the run
    has in files is in files here, too."""

    def __init__(self, job: Job, doing: Callable[[str], None], *, offloads: bool = False) -> None:
        self.come_and_go = job.plan.loads_weights
        self._offloads = offloads
        self._job = job
        self._doing = doing
        self._made: dict[int, Executor] = {}
        for index in range(0 if self.come_and_go else job.schedule.stages):
            self._make(index)

    def __getitem__(self, index: int) -> Executor:
        """Return the executor of a stage that is there."""
        return self._made[index]

    @contextmanager
    def there(self, index: int, *, stays: bool = False) -> Iterator[None]:
        """A context in which a stage is there; unless it `stays`, nothing else may hold it at the end. Raises
        `ModelRefused` for its weights, the loss, a metric, the optimizer, or a device that is not there."""
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
        self._made[index] = made = _executor(self._job, index)
        if self._offloads:
            offload_state(self._job.plan, made.stages.values(), _folder(self._job.plan), None)


def _folder(plan: Plan) -> Path:
    """Return a folder on the disk that the run's will be on, for files without names; a trial makes no folders."""
    wanted = Path(plan.run.dir).absolute()
    return next(each for each in (wanted, *wanted.parents) if each.is_dir())


def _executor(job: Job, stage: int) -> Executor:
    worker = job.schedule.owner(stage)
    device = job.plan.workers[worker].device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).partition("\n")[0]
        raise ModelRefused(f'workers.{worker}.device = "{device}" cannot be used here: {reason}') from error
    return job.executor([stage])


def with_gradients(stage: Stage) -> list[torch.Tensor]:
    """Return the parameters that a stage trains, with gradients: zeros if this microbatch did not use one."""
    parameters = trained_parameters(stage)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return parameters


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`now`: the bytes of tensors that were made in this context, entered once or several times, and are still there;
    `peak`: the most since `watched` began. Memory that was there before does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def watched(self) -> Iterator["LiveBytes"]:
        """A context in which tensors are counted, from which on `peak` counts."""
        self.peak = self.now
        with self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Return bytes; 0 if they are a file's."""
    return storage.nbytes() if storage.filename is None else 0


def _tensors(values: Tree) -> list[torch.Tensor]:
    return [each for each in tensors(values) if each.layout is torch.strided]


def demand_changed(job: Job, stage: int, given: Tree) -> None:
    """Raise `PlanRefused` if data have to stay, and the result of `stage` for one at another worker has the values
    of a row of the first microbatch as they are: the row is only reshaped, joined with others, or passed on."""
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
    """Return the part of `inputs` that is in `given`, in words; "" for none."""
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
