"""`top` where it cannot draw: the error says what to use."""

import sys
from types import SimpleNamespace

import pytest

from stageline.workers.cli.commands import top
from support.workspace import Workspace


def said(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert workspace.here("top") == 2
    error = capsys.readouterr().err
    assert "status --watch" in error
    assert "Traceback" not in error
    return error


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(top, "sys", SimpleNamespace(stdin=terminal, stdout=terminal, stderr=terminal))
    monkeypatch.setenv("TERM", "xterm")


def test_without_a_terminal_the_error_names_the_command_that_prints_lines(workspace: Workspace, capsys) -> None:
    assert "no terminal" in said(workspace, capsys)


@pytest.mark.usefixtures("at_terminal")
def test_a_terminal_without_a_cursor_is_refused(workspace: Workspace, capsys, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "TERM=dumb" in said(workspace, capsys)


@pytest.mark.usefixtures("at_terminal")
def test_without_textual_the_error_says_what_to_install(workspace: Workspace, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "stageline.workers.cli.top.app", None)
    assert 'pip install "stageline[top]"' in said(workspace, capsys)


@pytest.mark.usefixtures("at_terminal")
def test_a_run_that_is_not_there_is_told_before_anything_is_drawn(workspace: Workspace, capsys) -> None:
    assert workspace.here("top", "runs/none") == 78
    assert "runs/none" in capsys.readouterr().err
