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
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from torch import Tensor

from stageline.pipeline.data import Batch, rows
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.tree import Tree, concatenate, map_tensors
from stageline.workers.errors import LineClosed, RunFailed
from stageline.workers.runtime.calls import UNDER_WAY, CallKind, batches_of_step

from .arguments import LineCall, Model, given_as
from .begin import begin_run
from .callbacks import BetterName, Callback, FitBatches, FitOptions, Fitted, demand_fit, end_of, held_out_of, steps_from
from .calls.calls import Replies, StepLoss, only, total
from .calls.news import display_of
from .calls.page import Seen, Timetable, page
from .checks import batches_of, demand_batch
from .fitting import EvaluationLog, Fit

CLOSED, FINISHED = "closed", "finished"
MOST = 2 * UNDER_WAY  # calls without replies: a script that has so many sleeps until half are done, not after each call


class Line(AbstractContextManager["Line"]):
    """The stages of a model as workers of a schedule, trained with a loader of one's own.

    `model`: an `nn.Sequential`, a model of a known family or `Layers`, with `cut` (the numbers or names of the layers
    that stages 1, 2, ... begin with) or `stages` (their number); a list with one module for each stage; or a function
    that returns one of these. `loss` is a mean over rows;
    `optimizer` makes an optimizer from a stage's parameters; `groups` give some of these settings of their own, by
    their names: {"match": ["*.bias"], "weight_decay": 0.0}. Before its steps gradients are scaled down so that their
    norm over all stages is at most `clip_norm`. With `ema_decay`, workers keep an exponential moving average of the
    weights, as torch's `AveragedModel` does: `ema=True` asks for it. With `autocast` = "bf16", forwards and the loss
    are computed as in torch.autocast. `recompute`: backward runs each "stage", its "layers" one by one, or layers
    and modules whose names match these patterns, forward again instead of keeping their activations. `metrics` are
    means over rows, which `evaluate` gives.
    `placement`: the stages of each worker, by default one worker each. The names of a schedule are `schedule_names()`;
    `window` goes with "window", and may with "zb-h1". `workers`: "processes", one for each worker, forked from this
    one, or "inline", in this thread. `broker`: the address at which workers on other machines join,
    "tcp://0.0.0.0:7000" or "redis://host/0": then none are forked. Files of a run of processes go to `folder`;
    `settings` are other keys of a plan, {"recovery.lease": "30s"}.
    `resume` is what `Line.resume` passes on: None begins a run. `progress` is drawn on stderr: with
    None if that is a terminal. `weights`: the file or folder that each worker reads those of its stages from; a
    function that makes the model is then called without memory for parameters. `trainable`: patterns of the names of
    parameters that are trained, as `fnmatch` has them; all others get `requires_grad = False`, also in `model` itself.
    `taps`: patterns of the names of layers whose outputs are written to the run's folder, where `read_taps` reads them.
    `accept_difference`: train a traced model though its graphs were found to compute something other than its forward.

    Equal, bit for bit, to the unsplit model under the same microbatches, loss shares and layer seeding. Raises
    `ModelRefused`, `ScheduleRefused` or `PlanRefused` for what cannot work, `NoSuchRun` for what cannot be resumed,
    `RunFailed` if the processes do not start.
    """

    @given_as(LineCall)
    def __init__(self, options: LineCall) -> None:
        self._waiting: list[Future[Replies]] = []
        self._closed = ""
        self._options = options
        self._weights, self._check_inputs, self._run = begin_run(options)
        self._evaluations, self._fits = self._open_log(), 0
        self._seen = Seen(self._run.position)
        news = None if self._run.folder is None else self._run.news
        waits_for, progress = self._run.waits_for, options.progress
        self._display = display_of(options.name, self._seen, waits_for, progress, news)  # its thread is in no fork

    @classmethod
    def resume(cls, saved: str | Path, /, model: Model, **arguments: Any) -> Self:
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
            knows = isinstance(error, RunFailed)
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = f"the script has raised {type(error).__name__}"
            self._run.abort(reason, knows_failure=knows, interrupted=interrupted)

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

    def fit(
        self,
        batches: FitBatches,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        held_out: FitBatches | None = None,
        evaluate_every: int | None = None,
        metric: str = "loss",
        better: BetterName | None = None,
        patience: int | None = None,
        best: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Fitted:
        """Trains on `batches` as a loop over `step` does: a list or a loader of (x, y), walked once for each epoch.

        `epochs` and `steps` count from the beginning of the run: a line that was resumed goes on at its position. With
        neither, it is one pass. After every `evaluate_every` steps it evaluates the batches of `held_out`, by default
        those that a `Loader` holds out. They are compared by `metric`: by the loss, of which the lower is `better`, or
        another, of which you say "lower" or "higher". After `patience` of them in a row that were not better, the fit
        ends. Of a line with `ema_decay`, the averages are evaluated. `best`: the path at which it keeps a checkpoint of
        the best one, which `Line.resume` goes on from. `callbacks`: see `Callback`.

        Raises `ValueError` for options that cannot be, `DataError` for batches, `NotSaved`, and what `step` and the
        callbacks raise.
        """
        wanted = FitOptions(
            epochs=epochs,
            steps=steps,
            held_out=held_out_of(batches) if held_out is None and evaluate_every is not None else held_out,
            evaluate_every=evaluate_every,
            metric=metric,
            better=better,
            patience=patience,
            best=best,
            callbacks=callbacks,
        )
        demand_fit(wanted, self._options.named_metrics, self._run.cannot_save)
        self._fits += 1
        differs = None if self._run.batches is None else self._run.batches.of_fit(self._fits, self.position)
        each = steps_from(batches, self.position, epochs, steps, self._options.accumulate, differs)
        measure = partial(self._evaluate, ema=self._keeps_averages)
        end = end_of(batches, epochs, steps, self._options.accumulate)
        return Fit(self, each, wanted, self._evaluations, self._fits, measure, end).run()

    def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> dict[str, float]:
        """The mean loss ("loss") and metrics over all rows of `batches`, in evaluation mode and without gradients; with
        `ema`, of the averages of the weights.

        Raises `DataError` if there are no rows, or for what is no iterable of (inputs, targets); `ModelRefused` for
        averages of a line without `ema_decay`.
        """
        self._demand_averages(ema=ema)
        found = self._evaluate(batches, ema=ema)
        self._evaluations.note(self.position, found)
        return found

    def _evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> dict[str, float]:
        calls = [self._submit(CallKind.EVALUATE, x, y, ema=ema) for x, y in batches_of(batches)]
        sums = total([done.result() for done in calls])
        rows = sums.pop("rows")
        return {name: value / rows for name, value in sums.items()}

    def predict(self, x: Tree, *, ema: bool = False) -> Tree:
        """The model's output for `x`, in evaluation mode and without gradients; trees of tensors of any dtype. With
        `ema`, as the averages of the weights compute it. Raises `ModelRefused` as `evaluate` does."""
        self._demand_averages(ema=ema)
        rows(x)
        self._check_inputs(x, self._options.accumulate)
        return concatenate(only(self._call(CallKind.PREDICT, _copied(x), ema=ema).result()))

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The weights under the unsplit model's names, in its order, on the CPU. For a list: as `nn.Sequential(*model)`
        has them. With `ema`, averages stand for the parameters that are trained; before the first step, these are the
        weights themselves.

        Also of a line that was closed without an error. Raises `ModelRefused` as `evaluate` does.
        """
        self._demand_averages(ema=ema)
        if self._closed == FINISHED:
            return self._weights.in_order(self._run.weights(ema=ema))
        parts = cast("Mapping[int, dict[str, Tensor]]", self._call(CallKind.STATE, ema=ema).result())
        return self._weights.in_order({name: tensor for part in parts.values() for name, tensor in part.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Sets the weights, which have the unsplit model's names. The optimizers keep their state, averages too.

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
        return page(self._options.name, state, self._seen, self._run.workers(), self.timetable())

    def _open_log(self) -> EvaluationLog:
        try:
            return EvaluationLog(self._run.folder, self._run.position)
        except OSError as error:  # no process is left behind
            self._run.abort(f"what it has evaluated cannot be kept: {error}")
            raise

    def _hide(self) -> None:
        """Ends the display of progress."""
        if self._display is not None:
            self._display.close()

    @property
    def _keeps_averages(self) -> bool:
        return self._options.ema_decay is not None

    def _demand_averages(self, *, ema: bool) -> None:
        if ema and not self._keeps_averages:
            raise ModelRefused("ema=True: this line keeps no averages of its weights. Make it with ema_decay = 0.999")

    def _submit(self, kind: CallKind, x: Tree, y: Tree, *, ema: bool = False) -> "Future[Replies]":
        of_step = self._options.accumulate if kind is CallKind.TRAIN else 1
        for inputs, targets in [(x, y)] if of_step == 1 else batches_of_step(x, y, of_step):
            demand_batch(inputs, targets)
            self._check_inputs(inputs, self._options.accumulate // of_step)
        return self._call(kind, _copied(x), _copied(y), ema=ema)

    def _call(
        self,
        kind: CallKind,
        x: Tree = None,
        y: Tree = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        ema: bool = False,
    ) -> "Future[Replies]":
        """Waits while too many calls are under way; what they raise is raised here at the latest."""
        if self._closed:
            raise LineClosed(
                "this line is closed, as it is at the end of its `with`: its run is over. Call it before, or make a "
                "new line" + ("; state_dict() still has the weights" if self._closed == FINISHED else "")
            )
        if len(self._waiting) >= MOST:
            while len(self._waiting) > UNDER_WAY:
                self._waiting.pop(0).result()
        done = self._run.submit(kind, x, y, state, ema=ema)
        self._waiting.append(done)
        return done


def _copied(tree: Tree) -> Tree:
    """What is retained must not change, and a loader may fill the same memory again."""
    return map_tensors(lambda tensor: tensor.detach().clone(), tree)


def _measured(replies: Replies) -> tuple[float | None, float | None]:
    """A step's loss, and the norm of its gradients."""
    found: float | tuple[float | None, float] | None = only(replies)
    return found if isinstance(found, tuple) else (found, None)
