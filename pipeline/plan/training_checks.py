"""What the keys of a plan must agree on: how long, on what and in which mode a run trains, and when it evaluates."""

import re
from collections.abc import Iterator

from stageline.pipeline.schedule import DELAYED

from .errors import PlanError
from .keys.models import PlanTables
from .keys.stages import MOST_MICROBATCHES

SCRIPT_SUMS = ("rows", "loss")  # what an evaluation for a script returns besides the metrics

WITH_DATASET = ("held_out", "target", "collate", "shuffle", "num_workers")


def length(plan: PlanTables) -> Iterator[PlanError]:
    """A plan's run has a length: steps or epochs."""
    if plan.scripted:
        return
    match plan.run.steps, plan.run.epochs:
        case None, None:
            yield PlanError("run.steps", "set how long to train: steps = 1000, or epochs = 10")
        case int(), int(epochs):
            yield PlanError("run.steps", f"epochs = {epochs} is given too; keep one of the two")


def scripted(plan: PlanTables) -> Iterator[PlanError]:
    """What only a run with a data source of its own can have."""
    if not plan.scripted:
        return
    for key in ("steps", "epochs"):
        if getattr(plan.run, key) is not None:
            yield PlanError(f"run.{key}", "the script decides how long it trains; leave it out")
    if plan.caches_prefix:
        yield PlanError(
            "model.prefix_cache",
            "a script's batches do not say which samples they have; leave it out, or train with a plan",
        )
    if plan.lr_scheduler is not None and plan.lr_scheduler.every == "epoch":
        yield PlanError("lr_scheduler.every", "the length of a script's epochs is not known; use a number of steps")
    if plan.schedule.mode != "sync":
        yield PlanError("schedule.mode", 'a script trains batch by batch; use mode = "sync"')
    if plan.recovery.record == "all":
        yield PlanError("recovery.record", 'a replay cannot load the objects of a script; use record = "none"')
    for name in plan.model.metrics:
        if re.split("[:.]", name)[-1] in SCRIPT_SUMS:
            yield PlanError(
                "model.metrics",
                f"every evaluation returns {re.split('[:.]', name)[-1]} already; rename the function of {name}",
            )


def evaluation(plan: PlanTables) -> Iterator[PlanError]:
    """Evaluation needs rows that are held out, and a best round something to compare."""
    choice = plan.evaluation
    if choice is None:
        return
    if plan.scripted:
        yield PlanError("evaluation", "a script evaluates when it calls line.evaluate; leave the table out")
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
    if choice.every is not None and plan.schedule.mode == "async":
        yield PlanError(
            "evaluation.every",
            'mode = "async" does not support it, since its stages are never after the same step; leave it out to '
            'evaluate after the last step, or use schedule.mode = "sync"',
        )
    if choice.patience is not None and choice.every is None:
        yield PlanError(
            "evaluation.patience", "it requires several evaluations: add evaluation.every = 100, or leave it out"
        )
    if choice.keep_best and (lacking := _why_best_is_not_kept(plan)):
        yield PlanError("evaluation.keep_best", f"{lacking}, or leave it out")
    if plan.data.dataset is not None and plan.data.held_out is None:
        yield PlanError("data.held_out", 'there are no rows to evaluate: add held_out = "data.py:test"')


def _why_best_is_not_kept(plan: PlanTables) -> str:
    """What the plan lacks for it, and the way out; "" if nothing."""
    if plan.evaluation is not None and plan.evaluation.every is None:
        return "it requires several evaluations: add evaluation.every = 100"
    if plan.queues.in_one_process:
        return 'with queues.url = "memory://" no checkpoints are written: use another url'
    if not plan.recovery.on:
        return "no checkpoints are written: use recovery.restarts = 5 and snapshot_every = 20"
    return ""


def data(plan: PlanTables) -> Iterator[PlanError]:
    """A source or a dataset, and keys that go with the latter."""
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
    """A cut and a number of stages agree."""
    match plan.model.cut, plan.model.stages:
        case "auto", None:
            yield PlanError("model.cut", "set the number of stages: add stages = 2")
        case tuple(cut), int(stages) if len(cut) + 1 != stages:
            yield PlanError("model.stages", f"cut = {list(cut)} makes {len(cut) + 1} stages; leave stages out")


def balance(plan: PlanTables) -> Iterator[PlanError]:
    """What is balanced, and within which memory, where the cut is found."""
    model = plan.model
    given = [key for key in ("balance", "stage_memory") if getattr(model, key) not in (None, "parameters")]
    for key in given:
        if plan.scripted:
            yield PlanError(f"model.{key}", "a script has no batch to measure before the run; set model.cut")
        elif model.cut is None and model.stages is None:
            yield PlanError(f"model.{key}", "set the number of stages: add stages = 2")


def rows(plan: PlanTables) -> Iterator[PlanError]:
    """Every microbatch of a whole batch has a row."""
    rows, microbatches = plan.data.batch_size, plan.schedule.microbatches
    if rows < microbatches:
        yield PlanError(
            "data.batch_size",
            f"expected a row for each of {microbatches} microbatches, got {rows}; "
            f"use batch_size = {microbatches} or more, or schedule.microbatches = {rows} or fewer",
        )


def asynchronous(plan: PlanTables) -> Iterator[PlanError]:
    """What PipeDream's mode is defined for; `delayed` says what PipeDream-2BW's is."""
    if plan.schedule.mode != "async" or plan.schedule.name == DELAYED:
        return
    if plan.schedule.microbatches != 1:
        yield PlanError(
            "schedule.microbatches",
            'mode = "async" updates after every microbatch; use microbatches = 1, or name = "2bw" with as many as '
            "there are stages",
        )
    if plan.schedule.accumulate != 1:
        yield PlanError("schedule.accumulate", 'mode = "async" updates after every microbatch; use accumulate = 1')
    if plan.schedule.name not in ("1f1b", "auto"):
        yield PlanError(
            "schedule.name", 'mode = "async" supports only name = "1f1b" and "2bw"; use one of them, or mode = "sync"'
        )


def clipping(plan: PlanTables) -> Iterator[PlanError]:
    """Gradients are clipped in synchronous mode."""
    if plan.clips and plan.schedule.mode == "async":
        yield PlanError(
            "optimizer.clip_norm",
            'mode = "async" does not support it, since its stages never have the gradients of one step at once; '
            'leave it out, or use schedule.mode = "sync"',
        )


def accumulated(plan: PlanTables) -> Iterator[PlanError]:
    """A step has not too many microbatches."""
    if plan.schedule.in_step > MOST_MICROBATCHES:
        yield PlanError(
            "schedule.accumulate",
            f"microbatches = {plan.schedule.microbatches} of each batch make {plan.schedule.in_step} in a step; use "
            f"numbers whose product is at most {MOST_MICROBATCHES}",
        )
