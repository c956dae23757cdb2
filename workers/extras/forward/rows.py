"""Rows through a run's model: predictions for a file; loss and metrics of held-out rows, or of other data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageline.pipeline.data import Batch, Feed
from stageline.pipeline.errors import DataError
from stageline.pipeline.model.load import base_folder, load_function, load_source
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.layers.loss import Loss
from stageline.workers.extras.exchange.load import RunModel
from stageline.workers.runtime.metric_value import Metric
from stageline.workers.script.arguments import Workers

from .forward_run import ForwardRun, Measured, Tell
from .row_files import Inputs, JoinedOutputs, write_outputs


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to evaluate on, and by which metrics; None stands for what the plan says. `dataset` and `source` name others
    in the plan's words, of which at most one is given: all rows of the dataset, or those that the source holds out."""

    dataset: str | None = None
    source: str | None = None
    metrics: tuple[str, ...] | None = None
    batch_size: int | None = None


def plan_with(plan: Plan, wanted: Wanted) -> Plan:
    """The plan with what is `wanted`. Raises `DataError` if it has no data of its own, and none is named."""
    changes: dict[str, Any] = {} if wanted.batch_size is None else {"batch_size": wanted.batch_size}
    if wanted.dataset is not None:
        changes |= {"dataset": wanted.dataset, "source": None, "held_out": None, "shuffle": False}
    if wanted.source is not None:
        changes |= {"source": wanted.source, "dataset": None, "held_out": None}
    if wanted.dataset is not None and plan.data.dataset is None:  # options were those of the source
        changes["options"] = {}
    if plan.scripted and wanted.dataset is None and wanted.source is None:
        raise DataError("the batches of this run came from a script: name a dataset by --data, or a source by --source")
    metrics = plan.model.metrics if wanted.metrics is None else wanted.metrics
    return plan.model_copy(
        update={
            "data": plan.data.model_copy(update=changes),
            "model": plan.model.model_copy(update={"metrics": metrics}),
        }
    )


def batches_of(plan: Plan, wanted: Wanted) -> Iterator[Batch]:
    """The batches of `plan_with(plan, wanted)`, cut as the run's own evaluation cuts them. Raises `ModelRefused`, and
    `DataError` if there are none."""
    source = load_source(plan)
    if wanted.dataset is not None:
        return map(source.batch, range(source.steps_per_epoch))
    feed = Feed(source, plan.schedule.in_step, 0, plan.data.batch_size)
    if not feed.batches_held_out:
        raise DataError(f"{plan.data.origin} holds no rows out to evaluate on: name a dataset by --data")
    return map(feed.held_out_batch, range(feed.batches_held_out))


def loss_of(plan: Plan) -> Loss:
    """Raises `ModelRefused`."""
    return load_function(plan.model.loss, base_folder(plan), "model.loss")


def metrics_of(plan: Plan) -> Mapping[str, Metric]:
    """By the names that the run's result has. Raises `ModelRefused`."""
    names = plan.model.metrics
    made: list[Callable[..., Any]] = [load_function(name, base_folder(plan), "model.metrics") for name in names]
    return dict(zip(plan.metric_names, made, strict=True))


def evaluate_run(model: RunModel, wanted: Wanted, workers: Workers, tell: Tell) -> tuple[str, Measured]:
    """What was evaluated on, in the plan's words, and what was measured. Raises what `ForwardRun`, `load_source` and
    `load_function` do."""
    plan = plan_with(model.plan, wanted)
    loss, metrics, batches = loss_of(plan), metrics_of(plan), batches_of(plan, wanted)
    with ForwardRun(model, workers, loss=loss, metrics=metrics, tell=tell) as run:
        return plan.data.origin_held_out, run.evaluate(batches)


def predict_rows(
    model: RunModel, inputs: Inputs, target: Path, batch_size: int | None, workers: Workers, tell: Tell
) -> Mapping[str, str]:
    """Writes to `target` what `model` returns for `inputs`, row by row, in batches of `batch_size` rows (None: the
    plan's). Returns what it returned besides tensors, by names. Raises what `ForwardRun` does, `DataError`, `OSError`;
    then there is no such file."""
    size = batch_size or model.plan.data.batch_size
    outputs = JoinedOutputs()
    with ForwardRun(model, workers, tell=tell) as run:
        for count, output in zip(inputs.sizes(size), run.predictions(inputs.batches(size)), strict=True):
            outputs.add(output, count)
    write_outputs(target, outputs.joined())
    return outputs.left_out
