"""Measures what each layer of a plan's model costs, in a stage of its own, and decides where the model is cut."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.edges import EACH_LAYER
from stageline.pipeline.model.layer_costs import CutWish, LayerCost, chosen_edges
from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import DELAYED, ScheduleRefused, make_schedule
from stageline.pipeline.schedule.check import check_schedule
from stageline.pipeline.stage.settings import SharedParameters
from stageline.workers.extras.preflight.layer_run import Handed, LayerRun
from stageline.workers.extras.preflight.trial_result import MeasuredCut, MeasuredLayers
from stageline.workers.runtime.executor.losses import ComputeFailed
from stageline.workers.runtime.job import Job, prepare

from .trial_stages import TrialStages


def measured_cut(plan: Plan, doing: Callable[[str], None]) -> MeasuredCut:
    """Where `plan` is cut, and the seconds of each stage. `doing` is told what is next.

    Raises `PlanRefused`, `ModelRefused` or `DataError` if the plan cannot work, or no cut fits.
    """
    job = _each_layer(plan, doing)
    torch.set_num_threads(job.plan.workers[0].threads)
    costs = layer_costs(job, doing)
    model = plan.model
    delays = plan.schedule.name == DELAYED
    stashes = plan.schedule.mode == "async" and not delays
    wish = CutWish(model.stages or 1, model.balance, model.stage_memory, stashes, delays)
    edges = chosen_edges(costs, wish, lambda stages: _in_flight(plan, stages))
    times = [sum(cost.nanoseconds for cost in costs[begin:end]) / 1e9 for begin, end in pairwise(edges)]
    return MeasuredCut(tuple(edges[1:-1]), tuple(times))


def measured_layers(plan: Plan, doing: Callable[[str], None]) -> MeasuredLayers:
    """What each layer of `plan` costs on its first worker's device. Raises as `measured_cut` does."""
    job = _each_layer(plan, doing)
    torch.set_num_threads(job.plan.workers[0].threads)
    names = tuple(part.names[0] for part in job.segments)
    return MeasuredLayers(names, tuple(layer_costs(job, doing)), plan.schedule.in_step)


def layer_costs(job: Job, doing: Callable[[str], None] = lambda what: None) -> list[LayerCost]:
    """What each stage of `job` costs, which is used up by it. Raises `ModelRefused` or `DataError`."""
    stages = TrialStages(job, doing)
    costs: list[LayerCost] = []
    handed = Handed()
    try:
        for index, part in enumerate(job.segments):
            doing(f"the measurement of layer {part.names[0]}")
            with stages.there(index):
                layer = LayerRun(job, stages[index], index, handed)
                costs.append(layer.cost())
                handed = layer.hands
    except ComputeFailed as error:
        raise ModelRefused(f"a measurement with the first microbatch failed: {error}") from error
    return costs


def _each_layer(plan: Plan, doing: Callable[[str], None]) -> Job:
    """The job of a plan that has each layer in a stage of its own, on the device and threads of the first worker."""
    first = plan.workers[0]
    model = plan.model.model_copy(update={"cut": EACH_LAYER, "stages": None})
    other = {"name": "1f1b", "mode": "sync", "window": None, "times": None, "memory": None, "file": None, "rows": None}
    schedule = plan.schedule.model_copy(update=other)
    job = prepare(plan.model_copy(update={"model": model, "schedule": schedule, "workers": ()}), doing)
    workers = tuple(
        worker.model_copy(update={"device": first.device, "threads": first.threads}) for worker in job.plan.workers
    )
    alone = [replace(part, shared=SharedParameters()) for part in job.segments]  # no gradients of other stages are used
    return replace(job, plan=job.plan.model_copy(update={"workers": workers}), segments=alone)


def _in_flight(plan: Plan, stages: int) -> Sequence[int] | None:
    """How many microbatches each of `stages` stages holds at most; None if the plan's schedule has no such number."""
    choice, own = plan.schedule, stages == plan.model.stages
    placement = plan.placement if own else [(stage,) for stage in range(stages)]
    try:
        schedule = make_schedule(
            choice.begins_with,
            placement,
            choice.in_step,
            mode=choice.mode,
            window=choice.window,
            times=choice.times,
            rows=choice.rows,
        )
    except ScheduleRefused:
        return None
    return check_schedule(schedule).stage_peak
