"""Progress of a fit: on terminals of any width, in a notebook, and as plain lines."""

from dataclasses import replace
from typing import Any

import pytest

from stageline.pipeline.evaluation import Score
from stageline.workers.script.calls.fit_progress import FitProgress, shown
from stageline.workers.script.calls.news import display_of
from stageline.workers.script.calls.page import Seen

FIT = FitProgress(460, 46, "accuracy", Score(100, 0.81), Score(60, 0.83))
PARTS = [
    *("120/460 steps", "epoch 3/10", "0:00:34 left", "loss 0.1234", "10 steps/s"),
    *("accuracy 0.81 after step 100", "best 0.83 after step 60"),
]


def test_a_line_of_text_has_everything() -> None:
    assert str(shown("line", 120, 0.1234, FIT, 10.0)) == f"line: {', '.join(PARTS)}"
    assert str(shown("line", 3, None, None)) == "line: 3 steps"
    assert str(shown("line", 3, 0.5, FitProgress(None, 2), 1.0)) == "line: 3 steps, epoch 2, loss 0.5, 1 steps/s"


@pytest.mark.parametrize("width", [120, 80, 60, 30])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_nothing_is_cut_off_at_any_width(width: int, *, ascii_only: bool) -> None:
    lines = shown("line", 120, 0.1234, FIT, 10.0).drawn(width, ascii_only=ascii_only).splitlines()
    assert max(map(len, lines)) <= width
    assert all(part in " ".join(line.strip() for line in lines) for part in PARTS)
    full, rest = "#-" if ascii_only else "━─"
    bar = lines[0].count(full), lines[0].count(rest)
    assert bar == {120: (10, 30), 80: (9, 26), 60: (4, 11), 30: (0, 0)}[width]


@pytest.mark.parametrize(
    ("steps", "place"),
    [(0, "0/460 steps, epoch 1/10"), (46, "46/460 steps, epoch 1/10"), (47, "epoch 2/10"), (460, "460/460 steps, ep")],
)
def test_the_last_step_of_an_epoch_is_of_that_epoch(steps: int, place: str) -> None:
    assert place in str(shown("line", steps, None, FIT))


def test_nothing_is_left_at_the_end_and_a_line_that_goes_on_has_no_end() -> None:
    assert "left" not in str(shown("line", 460, None, FIT, 10.0))
    assert "461 steps, epoch 11" in str(shown("line", 461, None, FIT, 10.0))
    assert shown("line", 461, None, FIT).done is None


def test_an_evaluation_that_is_the_best_is_told_once() -> None:
    text = str(shown("line", 120, None, replace(FIT, best=FIT.newest)))
    assert text.endswith("accuracy 0.81 after step 100, it is the best")


class Kernel:
    """In place of a notebook: the last HTML in the place of a display."""

    kernel = None

    def __init__(self) -> None:
        self.html: list[str] = []

    def display(self, html: Any, *, display_id: bool) -> "Kernel":
        return self

    def update(self, html: Any) -> None:
        self.html.append(html.data)


@pytest.mark.parametrize("progress", [None, True])
def test_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch, progress: bool | None) -> None:
    import IPython

    kernel, seen = Kernel(), Seen(0)
    monkeypatch.setattr(IPython, "get_ipython", lambda: kernel)
    monkeypatch.setattr(IPython.display, "display", kernel.display)
    seen.begin_fit(460, 46, "accuracy")
    seen.evaluated(Score(100, 0.81), Score(60, 0.83))
    display = display_of("a <line>", seen, lambda: "", progress)
    assert display is not None
    display.close()
    assert kernel.html[-1] == (
        '<b>a &lt;line&gt;</b>: <progress value="0.0000" style="width:50%"></progress> 0/460 steps, epoch 1/10, '
        "accuracy 0.81 after step 100, best 0.83 after step 60"
    )
