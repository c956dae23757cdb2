"""The data of a job: how many steps its epochs have, and which function opens what a worker needs."""

from collections.abc import Callable
from math import gcd

from stageline.pipeline.data import Source
from stageline.pipeline.model.load import load_inputs, load_source, load_targets
from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Schedule


def steps_of_epochs(plan: Plan, batches: int) -> int:
    """Return the steps of the plan's epochs, of `batches` each. Raises `PlanRefused` if batches would be left."""
    every, of = (plan.run.epochs or 0) * batches, plan.schedule.accumulate
    if every % of:
        raise plan.refused(
            "run.epochs",
            f"{every} batches, {batches} in each, are no whole steps of schedule.accumulate = {of} batches; use "
            f"run.steps = {every // of or 1}, or a number of epochs that is a multiple of {of // gcd(of, batches)}",
        )
    return every // of


def steps_of_epoch(plan: Plan, batches: int) -> int:
    """Return the steps of an epoch. Raises `PlanRefused` if a step has batches of two epochs."""
    if batches % plan.schedule.accumulate:
        raise plan.refused(
            _counting_epochs(plan),
            f"an epoch has {batches} batches, which are no whole steps of schedule.accumulate = "
            f"{plan.schedule.accumulate}; use {'another number' if plan.caches_prefix else 'a number of steps'}",
        )
    return batches // plan.schedule.accumulate


def _counting_epochs(plan: Plan) -> str:
    """Return the key for which an epoch must have whole steps: first the one that has no other way out."""
    if plan.caches_prefix:
        return "model.prefix_cache"
    every_epoch = plan.evaluation is not None and plan.evaluation.every == "epoch"
    return "evaluation.every" if every_epoch else "lr_scheduler.every"


def loader_for(plan: Plan, schedule: Schedule, worker: int | None) -> Callable[[Plan], Source]:
    """Return the function that opens the data that `worker` needs; inputs and targets for None or a script."""
    if plan.data.targets is None or worker is None or worker >= len(schedule.placement):
        return load_source
    stages = _stages_of(schedule, worker)
    if 0 not in stages:
        return load_targets
    return load_source if schedule.stages - 1 in stages else load_inputs


def has_an_end(schedule: Schedule, worker: int | None) -> bool:
    """Return True if `worker` computes the first stage or the last, or does not exist, which is refused later."""
    if worker is None or worker >= len(schedule.placement):
        return True
    return not {0, schedule.stages - 1}.isdisjoint(_stages_of(schedule, worker))


def _stages_of(schedule: Schedule, worker: int) -> set[int]:
    return {*map(schedule.replicas.stage, schedule.placement[worker])}
