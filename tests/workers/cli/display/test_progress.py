"""The progress display where stderr is no terminal."""

from types import SimpleNamespace

from stageline.workers.cli.display import progress
from stageline.workers.cli.display.progress import INTERVAL, Lines, progress_of

from .test_pace import LAUNCH, status


def test_a_change_of_phase_is_printed_at_once_and_progress_every_few_seconds(capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "monotonic", lambda: clock.now)
    lines = Lines(LAUNCH)
    lines(status())
    lines(status(1))
    assert capsys.readouterr().err == "stageline: running\n"
    clock.now = INTERVAL
    lines(status(2, last_loss={"loss": 0.5}))
    said = capsys.readouterr().err
    assert said.startswith("stageline: step 2 of 100, loss 0.5, ")
    assert said.endswith("samples/s, idle 0 %, 0 %\n")


def test_without_a_terminal_lines_are_printed(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with progress_of(LAUNCH) as on_status:
        assert isinstance(on_status, Lines)
