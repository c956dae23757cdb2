"""`stageline dashboard` of a run that is over, and `train --dashboard`: a link that a browser can open."""

import re
import signal
from http.client import HTTPConnection
from typing import IO
from urllib.parse import urlsplit

import pytest

from stageline.workers.extras.report import dashboard
from support.workspace import Workspace

LINK = re.compile(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32,}")


def link_in(stream: IO[str]) -> str:
    """The link in what a command prints, up to there."""
    while line := stream.readline():
        if found := LINK.search(line):
            return found[0]
    raise AssertionError("no link was printed")


def page_at(link: str) -> str:
    """The page that a browser shows which opens a link."""
    parts, cookies = urlsplit(link), dict[str, str]()
    for path in (f"/?{parts.query}", "/"):
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        connection.request("GET", path, headers=cookies)
        answer = connection.getresponse()
        cookies = {"Cookie": str(answer.headers["set-cookie"]).partition(";")[0]}
        text = answer.read().decode()
        connection.close()
    assert answer.status == 200, text
    return text


def test_without_its_packages_the_dashboard_says_how_to_install_them(workspace: Workspace, capsys, monkeypatch) -> None:
    monkeypatch.setattr(dashboard.importlib.util, "find_spec", lambda name: None)
    for command in (("dashboard",), ("train", ".", "--dashboard")):
        assert workspace.here(*command) == 2
        assert 'pip install "stageline[dashboard]" [SL520]' in capsys.readouterr().err
    assert not workspace.runs()


@pytest.mark.slow
def test_without_a_run_or_a_free_port_there_is_no_dashboard(workspace: Workspace, capsys) -> None:
    assert workspace.here("dashboard") == 3
    assert "no run of small" in capsys.readouterr().err
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    with dashboard.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert workspace.here("dashboard", "--port", str(port)) == 2
    assert f"127.0.0.1, port {port}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_over_is_shown_until_the_command_is_interrupted(workspace: Workspace) -> None:
    assert workspace.command("train", ".").returncode == 0
    (folder,) = workspace.runs()
    shown = workspace.start("dashboard", str(folder))
    assert f'"id":"{folder.name}"' in page_at(link_in(shown.stdout))
    shown.send_signal(signal.SIGINT)
    assert shown.wait() == 130


@pytest.mark.slow
def test_train_prints_a_link_to_the_run_that_goes_on(workspace: Workspace) -> None:
    training = workspace.start("train", ".", "--dashboard", "--set", "run.steps=100000")
    link = link_in(training.stderr)
    (folder,) = workspace.runs()
    assert f'"id":"{folder.name}"' in page_at(link)
    assert workspace.command("run", "stop", "--now", str(folder)).returncode == 0
    training.communicate()
    with pytest.raises(ConnectionError):
        page_at(link)
