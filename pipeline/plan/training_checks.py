"""Checks of a plan's training: how long, on which data and in which mode a run trains, and when it evaluates."""

from collections.abc import Iterator

from .errors import PlanError
from .keys.models import PlanTables
from .keys.stages import MOST_MICROBATCHES
from .traits import BALANCED, PIPEDREAM

WITH_DATASET = ("held_out", "target", "collate", "shuffle", "drop_last", "num_workers")
SUMS = ("rows", "loss")  # results of an evaluation for a script, besides the metrics


def length(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if the plan sets neither steps nor epochs, or both. A script decides its length itself."""
    if plan.scripted:
        return
    match plan.run.steps, plan.run.epochs:
        case None, None:
            yield PlanError("run.steps", "set how long to train: steps = 1000, or epochs = 10")
        case int(), int(epochs):
            yield PlanError("run.steps", f"epochs = {epochs} is given too; keep one of the two")


def evaluation(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if the table [evaluation] lacks rows to evaluate, or a metric or rounds to compare."""
    choice = plan.evaluation
    if choice is None:
        return
    names = ("loss", *plan.metric_names)
    if choice.metric not in names:
        yield PlanError(
            "evaluation.metric",
            f"it is not a metric of the run; use {' or '.join(map(repr, names))}, or add it to model.metrics",
        )
    elif choice.metric != "loss" and choice.better is None:
        yield PlanError("evaluation.better", f'set which {choice.metric} is better: better = "higher", or "lower"')
    if "loss" in plan.metric_names:
        yield PlanError("model.metrics", "every evaluation returns loss already; rename the function")
    if choice.patience is not None and choice.every is None:
        yield PlanError(
            "evaluation.patience", "it requires several evaluations: add evaluation.every = 100, or leave it out"
        )
    if choice.keep_best and choice.every is None:
        yield PlanError(
            "evaluation.keep_best", "it requires several evaluations: add evaluation.every = 100, or leave it out"
        )
    if plan.data.dataset is not None and plan.data.held_out is None:
        yield PlanError("data.held_out", 'there are no rows to evaluate: add held_out = "data.py:test"')


def by_evaluation(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if learning rates follow evaluations that do not come, or that they take the wrong way round."""
    rates = plan.lr_scheduler
    if rates is None or rates.every != "evaluation":
        return
    if not plan.scripted and (plan.evaluation is None or plan.evaluation.every is None):
        yield PlanError(
            "lr_scheduler.every", 'it requires evaluations between the steps: add evaluation.every = 100, or "epoch"'
        )
    direction = rates.options.get("mode", "min") if str(rates.factory).endswith(".ReduceLROnPlateau") else None
    if plan.criterion and (wrong := plan.criterion.better.contradiction(direction, plan.criterion.metric)):
        yield PlanError("evaluation.better", wrong)


def data(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if the plan names neither a source nor a dataset, or both, or gives a source keys of a dataset."""
    data = plan.data
    if data.source is None and data.dataset is None:
        yield PlanError(
            "data.source", 'say where the batches come from: source = "data.py:batches", or dataset = "data.py:train"'
        )
    elif data.source is not None and data.dataset is not None:
        yield PlanError("data.dataset", f'source = "{data.source}" is given too; keep one of the two')
    elif data.dataset is None:
        for key in WITH_DATASET:
            if getattr(data, key) is not None:
                yield PlanError(
                    f"data.{key}", "only data.dataset uses it, and a source decides this itself; leave it out"
                )


def number_of_stages(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if the cut and the number of stages disagree, or "auto" has no number."""
    match plan.model.cut, plan.model.stages:
        case "auto", None:
            yield PlanError("model.cut", "set the number of stages: add stages = 2")
        case tuple(cut), int(stages) if len(cut) + 1 != stages:
            yield PlanError("model.stages", f"cut = {list(cut)} makes {len(cut) + 1} stages; leave stages out")


def balance(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each key that balances stages in a plan with neither a cut nor a number of stages."""
    for key in BALANCED.asked(plan) if plan.model.cut is None and plan.model.stages is None else ():
        yield PlanError(key, "set the number of stages: add stages = 2")


def rows(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if a batch has fewer rows than microbatches."""
    rows, microbatches = plan.data.batch_size, plan.schedule.microbatches
    if rows < microbatches:
        yield PlanError(
            "data.batch_size",
            f"expected a row for each of {microbatches} microbatches, got {rows}; "
            f"use batch_size = {microbatches} or more, or schedule.microbatches = {rows} or fewer",
        )


def asynchronous(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if asynchronous PipeDream ("1f1b") is given several microbatches in a step."""
    if PIPEDREAM.asked(plan) and plan.schedule.microbatches != 1:
        yield PlanError(
            "schedule.microbatches",
            'mode = "async" updates after every microbatch; use microbatches = 1, or name = "2bw" with as many as '
            "there are stages",
        )


def accumulated(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error if a step has too many microbatches."""
    if plan.schedule.in_step > MOST_MICROBATCHES:
        yield PlanError(
            "schedule.accumulate",
            f"microbatches = {plan.schedule.microbatches} of each batch make {plan.schedule.in_step} in a step; use "
            f"numbers whose product is at most {MOST_MICROBATCHES}",
        )


def metrics(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each metric of a script with the name of a sum that every evaluation returns: rows or loss."""
    for name in plan.model.metrics if plan.scripted else ():
        if (function := name.replace(":", ".").rpartition(".")[2]) in SUMS:
            yield PlanError(
                "model.metrics", f"every evaluation returns {function} already; rename the function of {name}"
            )
