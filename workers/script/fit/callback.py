"""What a script has called on the way through `Line.fit`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from stageline.pipeline.evaluation import Score
from stageline.workers.script.calls.calls import StepLoss


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a fit ended: after so many `steps` of the line, and why (`reason`). `loss` is the last step's, None if it had
    no rows, or if this fit had nothing left to train. `evaluations` by step; `best` is None without one that found a
    finite number."""

    steps: int
    loss: float | None
    reason: str
    stopped_early: bool = False
    evaluations: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    best: Score | None = None


class Callback:
    """Derive from it, and define what is wanted. What a method raises ends the fit, as in the body of a loop."""

    def on_step(self, step: int, loss: StepLoss) -> None:
        """Step `step`, counted from 0, has this loss, which is there. In order; two later steps are under way by then,
        unless it is followed by an evaluation or the end."""

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        """`found`, "loss" and the metrics, after `step` steps. The steps before it were told."""

    def on_best(self, step: int, value: float) -> None:
        """That was the best so far. If the fit keeps it, it is on the disk."""

    def on_end(self, fitted: Fitted | None) -> None:
        """The fit is over; with None, an error has ended it."""


@contextmanager
def named(callback: Callback, method: str, step: int | None = None) -> Iterator[None]:
    """What is raised within says of which callback it is."""
    try:
        yield
    except BaseException as error:
        of = "" if step is None else f" of step {step}"
        error.add_note(f"raised by {type(callback).__name__}.{method}{of}, a callback of Line.fit")
        raise
