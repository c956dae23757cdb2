"""What `Line.fit` is given besides batches, checked before the first step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stageline.pipeline.evaluation import Better, Criterion
from stageline.workers.script.arguments.kinds import short

from .callback import Callback
from .stream import FitBatches

BetterName = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The arguments of `Line.fit`, where they are described."""

    epochs: int | None = None
    steps: int | None = None
    held_out: FitBatches | None = None
    evaluate_every: int | None = None
    metric: str = "loss"
    better: BetterName | None = None
    patience: int | None = None
    best: str | Path | None = None
    callbacks: Sequence[Callback] = ()

    @property
    def criterion(self) -> Criterion:
        """What evaluations are compared by."""
        return Criterion(self.metric, Better(self.better or Better.LOWER), self.patience)


def demand_fit(options: FitOptions, metrics: Iterable[str], cannot_save: str) -> None:
    """Raises `ValueError`, which names the argument, its value and what is expected. `metrics` are the line's;
    `cannot_save`: why it saves no checkpoint, "" if it does."""
    if wrong := next(_complaints(options, ["loss", *metrics], cannot_save), None):
        raise ValueError(wrong)


def _complaints(options: FitOptions, metrics: Sequence[str], cannot_save: str) -> Iterator[str]:
    for name in ("epochs", "steps", "evaluate_every", "patience"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name} = {value!r}: expected a whole number of at least 1, or None"
    if options.metric not in metrics:
        yield f"metric = {options.metric!r}: this line measures {', '.join(metrics)}; see metrics= of Line"
    if options.better not in (None, *Better):
        yield f'better = {options.better!r}: expected "lower" or "higher"'
    if options.better is None and options.metric != "loss":
        yield f'metric = {options.metric!r}: pass better="higher" or better="lower", whichever is the better one'
    if options.evaluate_every is None:
        for name in ("held_out", "patience", "best"):
            if getattr(options, name) is not None:
                given = short(getattr(options, name))
                yield f"{name} = {given}: say after how many steps to evaluate, with evaluate_every="
    elif options.held_out is None:
        yield f"evaluate_every = {options.evaluate_every}: there is nothing to evaluate; pass held_out="
    elif isinstance(options.held_out, Iterator):
        yield (
            f"held_out = {short(options.held_out)} can be walked once, and is evaluated again and again: pass a list "
            "or a loader"
        )
    if options.best is not None and cannot_save:
        yield f'best = "{options.best}": {cannot_save}'
    callbacks: object = options.callbacks
    if not isinstance(callbacks, Sequence):
        yield f"callbacks = {short(callbacks)}: expected a list of objects of classes derived from Callback"
        return
    for place, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            yield f"callbacks[{place}] = {short(callback)}: expected an object of a class derived from Callback"
