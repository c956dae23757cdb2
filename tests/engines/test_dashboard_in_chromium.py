"""The dashboard of a run that is trained, in a browser: it follows the run, and says when it is lost."""

import re
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from support.browsers import PICTURES, Open
from support.workspace import Workspace

pytestmark = pytest.mark.engines

LINK = re.compile(r"http://127\.0\.0\.1:\d+/\?token=[\w-]+")


def test_a_page_follows_its_run_to_the_end(opened: Open, workspace: Workspace) -> None:
    training = workspace.start("train", ".", "--dashboard", "--set", "run.steps=100000")
    link = next(found[0] for line in iter(training.stderr.readline, "") if (found := LINK.search(line)))
    found = opened(link)
    assert found.page.url == f"http://{urlsplit(link).netloc}/"
    found.page.wait_for_selector(".lanes canvas[data-boxes]", timeout=60_000)
    steps = "() => Number(document.querySelector('#figures dd').textContent.replace(/,/g, '').split(' ')[0])"
    first = found.page.evaluate(steps)
    found.until(f"({steps})() > {first} + 20")
    assert found.violations() == []
    assert found.overflow() <= 0
    assert {urlsplit(url).netloc for url in found.requests} == {urlsplit(link).netloc}
    assert found.wrong == []
    PICTURES.mkdir(parents=True, exist_ok=True)
    found.page.screenshot(path=PICTURES / "dashboard.png", full_page=True)
    (folder,) = workspace.runs()
    assert workspace.command("run", "stop", "--now", str(folder)).returncode == 0
    training.communicate()
    found.until("document.getElementById('state').textContent.includes('dashboard')")


def test_a_stranger_sees_nothing(opened: Open, workspace: Workspace) -> None:
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    (folder,) = workspace.runs()
    shown = workspace.start("dashboard", str(folder))
    link = next(found[0] for line in iter(shown.stdout.readline, "") if (found := LINK.search(line)))
    parts = urlsplit(link)
    stranger = opened(f"http://{parts.netloc}/")
    assert folder.name not in stranger.page.content()
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", f"/?{parts.query}", headers={"Host": "rebound.example"})
    assert connection.getresponse().status == 421
    connection.close()
    guest = opened(link)
    assert folder.name in guest.page.content()
    assert guest.wrong == []
    shown.kill()
    shown.wait()
