"""Chooses what stages recompute and offload for a plan with `memory.limit`.

Each way of recomputing is tried; the memory and computing time of stages are counted; the cheapest choice is taken.

    nothing                    fits: chosen
    weights, optimizer         in files, as operations then take other memory for a moment
    "stage", "layers"          recomputed, each without files and with them

Each is a trial of its own, with a model of its own, one after the other.

Work is counted in nanoseconds at fixed rates: by what operations multiply and by the bytes they touch. No clock is
used: the choice must be the same on a machine that is busy. A forward that runs again counts as often as it runs.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.schedule.replicas import dealt
from stageline.pipeline.tree import tensors
from stageline.workers.extras.fitting import (
    Moved,
    StageOption,
    Switches,
    WorkerRoom,
    added_nanoseconds,
    cheapest,
    moved_bytes,
    shortfalls,
    tight_workers,
)
from stageline.workers.runtime.job import Job, prepare

from .dry_run import Carried, TrialWatch, dry_run, further_copies
from .trial_result import ChosenMemory, StageEstimate, StageMemory
from .worker_memory import limit_key, queue_estimates, stage_load, worker_rooms

FLOPS = 20.0  # floating point operations of a thread in a nanosecond
TOUCHED = 5.0  # bytes that a process reads and writes in a nanosecond
_PARTS = ("activations", "weights", "optimizer")
_OFFLOADS = tuple(chain.from_iterable(combinations(_PARTS, count) for count in range(len(_PARTS) + 1)))
_FORMS = ("stage", "layers")


class WorkCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of computing time in nanoseconds at fixed rates, of the operations inside this context.

    The context may be entered several times; `nanoseconds` adds up. `threads` is the number of threads that compute.
    """

    def __init__(self, threads: int) -> None:
        """Create a counter at 0 for operations on `threads` threads."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.nanoseconds = 0.0
        self._threads = threads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation `func`, and add the time for its floating point operations or for the bytes it touches."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            known = flop_registry.get(func.overloadpacket)
            flops = 0 if known is None else known(*args, **kwargs, out_val=result)
            touched = sum(each.nbytes for each in _tensors([*args, *kwargs.values(), result]))
            self.nanoseconds += max(flops / FLOPS / self._threads, touched / TOUCHED)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tensors(values) if each.layout is torch.strided]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Result of training one microbatch with one way of recomputing, called `recompute` where the plan does not set it.

    `stages` are the estimates of all stages and their further copies; `work` is the computing time of each stage in
    nanoseconds. `working` is, by copy, the bytes that exist for a moment with weights and optimizer in files; empty if
    that was not tried.
    """

    recompute: str
    stages: Sequence[StageEstimate]
    work: Sequence[int]
    working: Sequence[int] = ()


def chosen_memory(plan: Plan, doing: Callable[[str], None]) -> ChosenMemory:
    """Choose what stages recompute and offload, where `plan` leaves that open.

    Args:
        plan: Plan with a limit of memory.
        doing: Called with the next action, in words.

    Raises:
        PlanRefused: No combination fits, or the plan cannot work.
        ModelRefused: The model cannot be trained.
        DataError: The data cannot be read.
    """
    job = prepare(plan, doing)
    torch.set_num_threads(job.plan.workers[0].threads)
    first, messages = _trial(job, "nothing", doing)
    rooms = worker_rooms(job, first.stages, queue_estimates(job, messages))
    job = job.only(())  # without the layers, which the trial has used up
    trials, left_out = [first], []
    chosen = cheapest(_options(job, trials), rooms)
    if chosen is None or any(each.nanoseconds for each in chosen):
        trials[0] = replace(first, working=_working_in_files(job, "nothing", doing))
        for form in _FORMS if _may_recompute(job) else ():
            try:
                gc.collect()  # the model before it: graphs of autograd may be in circles
                tried, _ = _trial(prepare(_with_form(job.plan, form), doing), form, doing)
                trials.append(replace(tried, working=_working_in_files(job, form, doing)))
            except ModelRefused as error:
                left_out.append(f'recompute = "{form}" is not considered: {error}')
        chosen = cheapest(_options(job, trials), rooms)
    if chosen is None:
        raise PlanRefused(list(_refusals(job, _options(job, trials), rooms)))
    return _chosen(job, chosen, tight_workers(chosen, rooms), first, left_out)


def _trial(job: Job, form: str, doing: Callable[[str], None]) -> tuple[_Trial, Mapping[str, Carried]]:
    """Return the memory of all stages of `job`, recomputed by `form`, and the size of messages by queue."""
    owner = job.schedule.owner
    counts = [WorkCount(job.plan.workers[owner(stage)].threads) for stage in range(job.schedule.stages)]
    stages, messages = dry_run(job, TrialWatch(doing), counts)
    every = [*stages, *further_copies(job, stages)]
    return _Trial(form, every, [round(each.nanoseconds) for each in counts]), messages


