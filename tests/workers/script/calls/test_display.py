"""Progress that a script draws on stderr, and the lines that it leaves there."""

import io
import os
import re
import sys
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

from stageline import Line
from stageline.workers.script.calls.calls import StepLoss
from stageline.workers.script.calls.news import display_of
from stageline.workers.script.calls.page import Seen

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


class Terminal:
    """A pseudo-terminal, which is stdout and stderr of a script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own, theirs = os.openpty()
        self.stream = os.fdopen(theirs, "w")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", self.stream)
        monkeypatch.setattr(sys, "stderr", self.stream)

    def read(self) -> str:
        """Text that was written to it and not read; waits for some."""
        return os.read(self._own, 4096).decode()

    def close(self) -> str:
        """Text that was written to it and not read, to its end."""
        self.stream.close()
        written = ""
        with suppress(OSError):  # at the end
            while part := self.read():
                written += part
        os.close(self._own)
        return written


def line(progress: bool | None) -> Line:
    return Line(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)),
        cut=[1],
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        workers="inline",
        name="small",
        progress=progress,
    )


def interrupted(progress: bool | None) -> StepLoss:
    """A script that prints, and gets Ctrl-C after three steps; the loss of the last one."""
    losses: list[StepLoss] = []

    def script() -> None:
        with line(progress) as trained:
            losses.extend(trained.step(torch.ones(2, 2), torch.ones(2, 1)) for _ in range(3))
            print("said by the script")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script()
    return losses[-1]


def test_a_terminal_shows_progress_and_is_as_before_after_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal(monkeypatch)
    loss = interrupted(progress=None)
    assert sys.stdout is sys.stderr is terminal.stream
    assert "progress" not in [thread.name for thread in threading.enumerate()]
    written = terminal.close()
    assert written.count("said by the script\r\n") == 1
    assert f"small: 3 steps, loss {loss:.4g}" in written
    assert written.rindex(SHOW) > written.rindex(HIDE)
    assert written.removesuffix(SHOW).endswith("\n")


def test_what_is_printed_to_a_file_does_not_go_to_the_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal(monkeypatch)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    interrupted(progress=True)
    assert file.getvalue() == "said by the script\n"
    assert "said by the script" not in terminal.close()


def test_of_two_lines_the_first_is_on_the_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal(monkeypatch)
    first = display_of("first", Seen(0), lambda: "", None)
    second, third = (display_of(f"other {progress}", Seen(0), lambda: "", progress) for progress in (None, True))
    assert first is not None
    assert second is None
    assert third is not None
    third.close()
    first.close()
    assert sys.stderr is terminal.stream
    assert terminal.close().count("stageline: other True: 0 steps\r\n") == 1


def test_nothing_is_drawn_on_a_terminal_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal(monkeypatch)
    interrupted(progress=False)
    assert terminal.close() == "said by the script\r\n"


def test_a_pipe_gets_nothing_unless_it_is_asked_for_and_then_plain_lines(capfd: pytest.CaptureFixture[str]):
    interrupted(progress=None)
    assert capfd.readouterr().err == ""
    loss = interrupted(progress=True)
    (last,) = capfd.readouterr().err.splitlines()
    assert last.startswith(f"stageline: small: 3 steps, loss {loss:.4g}, ")


def test_what_has_happened_is_told_once_with_progress_or_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def show(progress: bool | None) -> None:
        display = display_of("small", Seen(0), str, progress, lambda: [happened.pop()] if happened else [])
        if display is not None:
            display.close()

    happened = ["worker [1] was lost"]
    show(False)
    assert capsys.readouterr().err == ""
    show(None)
    assert capsys.readouterr().err == "stageline: worker [1] was lost\n"
    happened = ["worker [1] was lost"]
    terminal = Terminal(monkeypatch)
    show(None)
    assert terminal.close().count("stageline: worker [1] was lost\r\n") == 1


def test_what_a_run_waits_for_is_on_the_line(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal(monkeypatch)
    display = display_of("small", Seen(0), lambda: "worker 1, which was lost", None)
    assert display is not None
    while "\r\n  waits: worker 1, which was lost" not in terminal.read():
        continue
    display.close()
    terminal.close()


@pytest.mark.parametrize("columns", [80, 60])
def test_a_fit_has_a_bar_its_evaluations_and_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal(monkeypatch)
    batches = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
    with line(progress=None) as trained:
        fitted = trained.fit(batches, epochs=2, held_out=batches, evaluate_every="epoch")
    written = terminal.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.replace("\r\n", "\n")).rstrip("\n")
    last = shown[shown.rindex("small ") :]
    assert max(map(len, last.splitlines())) <= columns
    assert last.startswith("small ━━━━")
    text = " ".join(last.split())
    assert "━ 6/6 steps, epoch 2/2 loss " in text
    assert fitted.best is not None
    assert text.endswith(f"loss {fitted.best.value:.4g} after step 6, it is the best")


def test_a_page_of_a_fit_has_its_bar():
    batches = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
    with line(progress=False) as trained:
        trained.fit(batches, epochs=2, held_out=batches, evaluate_every=4)
        page = trained._repr_html_()
    assert '<b>fit</b>: <progress value="1.0000" style="width:50%"></progress> 6/6 steps, epoch 2/2, loss ' in page
    assert "after step 4, it is the best<br>worker 0" in page
