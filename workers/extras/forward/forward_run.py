"""Predictions and evaluation: a run's stages run forward, on worker processes of this machine, as a script's do.

    run's folder ── run_model ──> the unsplit model ── forks ──> worker 0: stage 0    worker 1: stage 1
                                                                      │ batch -> ...  -> ... │ -> outputs

This process has the model's weights in memory once; its workers, which are forks of it, share that memory. Nothing is
written to the run's folder: the processes have a folder of their own, which is removed at the end, or, if the command
is killed, by the next such command.
"""

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from stageline.pipeline.data import Batch, Feed, joined_outputs
from stageline.pipeline.errors import DataError, ModelRefused, StagelineError, without_code
from stageline.pipeline.model.load import base_folder, load_function, load_source
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.layers.loss import Loss
from stageline.pipeline.stage.stage_update import OptimizerFactory
from stageline.pipeline.tree import Tree, describe
from stageline.workers.disk.owned_folder import OwnedFolder
from stageline.workers.errors import RunFailed
from stageline.workers.extras.exchange.load import RunModel
from stageline.workers.runtime.calls import UNDER_WAY, Call, CallKind
from stageline.workers.runtime.executor import Metric
from stageline.workers.runtime.losses import ComputeFailed
from stageline.workers.script.arguments import LineCall, Workers
from stageline.workers.script.begin import Begun, begin_run
from stageline.workers.script.calls.calls import Replies, only, total
from stageline.workers.script.checks import demand_batch

from .row_files import Inputs, JoinedOutputs, write_outputs

PREFIX = "stageline-forward-"
Tell = Callable[[str], object]  # takes a line for people


def temporary_run_folder() -> OwnedFolder:
    """Return the folder of a run that lasts only as long as its command. Raises `OSError`."""
    return OwnedFolder(PREFIX, partial(shutil.rmtree, ignore_errors=True))