def _working_in_files(of: Job, form: str, doing: Callable[[str], None]) -> list[int]:
    gc.collect()
    parts = [part for part in _PARTS[1:] if part not in _never_in_files(of)]
    job = prepare(_with_form(of.plan, form, parts), doing)
    stages, _ = dry_run(job, TrialWatch(doing))
    return [each.working for each in (*stages, *further_copies(job, stages))]


def _never_in_files(job: Job) -> tuple[str, ...]:
    """Return the parts of a stage that cannot be in files with this schedule."""
    return ("weights",) if job.schedule.delays else ()


def _recompute_is_free(job: Job, stage: int) -> bool:
    return f"stage.{stage}.recompute" in job.plan.undecided_memory(stage)


def _may_recompute(job: Job) -> bool:
    """Return True if some stage leaves recomputing open, and no stage splits its backward.

    With a split backward, both halves would compute the forward again.
    """
    stages = range(job.schedule.stages)
    return not any(map(job.program.splits, range(job.schedule.copies))) and any(
        _recompute_is_free(job, stage) for stage in stages
    )


def _with_form(plan: Plan, form: str, offload: Sequence[str] = ()) -> Plan:
    """Return `plan` with this decision where the plan leaves one open."""
    values: Mapping[str, object] = {"recompute": form, "offload": [*offload]}
    keys = (key for stage in range(plan.model.stages or 0) for key in plan.undecided_memory(stage))
    return plan.with_memory({key: values[key.rpartition(".")[2]] for key in keys})


def _options(job: Job, trials: Sequence[_Trial]) -> list[list[StageOption]]:
    return [list(_options_of(job, stage, trials)) for stage in range(job.schedule.stages)]


def _options_of(job: Job, stage: int, trials: Sequence[_Trial]) -> Iterator[StageOption]:
    """Yield the options of a stage. Options that recompute and offload least come first."""
    undecided, plan = job.plan.undecided_memory(stage), job.plan
    free = _recompute_is_free(job, stage)
    possible = [each for each in _OFFLOADS if not {*each} & {*_never_in_files(job)}]
    offloads = possible if f"stage.{stage}.offload" in undecided else [plan.offloaded_of(stage)]
    microbatches = _microbatches(job, stage)
    for trial in trials if free else trials[:1]:
        recompute = trial.recompute if free else plan.recompute_of(stage) or "nothing"
        copies = [each for each in trial.stages if job.schedule.replicas.stage(each.stage) == stage]
        moved = Moved.of(copies[0].movable, copies[0].in_flight)
        for offload in offloads:
            own = {each.worker: _moving(each, trial, offload) for each in copies}
            tight = {worker: stage_load(job, each, offload, waits=True) for worker, each in own.items()}
            ample = {worker: stage_load(job, each, offload, waits=False) for worker, each in own.items()}
            loads = {worker: (tight if job.plan.is_tight(worker) else ample)[worker] for worker in own}
            added = added_nanoseconds(
                microbatches * trial.work[stage],
                microbatches * trials[0].work[stage],
                moved_bytes(moved, offload, microbatches),
            )
            yield StageOption(Switches(recompute, offload), added, loads, ample)


def _moving(stage: StageEstimate, trial: _Trial, offload: Sequence[str]) -> StageEstimate:
    """Return the estimate with the bytes that exist for a moment if the parts `offload` are in files.

    If only some parts are in files, the larger of the two tried values counts.
    """
    in_files = {*offload} & {*_PARTS[1:]}
    if not in_files or not trial.working:
        return stage
    found = trial.working[stage.stage]
    return structs.replace(stage, working=found if len(in_files) == len(_PARTS[1:]) else max(found, stage.working))


def _microbatches(job: Job, stage: int) -> int:
    """Return how many microbatches of a step a copy of the stage has at most."""
    shares = job.plan.stage_plan(stage).shares
    return max(map(len, dealt(shares, job.schedule.microbatches)))


def _chosen(
    job: Job, chosen: Sequence[StageOption], tight: Sequence[int], plain: _Trial, left_out: Sequence[str]
) -> ChosenMemory:
    keys: dict[str, object] = {}
    stages = []
    for stage, option in enumerate(chosen):
        values: Mapping[str, object] = {"recompute": option.switches.recompute, "offload": [*option.switches.offload]}
        keys |= {key: values[key.rpartition(".")[2]] for key in job.plan.undecided_memory(stage)}
        step = max(1, _microbatches(job, stage) * plain.work[stage])
        recompute = option.switches.recompute
        shown = recompute if isinstance(recompute, str) else ", ".join(recompute)
        stages.append(StageMemory(stage, shown, option.switches.offload, round(option.nanoseconds / step, 3)))
    keys |= {key: [*tight] for key in job.plan.undecided_of_workers}
    return ChosenMemory(keys, tuple(stages), tuple(left_out))


def _refusals(job: Job, options: Sequence[Sequence[StageOption]], rooms: Sequence[WorkerRoom]) -> Iterator[PlanError]:
    for short in shortfalls(options, rooms):
        limit = job.plan.limit_of(short.worker)
        yield PlanError(limit_key(job, short.worker), str(short), value=str(limit))
