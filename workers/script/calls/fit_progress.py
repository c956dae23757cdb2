"""Progress of a script's run as it is shown: pieces of text that no width cuts off, and the bar of a fit with an end.

line ━━━━━━━━━━━━───────────────── 120/460 steps, epoch 3/10, 0:01:32 left
  loss 0.1234, 45.6 steps/s, accuracy 0.81 after step 100, best 0.83 after step 60
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from html import escape
from textwrap import wrap
from typing import Self

from stageline.pipeline.evaluation import Score

BAR = 40  # columns at most
_NARROW = 8  # columns of a bar that is worth its place


@dataclass(frozen=True, slots=True)
class FitProgress:
    """Progress of a fit besides its steps.

    Attributes:
        end: Step at which the fit is over at the latest; None if only the batches know.
        epoch: Steps of an epoch; None if they are not known.
        metric: Name of the value that evaluations are compared by.
        newest: Newest evaluation; None before the first.
        best: Best evaluation; None before the first with a finite value.
    """

    end: int | None = None
    epoch: int | None = None
    metric: str = "loss"
    newest: Score | None = None
    best: Score | None = None

    def evaluated(self, newest: Score, best: Score | None) -> Self:
        """Return the progress after one more evaluation."""
        return replace(self, newest=newest, best=best)

    def place(self, steps: int) -> Iterator[str]:
        """Yield where a line that has done `steps` steps is: in all steps, and in epochs."""
        yield f"{steps} steps" if self.end is None else f"{steps}/{self.end} steps"
        if self.epoch is not None:
            epoch = max(steps - 1, 0) // self.epoch + 1
            yield f"epoch {epoch}" if self.end is None else f"epoch {epoch}/{-(-self.end // self.epoch)}"

    def found(self) -> Iterator[str]:
        """Yield the newest evaluation, and the best one."""
        if self.newest is not None:
            yield f"{self.metric} {self.newest.value:.4g} after step {self.newest.step}"
        if self.best is not None:
            is_newest = self.best == self.newest
            yield "it is the best" if is_newest else f"best {self.best.value:.4g} after step {self.best.step}"


@dataclass(frozen=True, slots=True)
class Shown:
    """State of a run at one moment, as text for people.

    Attributes:
        name: Name of the run.
        place: How far the run is.
        more: What else there is to say.
        done: Fraction of the fit that is done, 0 to 1; None without a fit that has an end.
    """

    name: str
    place: tuple[str, ...]
    more: tuple[str, ...]
    done: float | None = None

    def __str__(self) -> str:
        """Return all in one line."""
        return f"{self.name}: {', '.join((*self.place, *self.more))}"

    def drawn(self, width: int, *, ascii_only: bool = False) -> str:
        """Return lines of at most `width` columns, the first with a bar if there is room; nothing is cut off.

        Args:
            width: Columns of the terminal.
            ascii_only: Draw the bar in ASCII.
        """
        place = ", ".join(self.place)
        room = width - len(self.name) - len(place) - 2
        if self.done is None or room < _NARROW:
            return "\n".join(wrap(str(self), width, subsequent_indent="  "))
        columns = min(room, BAR)
        full, rest = "#-" if ascii_only else "━─"
        done = round(self.done * columns)
        indent = "  "
        others = wrap(", ".join(self.more), width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join([f"{self.name} {full * done}{rest * (columns - done)} {place}", *others])

    @property
    def html(self) -> str:
        """Element of a notebook's page with the bar, the place and the rest."""
        bar = "" if self.done is None else f'<progress value="{self.done:.4f}" style="width:50%"></progress> '
        return f"<b>{escape(self.name)}</b>: {bar}{escape(', '.join((*self.place, *self.more)))}"


def shown(
    name: str,
    steps: int,
    loss: float | None,
    fit: FitProgress | None,
    rate: float | None = None,
) -> Shown:
    """Return what is shown of a run.

    Args:
        name: Name of the run.
        steps: Steps that have ended.
        loss: Newest loss.
        fit: Progress of the newest fit; None if there was none.
        rate: Steps in a second, of late; None if not known.
    """
    fit = fit or FitProgress()
    if fit.end is not None and steps > fit.end:  # the script has gone on by itself
        fit = replace(fit, end=None)
    left = [] if not rate or fit.end is None or steps == fit.end else [f"{_duration((fit.end - steps) / rate)} left"]
    more = [
        *([] if loss is None else [f"loss {loss:.4g}"]),
        *([] if not rate else [f"{rate:.3g} steps/s"]),
        *fit.found(),
    ]
    return Shown(name, (*fit.place(steps), *left), tuple(more), steps / fit.end if fit.end else None)


def _duration(seconds: float) -> str:
    """Return the time such as "0:01:32"."""
    return str(timedelta(seconds=round(seconds)))
