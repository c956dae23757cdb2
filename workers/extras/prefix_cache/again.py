"""Computes what leaves the frozen first stages again, in the worker that lost it.

They are as the plan makes them in any process, and their forwards draw nothing: so the same microbatches give the same
bits, if this worker can read the data, and those stages' weights where they are in files.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.tensors import delivered
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.plan import PlanRefused
from stageline.pipeline.program import Program
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.losses import ComputeFailed

from .cache import PrefixCacheFailed


def compute_again(
    job: Job, worker: int, steps: int, stages: Mapping[int, Stage], reason: str
) -> Iterator[tuple[tuple[int, int], Tree]]:
    """Step and microbatch, and what leaves the frozen first stages, of each microbatch of the first `steps` steps.

    `stages` are those that `worker` has already. Raises `PrefixCacheFailed`, which begins with the `reason`.
    """
    try:
        yield from _computed(job, steps, stages)
    except (ModelRefused, DataError, PlanRefused, ComputeFailed) as error:
        raise PrefixCacheFailed(
            f"the prefix cache cannot be used: {reason}. It cannot be computed again here: {error}. Bring its folder "
            f"back, or resume where worker {worker} can read the data and the weights of stages 0 to "
            f"{job.schedule.first_trainable - 1}, or begin another run"
        ) from None


def _computed(job: Job, steps: int, stages: Mapping[int, Stage]) -> Iterator[tuple[tuple[int, int], Tree]]:
    loaded = job if job.own_feed is not None else job.with_data()
    prefix = range(job.schedule.first_trainable)
    program = loaded.program
    missing = [stage for stage in prefix if stage not in stages]
    executor = loaded.executor(missing)
    executor.stages = {**stages, **executor.stages}
    places = ((step, microbatch) for step in range(steps) for microbatch in range(job.schedule.microbatches))
    with _threads_kept():
        for place in places:
            yield place, _forward(loaded, program, executor, prefix, *place)
    for stage in missing:
        job.segments[stage].unload()


def _forward(job: Job, program: Program, executor: Executor, prefix: Sequence[int], step: int, microbatch: int) -> Tree:
    output: Tree = None
    for stage in prefix:
        torch.set_num_threads(job.plan.workers[job.schedule.owner(stage)].threads)  # bits may follow it
        instruction = program.instruction(step, Action(Kind.FORWARD, stage, microbatch))
        output = executor.carry_out(instruction, [output] if stage else [])
        codec = Codec[program.queues[f"forward-{stage + 1}"].codec.upper()]
        output = output if codec is Codec.LOSSLESS else delivered(output, codec)
    return output


@contextmanager
def _threads_kept() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
