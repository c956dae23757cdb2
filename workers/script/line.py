"""`Line` trains a model in stages from a user's script: a module, a loader, a loop.

This file has the script's view. A `ScriptRun` carries the calls out, in this process or in others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

from torch import Tensor

from stageline.pipeline.data import Batch, joined_outputs
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.tree import Tree
from stageline.workers.errors import LineClosed, RunFailed
from stageline.workers.runtime.calls import Call, CallKind, batches_of_step

from .arguments import LineCall, Model, given_as
from .begin import ScriptRun, displayed
from .callbacks import BetterName, Callback, FitOptions, Fitted, demand_fit
from .calls.calls import Replies, StepLoss, UnansweredCalls, copied, only, total
from .calls.page import Panels, Seen, Timetable, page
from .checks import TARGETS, batches_of, demand_batch, demand_rows, outside_fit
from .first_batch import begin_line
from .fit_batches import FitBatches, end_of, held_out_of, known_epoch, steps_from, steps_of_epoch
from .fitting import EvaluationLog, Fit

CLOSED, FINISHED = "closed", "finished"


class Line(AbstractContextManager["Line"]):
    """A model's stages on the workers of a schedule, driven step by step from a script.

    A line trains bit for bit like the unsplit model under the same microbatches, loss shares and layer seeding. It is a
    context manager: leaving the block without an error closes it.

    Args:
        model: A torch module, `Layers`, a list with one module for each stage, or a function that returns one of these.
            A module that is no `nn.Sequential` and of no known family is traced with the first batch: the run begins
            with the first `step`, `fit`, `evaluate` or `predict`. Until then the weights are the module's own.
        loss: Function of (outputs, targets) that returns a 0-dimensional tensor, the mean over rows.
        optimizer: Function that makes an optimizer from a stage's parameters, such as `partial(SGD, lr=0.1)`.
        lr_scheduler: Function that makes a scheduler from an optimizer; None for none.
        lr_every: Number of steps after which the scheduler advances; in a `fit` also "epoch", or "evaluation" for a
            scheduler such as `ReduceLROnPlateau`.
        clip_norm: Largest norm of the gradients over all stages; larger ones are scaled down to it before the update.
        ema_decay: Decay of an exponential moving average of the weights, as in torch's `AveragedModel`. Methods read
            the averages with `ema=True`.
        groups: Optimizer settings of parameters by patterns of names: {"match": ["*.bias"], "weight_decay": 0.0}.
        cut: Numbers or names of the layers that stages 1, 2, ... begin with.
        stages: Number of stages, instead of `cut`.
        placement: Stages of each worker, such as [[0, 2], [1, 3]]; None for one worker for each stage.
        schedule: Name from `schedule_names()`, or a function that lists the actions.
        microbatches: Number of microbatches that each batch is split into; None for two for each stage if there are
            several workers. Their rows differ by at most one; those without rows, of a batch with fewer rows than
            microbatches, are not computed.
        accumulate: Number of batches per step.
        window: One number for each stage, for the schedule "window" and optionally for "zb-h1".
        seed: Seed of the layers' random numbers.
        device: Device of all stages, or a list with the device of each worker.
        autocast: "bf16" computes forwards and the loss under torch.autocast.
        recompute: "stage", "layers" (one by one), or patterns of names of layers and modules: the backward runs their
            forward again instead of keeping activations.
        threads: Number of threads that each worker computes with.
        metrics: Functions of (outputs, targets), means over rows, which `evaluate` returns by name.
        features: Features, their classes or functions that make them; the outermost first.
        workers: "processes", one for each worker, forked from this one; or "inline", in this thread.
        name: Name of the run.
        folder: Folder for the files of runs with processes, in a folder for each run.
        settings: Other keys of a plan, {"recovery.lease": "30s"}.
        broker: Address at which workers on other machines join, "tcp://0.0.0.0:7000" or "redis://host/0"; then no
            worker is forked.
        trainable: Patterns (`fnmatch`) of the names of parameters that are trained. All others get
            `requires_grad = False`, also in `model` itself.
        taps: Patterns of the names of layers whose outputs are written to the run's folder, for `read_taps`.
        weights: File or folder from which each worker reads its stages' weights; a function that makes the model is
            then called without memory for parameters.
        accept_difference: Train a traced model although its graphs were found to differ from its forward.
        progress: Draw progress on stderr; None draws on a terminal and in a notebook.

    Raises:
        ModelRefused: An argument that describes the computation cannot work.
        PlanRefused: The plan refuses an argument, which the error names.
        ScheduleRefused: No such schedule exists for these stages, workers and microbatches.
        CannotFork: This process uses a GPU, which its forks could not use.
        NoSuchRun: The folder to resume cannot be resumed.
        RunFailed: The processes do not start.

    Example:
        with Line(model, stages=2, loss=loss, optimizer=partial(SGD, lr=0.1)) as line:
            for x, y in loader:
                loss = line.step(x, y)
        model.load_state_dict(line.state_dict())
    """

    @given_as(LineCall)
    def __init__(self, options: LineCall) -> None:
        """Begin the run, or resume it; `options` holds the arguments that the class documents."""
        self._unanswered, self._options, self._closed = UnansweredCalls(), options, ""
        self._begun = begin_line(options)
        self._evaluations, self._fits = self._open_log(), 0
        self._epoch: int | None = None  # steps of an epoch, in a fit; 0 if nothing counts them
        self._seen = Seen(self._run.position)
        self._display = displayed(self._begun, options, self._seen)

    @classmethod
    def resume(cls, saved: str | Path, /, model: Model, **arguments: Any) -> Self:
        """Continue the run in the folder `saved`, at its newest complete checkpoint; `position` tells the step.

        Args:
            saved: Folder of a run, or a folder that `save` wrote. A run that has finished goes on as a new run.
            model: Model that the run began with.
            **arguments: Arguments that the run began with. `cut`, `stages`, `placement`, `schedule` and `window` may
                differ if the run's workers are on this machine; other differences are refused.

        Raises:
            NoSuchRun: `saved` cannot be continued. Other errors are those of `Line`.

        Example:
            with Line.resume("runs/line-20261122-083857-f5f1", build, cut=[6], loss=loss, optimizer=optimizer) as line:
                for x, y in loader.batches(line.position, epochs=10):
                    line.step(x, y)
        """
        return cls(model, resume=saved, **arguments)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the line; after an error, end the run as it is and keep its newest checkpoint."""
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
        """Return the run's folder, its number of workers, the position, and why the line is closed."""
        where = "inline" if self.folder is None else f"run {self.folder}"
        closed = f", {self._closed}" if self._closed else ""
        return f"Line({where}, {self._run.size} workers, step {self.position}{closed})"

    @property
    def folder(self) -> Path | None:
        """Folder of the run's snapshots, logs and final weights, made when it begins; None for an inline line."""
        return self._run.folder

    @property
    def position(self) -> int:
        """Number of training steps called so far, at which a loader continues."""
        return self._run.position

    def step(self, x: Tree, y: Tree) -> StepLoss:
        """Train on one batch and return its loss without waiting, so that the next step may begin.

        Args:
            x: Tree of tensors whose dimension 0 counts the batch's rows; copied. With `accumulate` above 1, a tuple of
                `accumulate` trees.
            y: Targets, in the form of `x`.

        Returns:
            The loss; reading it waits for the step.

        Raises:
            DataError: Rows differ in number, a tree has no tensor, or a traced model was traced with inputs of another
                shape or for other numbers of rows. The line has not changed.
            RunFailed: The run has failed, in this or an earlier step.
            ComputeFailed: Inline, the model, the loss or the data raised.
            ModelRefused: `lr_every` is "epoch" or "evaluation", and the step is not one of a `fit`.
        """
        if wrong := outside_fit(self._options) if self._epoch is None else "":
            raise ModelRefused(wrong)
        done = self._submit(CallKind.TRAIN, x, y)
        done.add_done_callback(self._seen.step_ended)
        return StepLoss.of(done)

    def fit(
        self,
        batches: FitBatches,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        held_out: FitBatches | None = None,
        evaluate_every: int | Literal["epoch"] | None = None,
        metric: str = "loss",
        better: BetterName | None = None,
        patience: int | None = None,
        best: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        targets: str = TARGETS,
    ) -> Fitted:
        """Train on `batches` like a loop over `step`, with evaluations, early stopping and a best checkpoint.

        Args:
            batches: List or loader of (x, y), or of dicts, walked once for each epoch.
            epochs: Number of epochs, counted from the beginning of the run; a resumed line continues at its position.
            steps: Number of steps, counted likewise. Without `epochs` and `steps`, it is one pass.
            held_out: Batches to evaluate; by default those that a `Loader` holds out.
            evaluate_every: Number of steps between evaluations, or "epoch". With `ema_decay`, the averages are
                evaluated.
            metric: Value that evaluations are compared by.
            better: "lower" or "higher"; required for every metric but the loss.
            patience: Number of evaluations in a row without an improvement after which the fit ends.
            best: Path at which the best checkpoint is kept, for `Line.resume` and `load_weights(folder, best=True)`.
            callbacks: Objects of classes derived from `Callback`.
            targets: Key of the targets in batches that are dicts; the inputs are the dict without it.

        Returns:
            Number of steps, losses, evaluations, and why the fit ended.

        Raises:
            ValueError: Options contradict each other or have wrong values.
            DataError: `batches` are unusable.
            NotSaved: The best checkpoint cannot be saved. Errors of `step` and of callbacks also end the fit.
        """
        length = partial(steps_of_epoch, batches, self._options.accumulate)
        wanted = FitOptions(
            epochs=epochs,
            steps=steps,
            held_out=held_out_of(batches) if held_out is None and evaluate_every is not None else held_out,
            evaluate_every=length("evaluate_every") if evaluate_every == "epoch" else evaluate_every,
            metric=metric,
            better=better,
            patience=patience,
            best=best,
            callbacks=callbacks,
        )
        demand_fit(wanted, self._options, self._run.cannot_save)
        epoch = length("lr_every") if self._options.follows("epoch") else 0
        differs = self._run.of_fit(self._fits + 1)
        each = steps_from(batches, self.position, epochs, steps, self._options.accumulate, differs, targets)
        measure = partial(self._evaluate, ema=self._options.ema_decay is not None, targets=targets)
        end = end_of(batches, epochs, steps, self._options.accumulate)
        self._seen.begin_fit(end, known_epoch(batches, self._options.accumulate), metric)
        with self._in_fit(epoch):
            return Fit(self, each, wanted, self._evaluations, self._fits, measure, end, self._seen.evaluated).run()

    @contextmanager
    def _in_fit(self, epoch: int) -> Iterator[None]:
        """Count a fit whose epochs have `epoch` steps, 0 if nothing counts them; until its end, steps are of it."""
        self._fits, self._epoch = self._fits + 1, epoch
        try:
            yield
        finally:
            self._epoch = None

    def evaluate(
        self, batches: Iterable[Batch | Mapping[str, Tree]], *, ema: bool = False, targets: str = TARGETS
    ) -> dict[str, float]:
        """Return the mean loss ("loss") and metrics over all rows of `batches`, in evaluation mode without gradients.

        Args:
            batches: Iterable of (inputs, targets), or of dicts.
            ema: Evaluate the averages of the weights.
            targets: Key of the targets in batches that are dicts; the inputs are the dict without it.

        Raises:
            DataError: There are no rows, or `batches` is no iterable of (inputs, targets) or of such dicts.
            ModelRefused: `ema` on a line without `ema_decay`.
        """
        self._demand_averages(ema=ema)
        found = self._evaluate(batches, ema=ema, targets=targets)
        self._evaluations.note(self.position, found)
        return found

    def _evaluate(self, batches: Iterable[Any], *, ema: bool, targets: str) -> dict[str, float]:
        calls = [self._submit(CallKind.EVALUATE, x, y, ema=ema) for x, y in batches_of(batches, targets=targets)]
        sums = total([done.result() for done in calls])
        rows = sums.pop("rows")
        return {name: value / rows for name, value in sums.items()}

    def predict(self, x: Tree, *, ema: bool = False) -> Tree:
        """Return the model's output for `x`, in evaluation mode without gradients.

        Args:
            x: Tree of tensors of any dtype whose dimension 0 counts rows.
            ema: Compute with the averages of the weights.

        Raises:
            DataError: A tensor of the output cannot be joined by rows, such as one number for a microbatch.
            ModelRefused: `ema` on a line without `ema_decay`.
        """
        self._demand_averages(ema=ema)
        demand_rows(x)
        self._begin_with(x, self._options.accumulate)
        return joined_outputs(only(self._call(Call(CallKind.PREDICT, inputs=copied(x), ema=ema)).result()))

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return the weights under the unsplit model's names, in its order, on the CPU.

        A model given as a list has the names of `nn.Sequential(*model)`. Works after a close without an error, too.

        Args:
            ema: Return averages for the trained parameters; before the first step they equal the weights.

        Raises:
            ModelRefused: `ema` on a line without `ema_decay`.
        """
        self._demand_averages(ema=ema)
        if self._closed == FINISHED:
            return self._begun.weights.in_order(self._run.weights(ema=ema))
        parts = cast("Mapping[int, dict[str, Tensor]]", self._call(Call(CallKind.STATE, ema=ema)).result())
        return self._begun.weights.in_order({name: tensor for part in parts.values() for name, tensor in part.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the weights from `state`, which has the unsplit model's names; optimizer state and averages stay.

        Before the first batch of a line that begins with that, the weights of its model itself are set.

        Raises:
            ModelRefused: Names are missing or unknown, or shapes or dtypes differ; the line has not changed.
        """
        self._begun.weights.check(state)
        copies = {name: tensor.detach().clone() for name, tensor in state.items()}
        self._call(Call(CallKind.LOAD, state=copies)).result()

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint of all calls so far in `folder`, which is created and must be empty.

        `Line.resume(folder, the same arguments)` continues from it bit for bit, as a run of its own.

        Raises:
            NotSaved: The checkpoint cannot be saved; nothing of it is left, and the line can continue.
        """
        self._run.save(Path(folder), lambda draft: self._call(Call(CallKind.SAVE, inputs=draft)).result())

    def timetable(self) -> Timetable:
        """Return the begin and end of each action of the newest training step that the workers have reported.

        Before the first step, and inline, it is the schedule's plan. It prints as text and draws itself in a notebook.
        """
        return self._run.timetable()

    def show(self) -> Panels:
        """Return the page of `stageline report` about the run, for a notebook; inline, the view of the line itself."""
        return Panels(self._run.panels() or self._repr_html_())

    def close(self) -> None:
        """End the run: carry out all steps and save the weights in its folder. Raises `RunFailed`."""
        if not self._closed:
            self._closed = CLOSED
            try:
                self._run.close()
                self._closed = FINISHED
            finally:
                self._hide()

    def _repr_html_(self) -> str:
        """Return a notebook's view: the position, the workers, the losses, and a timetable of one step."""
        state = self._closed or f"position {self.position}"
        return page(self._options.name, state, self._seen, self._run.workers(), self.timetable())

    @property
    def _run(self) -> ScriptRun:
        return self._begun.run

    def _begin_with(self, inputs: Tree, times: int) -> None:
        """Begin a run that waits for its first batch, and check a batch's inputs, cut in `times` its microbatches."""
        if self._begun.begin is not None and not self._closed:
            self._begun = self._begun.begin(inputs, times)
            self._display = displayed(self._begun, self._options, self._seen)
        self._begun.check_inputs(inputs, times)

    def _open_log(self) -> EvaluationLog:
        try:
            return EvaluationLog(self._run.folder, self._run.position)
        except OSError as error:  # no process is left behind
            self._run.abort(f"what it has evaluated cannot be kept: {error}")
            raise

    def _hide(self) -> None:
        """End the display of progress."""
        if self._display is not None:
            self._display.close()

    def _demand_averages(self, *, ema: bool) -> None:
        if ema and self._options.ema_decay is None:
            raise ModelRefused("ema=True: this line keeps no averages of its weights. Make it with ema_decay = 0.999")

    def _submit(self, kind: CallKind, x: Tree, y: Tree, *, ema: bool = False) -> "Future[Replies]":
        of_step = self._options.accumulate if kind is CallKind.TRAIN else 1
        for inputs, targets in [(x, y)] if of_step == 1 else batches_of_step(x, y, of_step):
            demand_batch(inputs, targets)
            self._begin_with(inputs, self._options.accumulate // of_step)
        value = self._seen.value_at(self.position) if self._options.follows("evaluation") else None
        call = Call(kind, inputs=copied(x), targets=copied(y), ema=ema, epoch=self._epoch or 0, value=value)
        return self._call(call)

    def _call(self, call: Call) -> "Future[Replies]":
        """Submit a call and return the future of its replies; errors of earlier calls are raised here at the latest."""
        if self._closed:
            raise LineClosed(
                "this line is closed, as it is at the end of its `with`: its run is over. Call it before, or make a "
                "new line" + ("; state_dict() still has the weights" if self._closed == FINISHED else "")
            )
        return self._unanswered.submit(self._run.submit, call)
