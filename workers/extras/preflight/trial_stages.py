"""The stages of a trial: all at once, or one at a time where their weights are in files."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan
from stageline.workers.runtime.executor.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.stage_memory import offload_state


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
        """Of a stage that is there."""
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
    """Where files without names are on the disk that the run's will be on; a trial makes no folders."""
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
