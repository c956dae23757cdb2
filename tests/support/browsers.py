"""Pages in a headless Chromium, which note what went wrong, and simulated runs to show in them."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from support.paths import ROOT
from support.pictured_runs import PicturedRun

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
BOUND = 90.0  # seconds for what is waited for
PICTURES = ROOT / "build" / "engines"  # screenshots, to be looked at
FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-quic"]


class Opened:
    """A page in a browser, and what it has done that it should not: errors, and requests."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda sent: self.asked.append(sent.url))

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, but for its own and those of its own content."""
        return [url for url in self.asked if not url.startswith(("data:", "file:", "about:"))]

    def violations(self) -> list[str]:
        """Faults that axe calls serious or critical."""
        import axe_playwright_python

        axe = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text()
        self.page.evaluate(axe)
        found = self.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        return [
            f"{each['id']}: {each['nodes'][0]['target']} {each['nodes'][0]['html'][:200]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]

    def until(self, expression: str) -> None:
        """Wait until an expression of JavaScript is true. The page's policy forbids playwright's own way."""
        deadline = monotonic() + BOUND
        while not self.page.evaluate(expression):
            assert monotonic() < deadline, expression
            self.page.wait_for_timeout(50)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


Open = Callable[..., Opened]


@cache
def pictured(stages: int, microbatches: int, steps: int) -> PicturedRun:
    """A simulated run, which is made once."""
    return PicturedRun(stages, microbatches, steps)


@cache
def page_of_run(stages: int, microbatches: int, steps: int) -> str:
    """Its page."""
    return pictured(stages, microbatches, steps).page()
