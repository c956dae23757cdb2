"""The page is one text: it loads nothing, runs nothing but its own script, and takes no markup from a run."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from stageline.workers.extras.report.page import page_of
from support.pictured_runs import EVIL, PicturedRun, evil

LOADING = {"src", "href", "srcset", "action", "data", "poster", "formaction", "background"}


class Elements(HTMLParser):
    """The elements of a page with their attributes and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.found[-1][0] if self.found else "", []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def pictured() -> PicturedRun:
    return PicturedRun(2, 3, 6)


@pytest.mark.parametrize("live", [False, True])
def test_texts_of_a_run_are_no_markup(pictured: PicturedRun, live: bool) -> None:
    sections = evil(pictured.sections())
    elements = Elements(page_of(sections, 0.0, live=live))
    plain = Elements(page_of(pictured.sections(), 0.0, live=live))
    assert elements.found == plain.found
    data = elements.texts["script"][0]
    assert json.loads(data)["sections"] == json.loads(json.dumps(sections))
    assert EVIL in "".join(elements.texts["title"])


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(pictured: PicturedRun, live: bool) -> None:
    page = page_of(pictured.sections(), 0.0, live=live)
    (policy,) = [each["content"] for each in Elements(page).all("meta") if each.get("http-equiv")]
    rules = dict(rule.split(" ", 1) for rule in str(policy).split("; "))
    script, style = (
        re.search(r"<script>(.*?)</script>", page, re.DOTALL),
        re.search(r"<style>(.*?)</style>", page, re.DOTALL),
    )
    assert script
    assert style
    for name, found in (("script-src", script[1]), ("style-src", style[1])):
        assert rules.pop(name) == f"'sha256-{b64encode(sha256(found.encode()).digest()).decode()}'"
    own = {"connect-src": "'self'"} if live else {}
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"} | own
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")


def test_the_page_names_nothing_that_a_browser_would_load(pictured: PicturedRun) -> None:
    page = pictured.page()
    loaded = {value for _, attributes in Elements(page).found for name, value in attributes.items() if name in LOADING}
    assert loaded == {"data:,"}  # the icon
    assert not re.search(r"@import|url\(|<link rel=.stylesheet|importScripts|XMLHttpRequest|fetch\(", page)


def test_the_page_is_whole_and_small_and_has_the_licence_of_its_library(pictured: PicturedRun) -> None:
    page = pictured.page()
    assert len(page.encode()) < 250_000
    assert "The MIT License" in page
    elements = Elements(page)
    assert len(elements.all("script")) == 2
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"why", "pace", "timetable", "stores", "faults", "plan"} <= set(ids)
    assert {"lang": "en"} in elements.all("html")
