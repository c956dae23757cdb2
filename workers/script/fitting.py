"""Loop of `Line.fit`: steps through batches, evaluations, the best checkpoint, and early stopping.

step 0 1 2 3 | evaluate | step 4 5 6 7 | evaluate | ...      evaluate_every = 4
             note, best                note, best: stop?

Two steps are under way while the next batch is drawn: a loss is read when it is two steps old, at an evaluation, or at
the end, so callbacks are told of it after the same calls in every run. Decisions follow from the evaluations alone, in
`pipeline/evaluation.py`; a resumed fit begins with the evaluations on record:

evaluations.jsonl    {"kind":"evaluation","step":200,"loss":0.41,"metrics":{"accuracy":0.8},"time":...,"fit":1}

An evaluation of a fit is on the disk before its next step is called. So a run that resumes after `position` steps finds
all evaluations of the fit until then; later ones are cut off, and evaluated again. A fit is known by its number in the
script.

best -> .best-step-400-5fa0c1d2          a link, replaced by one rename once the new checkpoint is whole
        .best-step-400-5fa0c1d2/         written by `Line.save`; the link's former target is then removed
"""

import math
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import time
from typing import Any, Protocol

from stageline.pipeline.data import Batch
from stageline.pipeline.evaluation import Score, Standing
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.saved import is_saved, read_saved
from stageline.workers.checkpoint.source import BEST, note_best
from stageline.workers.disk.atomic_file import draft_of, keep_trying, publish, sync
from stageline.workers.runs.metrics import (
    EVALUATIONS,
    EvaluationMetrics,
    encoded,
    evaluation_line,
    keep_lines,
    lines_in,
)
from stageline.workers.runtime.calls import UNDER_WAY
from stageline.workers.script.calls.calls import StepLoss

from .callbacks import Callback, FitOptions, Fitted, FittedLine, named
from .fit_batches import one_pass

Found = Mapping[str, float | None]


class EvaluationLog:
    """Record of a run's evaluations, in the file `evaluations.jsonl` of its folder or, without a folder, in memory."""

    def __init__(self, folder: Path | None, position: int) -> None:
        """Read the record, and cut off lines after `position`, the step at which the run resumes.

        Raises `OSError` if the file cannot be read or written.
        """
        self._path = None if folder is None else folder / EVALUATIONS
        self._lines: list[EvaluationMetrics] = []
        if self._path is not None and self._path.exists():
            keep_trying(partial(keep_lines, self._path, position, self._path), self._path)
            with self._path.open("rb") as file:
                self._lines = [line for line in lines_in(file) if isinstance(line, EvaluationMetrics)]

    def of_fit(self, number: int) -> list[tuple[int, Found]]:
        """Return (step, values) of each evaluation of fit `number`, in order."""
        return [(line.step, line.values) for line in self._lines if line.fit == number]

    def note(self, step: int, found: Found, fit: int | None = None) -> None:
        """Record an evaluation; one that belongs to a fit survives a power failure once this returns.

        Args:
            step: Number of steps trained.
            found: Values by name.
            fit: Number of the fit in the script; None outside a fit.
        """
        line = evaluation_line(step, found, time(), fit)
        if fit is not None:
            self._lines.append(line)
        if self._path is not None:
            size = self._path.stat().st_size if self._path.exists() else 0
            keep_trying(partial(_append, self._path, size, encoded(line), durable=fit is not None), self._path)


def _append(path: Path, size: int, text: bytes, *, durable: bool) -> None:
    """Truncate a file to `size` bytes and append `text`."""
    with path.open("ab") as file:
        file.truncate(size)
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if durable and not size:
        sync(path.parent)


class BestCheckpoint:
    """Best checkpoint of a fit: a symbolic link to the folder that holds it."""

    def __init__(self, link: Path, save: Callable[[Path], object], run: Path | None = None) -> None:
        """Prepare to keep a checkpoint at `link`.

        Args:
            link: Path of the link; there may be one.
            save: Writes a checkpoint into a folder.
            run: Folder of the run, in which the place is noted.

        Raises:
            ValueError: Something else is there.
        """
        self._link = link.absolute()
        self._save = save
        self._run = run
        if os.path.lexists(self._link) and not self._link.is_symlink():
            raise ValueError(f'best = "{link}": something is there that no fit has made. Name a path that is free')

    @property
    def step(self) -> int | None:
        """Number of steps after which the checkpoint was saved; None if there is none."""
        return read_saved(self._link).step if is_saved(self._link) else None

    def note(self) -> None:
        """Note in the run's folder where the checkpoint is, for commands such as `stageline export --best`."""
        if self._run is not None:
            keep_trying(partial(note_best, self._run, self._link), self._run / BEST)

    def keep(self, step: int) -> None:
        """Save the line's present state, after `step` steps, as the best checkpoint. Raises `NotSaved` or `OSError`."""
        prefix = f".{self._link.name}-step-"
        folder = self._link.with_name(f"{prefix}{step}-{secrets.token_hex(4)}")
        self._save(folder)
        draft = draft_of(self._link)
        draft.symlink_to(folder.name)
        publish(draft, self._link)
        self.note()
        own = re.compile(rf"{re.escape(prefix)}\d+-[0-9a-f]{{8}}")  # also what a script that was killed has left
        for other in list(self._link.parent.iterdir()):
            if own.fullmatch(other.name) and other != folder and is_saved(other):
                shutil.rmtree(other, ignore_errors=True)


