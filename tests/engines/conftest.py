"""A headless Chromium for the tests of pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.browsers import CHROMIUM, FLAGS, Open, Opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engines, engines.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as started:
        yield started


@pytest.fixture
def opened(browser: "Browser", tmp_path: Path) -> Iterator[Open]:
    """Opens a text as a page without a network, or an address."""
    contexts = []

    def open_page(page: str, scheme: str = "light", width: int = 1280) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=not page.startswith("http://")
        )
        contexts.append(context)
        found = Opened(context.new_page())
        if page.startswith("http://"):
            found.page.goto(page)
            return found
        file = tmp_path / "page.html"
        file.write_text(page, encoding="utf-8")
        found.page.goto(file.as_uri())
        return found

    yield open_page
    for context in contexts:
        context.close()
