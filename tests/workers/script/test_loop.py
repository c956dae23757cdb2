"""The loop of `fit`, over a line that only counts: what is called when, and what a fit that goes on has still to do."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.evaluation import Score
from stageline.workers.checkpoint.saved import SAVED, SavedRun, read_saved
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.script.callbacks import Callback, FitOptions, Fitted
from stageline.workers.script.calls.calls import StepLoss
from stageline.workers.script.fitting import BestCheckpoint, EvaluationLog, Fit

VALUES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 1.0}  # the loss held out, by step


class CountingLine:
    """Whose steps are noted in `said`, and their losses when they are read."""

    folder = None

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.said: list[str] = []

    def step(self, x: Any, y: Any) -> StepLoss:
        step, self.position = self.position, self.position + 1
        self.said.append(f"step {step}")
        return StepLoss(lambda: self.read(step))

    def read(self, step: int) -> tuple[float | None, float | None]:
        self.said.append(f"read {step}")
        return float(step), None

    def save(self, folder: str | Path) -> None:
        raise AssertionError("nothing is to be saved")

    def measure(self, batches: Iterable[Any]) -> dict[str, float]:
        self.said.append(f"evaluate {self.position}")
        return {"loss": VALUES[self.position]}


class SavingLine(CountingLine):
    """Of which the checkpoint after so many steps was saved as the best."""

    def __init__(self, best: Path, step: int | None, position: int) -> None:
        super().__init__(position)
        self.saved: list[int] = []
        if step is not None:
            self.position = step
            BestCheckpoint(best, self.save).keep(step)
            self.position, self.saved = position, []

    def save(self, folder: str | Path) -> None:
        write_json(Path(folder) / SAVED, SavedRun("line-1", self.position, 1))
        self.saved.append(self.position)


class Noting(Callback):
    def __init__(self, said: list[str], fails: str = "") -> None:
        self.said = said
        self.fails = fails

    def say(self, text: str) -> None:
        self.said.append(text)
        if text == self.fails:
            raise RuntimeError("a mistake")

    def on_step(self, step: int, loss: StepLoss) -> None:
        self.say(f"told {step}")

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        self.say(f"told {step}: {found['loss']}")

    def on_best(self, step: int, value: float) -> None:
        self.say(f"best {step}")

    def on_end(self, fitted: Fitted | None) -> None:
        self.say("over" if fitted is None else f"over after {fitted.steps}")


def fit(line: CountingLine, record: EvaluationLog, last: int, number: int = 1, **options: Any) -> Fitted:
    steps = iter([(0, 0)] * (last - line.position))
    wanted = FitOptions(**{"evaluate_every": 2, "held_out": [0], "steps": last, **options})
    return Fit(line, steps, wanted, record, number, line.measure).run()


def noted(*steps: int) -> EvaluationLog:
    record = EvaluationLog(None, 0)
    for step in steps:
        record.note(step, {"loss": VALUES[step]}, 1)
    return record


def test_two_steps_are_called_before_the_first_loss_is_read():
    line = CountingLine()
    fitted = fit(line, noted(), 4, evaluate_every=None, held_out=None, callbacks=[Noting(line.said)])
    assert line.said == [
        *("step 0", "step 1", "step 2", "read 0", "told 0", "step 3", "read 1", "told 1"),
        *("read 2", "told 2", "read 3", "told 3", "over after 4"),
    ]
    assert fitted == Fitted(4, 3.0, "all of 4 steps are trained")


def test_the_losses_before_an_evaluation_are_told_before_it():
    line = CountingLine()
    fit(line, noted(), 2, callbacks=[Noting(line.said)])
    assert line.said[2:] == [
        *("evaluate 2", "read 0", "told 0", "read 1", "told 1", "told 2: 3.0", "best 2", "over after 2")
    ]


def test_it_stops_after_so_many_evaluations_that_were_not_better():
    fitted = fit(CountingLine(), noted(), 10, patience=2)
    assert fitted.steps == 8
    assert fitted.stopped_early
    assert fitted.reason == "stopped early after step 8: loss was not better than 2 (step 4) in 2 evaluations"
    assert fitted.best == Score(4, 2.0)
    assert fitted.evaluations == {step: {"loss": VALUES[step]} for step in (2, 4, 6, 8)}


@pytest.mark.parametrize("position", range(9))
def test_a_fit_that_goes_on_anywhere_ends_as_the_one_that_was_never_stopped(position: int):
    whole = fit(CountingLine(), noted(), 10, patience=2)
    known = [step for step in (2, 4, 6, 8) if step <= position]
    for record in (noted(*known), noted(*(step for step in known if step < position))):
        going_on = fit(CountingLine(position), record, 10, patience=2)
        assert (going_on.steps, going_on.reason, going_on.evaluations, going_on.best) == (
            (whole.steps, whole.reason, whole.evaluations, whole.best)
        )


def test_a_fit_that_is_over_trains_nothing_more():
    line = CountingLine(9)
    fitted = fit(line, noted(2, 4, 6, 8), 10, patience=2)
    assert line.said == []
    assert (fitted.steps, fitted.loss, fitted.stopped_early) == (9, None, True)


def test_another_fit_of_the_same_script_has_evaluations_of_its_own():
    fitted = fit(CountingLine(8), noted(2, 4, 6, 8), 10, number=2, patience=2)
    assert fitted.evaluations == {8: {"loss": 2.0}, 10: {"loss": 1.0}}


@pytest.mark.parametrize(
    ("fails", "method"),
    [
        ("told 1", "on_step of step 1"),
        ("told 2: 3.0", "on_evaluation of step 2"),
        ("best 2", "on_best of step 2"),
    ],
)
def test_what_a_callback_raises_ends_the_fit_and_names_it(fails: str, method: str):
    line = CountingLine()
    with pytest.raises(RuntimeError, match="a mistake") as raised:
        fit(line, noted(), 10, callbacks=[Noting(line.said, fails)])
    assert raised.value.__notes__ == [f"raised by Noting.{method}, a callback of Line.fit"]
    assert line.said[-1] == "over"


@pytest.mark.parametrize("saved", [None, 2, 4])
def test_a_best_that_was_not_saved_when_the_script_was_killed_is_saved_when_it_goes_on(
    tmp_path: Path, saved: int | None
) -> None:
    """It was noted before."""
    line = SavingLine(tmp_path / "best", saved, position=4)
    fit(line, noted(2, 4), 5, best=tmp_path / "best")
    assert line.saved == ([] if saved == 4 else [4])
    assert read_saved(tmp_path / "best").step == 4


def test_the_batches_may_end_before():
    fitted = Fit(CountingLine(), iter([(0, 0)]), FitOptions(steps=5), noted(), 1, dict).run()
    assert fitted.reason == "the batches ended after step 1, before steps = 5"
    assert Fit(CountingLine(), iter([(0, 0)]), FitOptions(), noted(), 1, dict).run().reason == (
        "the batches ended after step 1"
    )


def test_a_fit_that_was_over_before_the_position_evaluates_nothing_more(tmp_path: Path) -> None:
    """It used to evaluate weights that a later fit has trained, and to take them for its own best."""
    record = EvaluationLog(tmp_path, 0)
    for step in (2, 4):
        record.note(step, {"loss": VALUES[step]}, 1)
    line = CountingLine(position=10)
    fitted = Fit(line, iter(()), _until(4), record, 1, line.measure, end=4).run()
    assert line.said == []
    assert fitted.best == Score(4, 2.0)
    assert dict(fitted.evaluations) == {2: {"loss": 3.0}, 4: {"loss": 2.0}}


def test_a_fit_that_ended_at_the_position_is_evaluated_there(tmp_path: Path) -> None:
    line = CountingLine(position=4)
    Fit(line, iter(()), _until(4), EvaluationLog(tmp_path, 4), 1, line.measure, end=4).run()
    assert line.said == ["evaluate 4"]


def test_every_callback_is_told_of_the_end_also_if_one_raises_there() -> None:
    line = CountingLine()
    callbacks = [Noting(line.said, fails="over after 2"), Noting(line.said)]
    with pytest.raises(RuntimeError, match="a mistake") as raised:
        fit(line, EvaluationLog(None, 0), 2, callbacks=callbacks)
    assert line.said[-2:] == ["over after 2", "over after 2"]
    assert "raised by Noting.on_end, a callback of Line.fit" in raised.value.__notes__


def _until(steps: int) -> FitOptions:
    return FitOptions(evaluate_every=2, held_out=[(0, 0)], steps=steps)