class Steps(FittedLine, Protocol):
    """Methods of a line that a fit calls."""

    def step(self, x: Tree, y: Tree) -> StepLoss:
        """Train on one batch."""

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint in `folder`."""


class Fit:
    """Single call of `Line.fit`."""

    def __init__(
        self,
        line: Steps,
        steps: Iterator[Batch],
        options: FitOptions,
        record: EvaluationLog,
        number: int,
        measure: Callable[[Iterable[Any]], Found],
        end: int | None = None,
        show: Callable[[Score, Score | None], object] = lambda newest, best: None,
    ) -> None:
        """Prepare a fit, and take up the evaluations that it has on record.

        Args:
            line: Line to train.
            steps: Batches of the steps.
            options: Arguments of `Line.fit`.
            record: Evaluations of the run.
            number: Number of this fit in the script.
            measure: Evaluates batches without recording the result.
            end: Step at which the fit is over at the latest; None if unknown.
            show: Called with each evaluation, and the best so far, for the display of progress.
        """
        self._line = line
        self._steps = steps
        self._options = options
        self._record = record
        self._number = number
        self._measure = measure
        self._end = end
        self._called: deque[tuple[int, StepLoss]] = deque()  # whose losses were not told
        self._loss: float | None = None
        self._best = None if options.best is None else BestCheckpoint(Path(options.best), line.save, line.folder)
        self._found = dict(record.of_fit(number))
        self._standing = Standing(options.criterion).after_all(self._found.items())
        self._show = show

    def run(self) -> Fitted:
        """Run the fit, and call each callback's `on_end`, the last callback's first, also after an error.

        Raises what the line and the callbacks raise.
        """
        ended: Fitted | None = None
        try:
            for callback in self._options.callbacks:
                with named(callback, "on_begin"):
                    callback.on_begin(self._line)
            self._note_best()
            self._show_evaluation()
            self._train()
            self._tell_losses(0)
            ended = self._ended()
        finally:
            with ExitStack() as stack:  # each callback is told, also if another raises: it may have a file to close
                for callback in reversed(self._options.callbacks):
                    stack.callback(_end, callback, ended)
        return ended

    def _note_best(self) -> None:
        """Note the best checkpoint of before if this run is resumed from it, or from one after it."""
        best = self._standing.best
        if self._best is not None and best is not None and self._best.step == best.step:
            self._best.note()

    def _train(self) -> None:
        if self._standing.stops:
            return
        self._catch_up()
        while not self._standing.stops and (batch := next(self._steps, None)) is not None:
            step = self._line.position
            self._called.append((step, self._line.step(*batch)))
            self._tell_losses(UNDER_WAY)
            if self._is_due(step + 1):
                self._evaluate(step + 1)

    def _catch_up(self) -> None:
        """Evaluate, or keep the best checkpoint, if a fit that ended at this position had not done so.

        A fit that was over before has nothing to do: later calls have trained the line since.
        """
        position = self._line.position
        if self._end is not None and position > self._end:
            return
        if self._is_due(position) and position not in self._found:
            self._evaluate(position)
        elif self._standing.improved and self._standing.step == position:
            self._keep_best(told=False)

    def _is_due(self, step: int) -> bool:
        every = self._options.evaluate_every
        return every is not None and step > 0 and step % every == 0

    def _evaluate(self, step: int) -> None:
        found = self._measure(one_pass(self._options.held_out or ()))
        self._tell_losses(0)
        self._record.note(step, found, self._number)
        self._found[step] = found
        self._standing = self._standing.after(step, found)
        self._show_evaluation()
        for callback in self._options.callbacks:
            with named(callback, "on_evaluation", step):
                callback.on_evaluation(step, found)
        if self._standing.improved:
            self._keep_best(told=True)

    def _show_evaluation(self) -> None:
        if self._found:
            value = self._found[self._standing.step][self._options.metric]
            self._show(Score(self._standing.step, math.nan if value is None else value), self._standing.best)

    def _keep_best(self, *, told: bool) -> None:
        best = self._standing.best
        if best is None:
            return
        if self._best is not None and (told or self._best.step != best.step):
            self._best.keep(best.step)
        for callback in self._options.callbacks if told else ():
            with named(callback, "on_best", best.step):
                callback.on_best(best.step, best.value)

    def _tell_losses(self, left: int) -> None:
        """Tell callbacks the losses of all steps but the `left` newest; wait for those that are not known yet."""
        while len(self._called) > left:
            step, loss = self._called.popleft()
            self._loss = loss.item()
            for callback in self._options.callbacks:
                with named(callback, "on_step", step):
                    callback.on_step(step, loss)

    def _ended(self) -> Fitted:
        stopped, position = self._standing.stops, self._line.position
        reason = self._standing.reason if stopped else _why(position, self._options)
        return Fitted(position, self._loss, reason, stopped, self._found, self._standing.best)


def _end(callback: Callback, ended: Fitted | None) -> None:
    with named(callback, "on_end"):
        callback.on_end(ended)


def _why(position: int, options: FitOptions) -> str:
    """Return why there are no more steps."""
    if options.steps is not None and position >= options.steps:
        return f"all of {options.steps} steps are trained"
    if options.steps is not None:
        return f"the batches ended after step {position}, before steps = {options.steps}"
    return f"the batches ended after step {position}"
