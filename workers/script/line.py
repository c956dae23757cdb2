"""Trains a model in stages from a user's script: a module, a loader, a loop.

with Line(model, cut=[2], loss=loss, optimizer=partial(SGD, lr=0.1), microbatches=8) as line:
    for x, y in loader:
        loss = line.step(x, y)
model.load_state_dict(line.state_dict())

Here is what a script sees; `ScriptRun` carries the calls out, in this process or in others.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, Unpack, cast

import torch
from torch import Tensor

from stageline.pipeline.data import Batch, rows
from stageline.pipeline.errors import DataError
from stageline.pipeline.stage.optimizer import OptimizerFactory
from stageline.pipeline.stage.precision import Autocast
from stageline.pipeline.stage.stage import Loss, LrSchedulerFactory
from stageline.pipeline.tree import Tree, concatenate, map_tensors
from stageline.workers.errors import LineClosed
from stageline.workers.runtime.calls import CallKind, batches_of_step
from stageline.workers.runtime.program import AHEAD
from stageline.workers.script.arguments.batch_shape import batches_of, demand_batch
from stageline.workers.script.arguments.line_arguments import LineArguments, Workers
from stageline.workers.script.arguments.script_plan import LineOptions, Metric, Model
from stageline.workers.script.calls.open_call import Replies
from stageline.workers.script.calls.step_loss import StepLoss
from stageline.workers.script.display.display import display_of
from stageline.workers.script.display.page import page
from stageline.workers.script.display.seen import Seen
from stageline.workers.script.display.timetable import Timetable

from .begin import begin_run

CLOSED, FINISHED = "closed", "finished"
MOST = 2 * AHEAD  # calls without replies: a script that has so many sleeps until half are done, not after each call


class Line(AbstractContextManager["Line"]):
    """The stages of a model as workers of a schedule, trained with a loader of one's own.

    `model`: an `nn.Sequential`, a model of a known family or `Layers`, with `cut` (the numbers or names of the layers
    that stages 1, 2, ... begin with) or `stages` (their number); a list with one module for each stage; or a function
    that returns one of these. `loss` is a mean over rows;
    `optimizer` makes an optimizer from a stage's parameters; `groups` give some of these settings of their own, by
    their names: {"match": ["*.bias"], "weight_decay": 0.0}. Before its steps gradients are scaled down so that their
    norm over all stages is at most `clip_norm`. With `autocast` = "bf16", forwards and the loss are computed as in
    torch.autocast. `metrics` are means over rows, which `evaluate` gives.
    `placement`: the stages of each worker, by default one worker each. The names of a schedule are `schedule_names()`;
    `window` goes with "window". `workers`: "processes", one for each worker, forked from this one, or "inline", in this
    thread. `broker`: the address at which workers on other machines join, "tcp://0.0.0.0:7000" or "redis://host/0":
    then none are forked. Files of a run of processes go to `folder`; `settings` are other keys of a plan,
    {"recovery.lease": "30s"}.
    `resume` is what `Line.resume` passes on: None begins a run. `progress` is drawn on stderr: with
    None if that is a terminal. `weights`: the file or folder that each worker reads those of its stages from; a
    function that makes the model is then called without memory for parameters. `trainable`: patterns of the names of
    parameters that are trained, as `fnmatch` has them; all others get `requires_grad = False`, also in `model` itself.
    `taps`: patterns of the names of layers whose outputs are written to the run's folder, where `read_taps` reads them.

    Equal, bit for bit, to the unsplit model under the same microbatches, loss shares and layer seeding. Raises
    `ModelRefused`, `ScheduleRefused` or `PlanRefused` for what cannot work, `NoSuchRun` for what cannot be resumed,
    `RunFailed` if the processes do not start.
    """

    def __init__(
        self,
        model: Model,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        lr_scheduler: LrSchedulerFactory | None = None,
        lr_every: int = 1,
        clip_norm: float | None = None,
        groups: Sequence[Mapping[str, object]] | None = None,
        cut: Sequence[int | str] | None = None,
        stages: int | None = None,
        placement: Sequence[Sequence[int]] | None = None,
        schedule: str = "1f1b",
        microbatches: int = 1,
        accumulate: int = 1,
        window: Sequence[int] | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        autocast: Autocast | None = None,
        threads: int = 1,
        metrics: Sequence[Metric] = (),
        workers: Workers = "processes",
        broker: str | None = None,
        name: str = "line",
        folder: str | Path = "runs",
        settings: Mapping[str, object] | None = None,
        resume: str | Path | None = None,
        progress: bool | None = None,
        weights: str | Path | None = None,
        trainable: Sequence[str] | None = None,
        taps: Sequence[str] | None = None,
    ) -> None:
        options = LineOptions(
            loss=loss,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            lr_every=lr_every,
            clip_norm=clip_norm,
            groups=groups,
            cut=cut,
            stages=stages,
            placement=placement,
            schedule=schedule,
            microbatches=microbatches,
            accumulate=accumulate,
            window=window,
            seed=seed,
            device=device,
            autocast=autocast,
            threads=threads,
            metrics=metrics,
            name=name,
            folder=folder,
            settings=settings or {},
            broker=broker,
            weights=weights,
            trainable=trainable,
            taps=taps,
        )
        self._waiting: list[Future[Replies]] = []
        self._closed = ""
        self._name, self._accumulate = name, accumulate
        self._weights, self._check_inputs, self._run = begin_run(model, options, workers, resume)
        self._seen = Seen(self._run.position)
        news = None if self._run.folder is None else self._run.news
        self._display = display_of(name, self._seen, self._run.waits_for, progress, news)  # its thread is in no fork

    @classmethod
    def resume(cls, saved: str | Path, /, model: Model, **arguments: Unpack[LineArguments]) -> Self:
        """Goes on from the folder `saved`: of a run that has ended early, or is about to end, at its newest complete
        checkpoint; or one that `save` has written. `position` tells where that is.

        `model` and the arguments are those that the run was begun with; but `cut`, `stages`, `placement`, `schedule`
        and `window` may differ where its workers are on this machine. Others are refused. Raises as `Line` does, and
        `NoSuchRun` for what cannot be gone on with.
        """
        return cls(model, resume=saved, **arguments)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """After an error, the run ends as it is; its newest checkpoint stays."""
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = f"{CLOSED}: {type(error).__name__} was raised"
            self._hide()
            self._run.abort(f"the script has raised {type(error).__name__}")

    def __repr__(self) -> str:
        where = "inline" if self.folder is None else f"run {self.folder}"
        closed = f", {self._closed}" if self._closed else ""
        return f"Line({where}, {self._run.size} workers, step {self.position}{closed})"

    @property
    def folder(self) -> Path | None:
        """Where the run's files are: snapshots, logs, and the weights at the end; None of an inline line."""
        return self._run.folder

    @property
    def position(self) -> int:
        """How many steps have been called: where a loader goes on."""
        return self._run.position

    def step(self, x: Tree, y: Tree) -> StepLoss:
        """Trains on one batch; its loss, which is waited for when it is read, so that the next step may begin before.

        `x` and `y` are trees of tensors whose dimension 0 counts the batch's rows; they are copied. With `accumulate`
        above 1, each is a tuple of so many, of the step's batches. Raises `DataError`
        if they have different numbers of rows, one has no tensor, or a traced model was traced with inputs of another
        shape or for other numbers of rows (then nothing has changed), `RunFailed` or `ComputeFailed` if the run has
        failed, also in an earlier step.
        """
        done = self._submit(CallKind.TRAIN, x, y)
        done.add_done_callback(self._seen.step_ended)
        return StepLoss(lambda: _measured(done.result()))

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The mean loss ("loss") and metrics over all rows of `batches`, in evaluation mode and without gradients.

        Raises `DataError` if there are no rows, or for what is no iterable of (inputs, targets).
        """
        sums: dict[str, float] = {}
        for done in [self._submit(CallKind.EVALUATE, x, y) for x, y in batches_of(batches)]:
            found: Mapping[str, float | None] = _only(done.result())
            for name, value in found.items():
                if value is not None:  # in a batch without rows there is nothing to measure
                    sums[name] = sums.get(name, 0.0) + value
        total = sums.pop("rows", 0)
        if not total:
            raise DataError("there are no rows to evaluate. Give at least one batch with rows")
        return {name: value / total for name, value in sums.items()}

    def predict(self, x: Tree) -> Tree:
        """The model's output for `x`, in evaluation mode and without gradients; trees of tensors of any dtype."""
        rows(x)
        self._check_inputs(x, self._accumulate)
        return concatenate(_only(self._call(CallKind.PREDICT, _copied(x)).result()))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights under the unsplit model's names, in its order, on the CPU. For a list: as `nn.Sequential(*model)`
        has them.

        Also of a line that was closed without an error.
        """
        if self._closed == FINISHED:
            return self._weights.in_order(self._run.weights())
        parts = cast("Mapping[int, dict[str, Tensor]]", self._call(CallKind.STATE).result())
        return self._weights.in_order({name: tensor for part in parts.values() for name, tensor in part.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Sets the weights, which have the unsplit model's names. The optimizers keep their state.

        Raises `ModelRefused` for names that are missing or not the model's, and other shapes or dtypes; nothing has
        changed then.
        """
        self._weights.check(state)
        self._call(CallKind.LOAD, state={name: tensor.detach().clone() for name, tensor in state.items()}).result()

    def save(self, folder: str | Path) -> None:
        """Saves a checkpoint of what was called so far in `folder`, which is made, and may not have anything in it:
        `Line.resume(folder, the same arguments)` goes on from there, bit for bit, as a run of its own.

        Raises `NotSaved`, after which nothing is left of it, and the line can go on.
        """
        self._run.save(Path(folder), lambda draft: self._call(CallKind.SAVE, draft).result())

    def timetable(self) -> Timetable:
        """When each action of the newest training step began and ended, as far as the workers have reported; before
        the first, and inline, as the schedule plans it. Prints as text, and draws itself in a notebook.
        """
        return self._run.timetable()

    def close(self) -> None:
        """Ends the run: all steps are carried out, the weights are saved in its folder. Raises `RunFailed`."""
        if not self._closed:
            self._closed = CLOSED
            try:
                self._run.close()
                self._closed = FINISHED
            finally:
                self._hide()

    def _repr_html_(self) -> str:
        """For a notebook: where it is, its workers, its losses, and a step as it ran."""
        state = self._closed or f"position {self.position}"
        return page(self._name, state, self._seen, self._run.workers(), self.timetable())

    def _hide(self) -> None:
        """Ends the display of progress."""
        if self._display is not None:
            self._display.close()

    def _submit(self, kind: CallKind, x: Tree, y: Tree) -> "Future[Replies]":
        self._demand(kind, x, y)
        return self._call(kind, _copied(x), _copied(y))

    def _demand(self, kind: CallKind, x: Tree, y: Tree) -> None:
        of_step = self._accumulate if kind is CallKind.TRAIN else 1
        for inputs, targets in [(x, y)] if of_step == 1 else batches_of_step(x, y, of_step):
            demand_batch(inputs, targets)
            self._check_inputs(inputs, self._accumulate // of_step)

    def _call(
        self, kind: CallKind, x: Tree = None, y: Tree = None, state: Mapping[str, Tensor] | None = None
    ) -> "Future[Replies]":
        """Waits while too many calls are under way; what they raise is raised here at the latest."""
        if self._closed:
            raise LineClosed(
                "this line is closed, as it is at the end of its `with`: its run is over. Call it before, or make a "
                "new line" + ("; state_dict() still has the weights" if self._closed == FINISHED else "")
            )
        if len(self._waiting) >= MOST:
            while len(self._waiting) > AHEAD:
                self._waiting.pop(0).result()
        done = self._run.submit(kind, x, y, state)
        self._waiting.append(done)
        return done


def _copied(tree: Tree) -> Tree:
    """What is retained must not change, and a loader may fill the same memory again."""
    return map_tensors(lambda tensor: tensor.detach().clone(), tree)


def _only(replies: Replies) -> Any:
    """The one reply that says something: that of the last stage's owner."""
    return next((reply for reply in replies.values() if reply is not None), None)


def _measured(replies: Replies) -> tuple[float | None, float | None]:
    """A step's loss, and the norm of its gradients."""
    found: float | tuple[float | None, float] | None = _only(replies)
    return found if isinstance(found, tuple) else (found, None)