class ForwardFailed(StagelineError):
    """Error that the stages could not compute a batch of `predict`, `eval` or `stageline.load`.

    Mend: Give rows of the shape and dtype that the model was trained with; the message has the layer and the batch.

    Example: stage 0 failed in 0F0. The batch is float32 [6, 5]
    """

    error_code = "SL508"

    def __init__(self, reason: str, exit_code: int) -> None:
        """Create the error with the exit code of the command."""
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of an evaluation: the mean loss and metrics over `rows` rows."""

    rows: int
    loss: float | None
    metrics: Mapping[str, float]


class ForwardRun(AbstractContextManager["ForwardRun"]):
    """Stages of a model as workers that run forward only: processes, or "inline" in this one."""

    def __init__(
        self,
        model: RunModel,
        workers: Workers = "processes",
        *,
        loss: Loss | None = None,
        metrics: Mapping[str, Metric] | None = None,
        tell: Tell = lambda line: None,
    ) -> None:
        """Start the workers: processes, or "inline" in this process.

        Args:
            model: Model of the run, and its plan.
            workers: Processes, or "inline".
            loss: Loss for `evaluate`.
            metrics: Metrics for `evaluate`, by name.
            tell: Called with a line for people if a worker is lost and replaced.

        Raises `ModelRefused`, `PlanRefused`, `CannotFork` or `ForwardFailed` if the workers do not start.
        """
        self._model, self._titles, self._tell = model, list(metrics or ()), tell
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_run_folder()).path
            options = _options(model, folder, workers, loss or _no_loss, list((metrics or {}).values()))
            begun = _begun(options)
            self._check, self._run = begun.check_inputs, begun.run
            stack.callback(self._run.discard)
            self._names = list(options.named_metrics)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        """Stop the workers and remove their folder."""
        self._stack.close()
        self._tell_news()  # of the last moments, too

    def predictions(self, batches: Iterable[Tree]) -> Iterator[Tree]:
        """Yield the model's output in evaluation mode for each of `batches`, in order.

        A batch may have any number of rows.

        Raises `ForwardFailed`, and `DataError` for a batch that cannot be cut into microbatches.
        """
        for replies in self._replies(CallKind.PREDICT, ((batch, None) for batch in batches)):
            yield joined_outputs(only(replies))

    def evaluate(self, batches: Iterable[Batch]) -> Measured:
        """Return the mean loss and metrics over `batches`, pairs of inputs and targets.

        Raises as `predictions` does.
        """
        sums = total(self._replies(CallKind.EVALUATE, map(_demanded, batches)))
        count = sums["rows"]
        metrics = {title: sums[name] / count for title, name in zip(self._titles, self._names, strict=True)}
        return Measured(int(count), sums["loss"] / count if "loss" in sums else None, metrics)

    def _replies(self, kind: CallKind, batches: Iterable[Batch]) -> Iterator[Replies]:
        """Yield the replies to calls, of which at most `UNDER_WAY` are under way."""
        waiting: deque[tuple[Tree, Future[Replies]]] = deque()
        for inputs, targets in batches:
            self._check(inputs, 1)
            if len(waiting) >= UNDER_WAY:
                yield self._result(*waiting.popleft())
            with self._explained(waiting[0][0] if waiting else inputs):  # an earlier one may have failed
                waiting.append((inputs, self._run.submit(Call(kind, inputs=inputs, targets=targets))))
        while waiting:
            yield self._result(*waiting.popleft())

    def _result(self, inputs: Tree, done: "Future[Replies]") -> Replies:
        with self._explained(inputs):
            replies = done.result()
        self._tell_news()
        return replies

    def _tell_news(self) -> None:
        for line in self._run.news():
            self._tell(line)

    @contextmanager
    def _explained(self, inputs: Tree) -> Iterator[None]:
        """Return a context whose errors of the model name the layer, its definition, and the batch `inputs`."""
        try:
            yield
        except (RunFailed, ComputeFailed) as error:
            reason = without_code(error.reason if isinstance(error, RunFailed) else str(error))
            layer = next((name for name in self._model.layer_names if f"layer {name}:" in reason), None)
            what = "" if layer is None else f". Layer {layer} is {_described(self._model.module, layer)}"
            raise ForwardFailed(f"{reason}{what}. The batch is {describe(inputs)}", error.exit_code) from error


def _begun(options: LineCall) -> Begun:
    try:
        return begin_run(options)
    except RunFailed as error:  # its folder is removed
        raise ForwardFailed(error.reason, error.exit_code) from error


def _options(model: RunModel, folder: Path, workers: Workers, loss: Loss, metrics: list[Metric]) -> LineCall:
    """Return the options of a run for evaluation.

    Evaluation is the same on every schedule. No update is made, so neither optimizer nor snapshots are needed.
    """
    cut, stages = model.plan.model.cut, model.plan.model.stages
    plan = model.plan.without_replicas()
    return LineCall(
        model.made,
        loss=loss,
        optimizer=cast("OptimizerFactory", NoOptimizer),
        cut=None if cut is None or isinstance(cut, str) else cut,
        stages=stages if cut is None or isinstance(cut, str) else None,
        placement=plan.placement,
        schedule="gpipe",
        microbatches=plan.schedule.in_step,
        seed=plan.run.seed,
        device=plan.workers[0].device,
        threads=plan.workers[0].threads,
        autocast=plan.model.autocast,
        accept_difference=bool(plan.model.accept_difference),
        metrics=metrics,
        workers=workers,
        name=plan.run.name,
        folder=folder,
        settings=_unlike(plan, workers) | _codecs(plan),
    )


class NoOptimizer:
    """Stand-in for an optimizer where nothing is trained."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        """Create an optimizer with one group of parameters."""
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None:
        """Do nothing."""

    def zero_grad(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, object]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Do nothing."""


def _no_loss(outputs: Tree, targets: Tree) -> torch.Tensor:
    raise AssertionError("predictions have no loss")


def _demanded(batch: Batch) -> Batch:
    demand_batch(*batch)
    return batch


def _unlike(plan: Plan, workers: Workers) -> dict[str, object]:
    """Return settings with the devices and threads of workers that have others than worker 0.

    Raises `ModelRefused` if there are any and `workers` is "inline": bits follow from both.
    """
    first, *others = plan.workers
    found: dict[str, object] = {}
    for number, each in enumerate(others, 1):
        found |= {
            f"workers.{number}.{key}": getattr(each, key)
            for key in ("device", "threads")
            if getattr(each, key) != getattr(first, key)
        }
    if found and workers == "inline":
        raise ModelRefused(f"{next(iter(found))} is not that of worker 0: inline, all compute alike. Use processes")
    return found


def _codecs(plan: Plan) -> dict[str, object]:
    """Return the settings that give queues between stages the codecs of the run, which lose the same bits."""
    match plan.queues.codec:
        case None:
            return {}
        case str(codec):
            return {"queues.codec": codec}
        case codecs:
            return {f"queues.codec.{name}": codec for name, codec in codecs.items()}


def _described(module: torch.nn.Module, name: str) -> str:
    """Return the layer as torch prints it if that is one line, else its class."""
    try:
        layer = module.get_submodule(name)
    except AttributeError:  # a parameter, or a part of the forward
        return "a function of the model"
    text = repr(layer)
    return text if "\n" not in text else f"a {type(layer).__name__}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Data and metrics of an evaluation; None stands for those of the plan.

    `dataset` and `source` name other data in the plan's words; at most one is given. All rows of the dataset are
    evaluated, or those that the source holds out.
    """

    dataset: str | None = None
    source: str | None = None
    metrics: tuple[str, ...] | None = None
    batch_size: int | None = None


def plan_with(plan: Plan, wanted: Wanted) -> Plan:
    """Return the plan with the data and metrics that are `wanted`.

    Raises `DataError` if the run is a script's, so that its plan has no data, and none are named.
    """
    changes: dict[str, Any] = {} if wanted.batch_size is None else {"batch_size": wanted.batch_size}
    if wanted.dataset is not None:
        changes |= {"dataset": wanted.dataset, "source": None, "held_out": None, "shuffle": False, "drop_last": None}
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
    """Return the batches of the plan's data to evaluate on, cut as the run's own evaluation cuts them.

    All rows count if `wanted` names a dataset, else those held out. Raises `ModelRefused`, and `DataError` without any.
    """
    source = load_source(plan)
    if wanted.dataset is not None:
        return map(source.batch, range(source.steps_per_epoch))
    feed = Feed(source, plan.schedule.in_step, 0, plan.data.batch_size)
    if not feed.batches_held_out:
        raise DataError(f"{plan.data.origin} holds no rows out to evaluate on: name a dataset by --data")
    return map(feed.held_out_batch, range(feed.batches_held_out))


def loss_of(plan: Plan) -> Loss:
    """Return the plan's loss function. Raises `ModelRefused` if it cannot be loaded."""
    return load_function(plan.model.loss, base_folder(plan), "model.loss")


def metrics_of(plan: Plan) -> Mapping[str, Metric]:
    """Return the metrics by the names that the run's result has. Raises `ModelRefused` if one cannot be loaded."""
    names = plan.model.metrics
    made: list[Callable[..., Any]] = [load_function(name, base_folder(plan), "model.metrics") for name in names]
    return dict(zip(plan.metric_names, made, strict=True))


def evaluate_run(model: RunModel, wanted: Wanted, workers: Workers, tell: Tell) -> tuple[str, Measured]:
    """Evaluate a run's model, and return the name of the data in the plan's words, and the result.

    Args:
        model: Model of the run, and its plan.
        wanted: Data and metrics.
        workers: Processes, or "inline".
        tell: Called with a line for people if a worker is lost and replaced.

    Raises what `ForwardRun`, its `evaluate`, `plan_with`, `batches_of`, `loss_of` and `metrics_of` raise.
    """
    plan = plan_with(model.plan, wanted)
    loss, metrics, batches = loss_of(plan), metrics_of(plan), batches_of(plan, wanted)
    with ForwardRun(model, workers, loss=loss, metrics=metrics, tell=tell) as run:
        return plan.data.origin_held_out, run.evaluate(batches)


def predict_rows(
    model: RunModel, inputs: Inputs, target: Path, batch_size: int | None, workers: Workers, tell: Tell
) -> Mapping[str, str]:
    """Write the model's outputs for `inputs` to a file. Return what was left out by name: outputs that are no tensors.

    Args:
        model: Model of the run, and its plan.
        inputs: Rows of inputs.
        target: File to write; it does not exist after an error.
        batch_size: Rows of a batch; None takes the plan's.
        workers: Processes, or "inline".
        tell: Called with a line for people if a worker is lost and replaced.

    Raises what `ForwardRun` and its `predictions` raise, `DataError` for outputs that cannot be joined, and `OSError`.
    """
    size = batch_size or model.plan.data.batch_size
    outputs = JoinedOutputs()
    with ForwardRun(model, workers, tell=tell) as run:
        for count, output in zip(inputs.sizes(size), run.predictions(inputs.batches(size)), strict=True):
            outputs.add(output, count)
    write_outputs(target, outputs.joined())
    return outputs.left_out
