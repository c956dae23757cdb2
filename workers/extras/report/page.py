"""The page as one text of HTML: nothing is loaded from elsewhere, and only its own script and style may run.

A policy in the page allows its script and its style by their hashes. Texts of a run lie in a block of JSON, in which no
`<` stands; the script puts them into text nodes.
"""

from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

import msgspec

from .facts import Section

_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = ("dom.js", "curves.js", "lanes.js", "timetable.js", "drawing.js", "page.js")
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def page_of(sections: Mapping[str, Section], made: float, *, live: bool = False) -> str:
    """Return the page of a run.

    Args:
        sections: Data, by the name of the panel.
        made: When that was, in seconds since the epoch.
        live: True if the page is to follow the run by the events of its server.
    """
    said = f"Made by stageline, {datetime.fromtimestamp(made):%F %T}." if not live else "A live page of stageline."
    data = msgspec.json.encode({"sections": sections, "made": said, "live": live}).decode()
    for sign, instead in _ESCAPED.items():
        data = data.replace(sign, instead)
    head = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(live=live)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{escape(str(sections['run']['id']))} – stageline</title>",
        '<link rel="icon" href="data:,">',
        f"<style>{_style()}</style>",
    )
    body = (
        f"<main>\n{_asset('page.html')}</main>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>{_script()}</script>",
    )
    joined = ['<!doctype html>\n<html lang="en">\n<head>', *head, "</head>", "<body>", *body, "</body>", "</html>\n"]
    return "\n".join(joined)


@cache
def policy(*, live: bool) -> str:
    """Return the policy of the page (Content-Security-Policy): its own script and style, and no requests.

    A live page may ask its own server.
    """
    own = "; connect-src 'self'" if live else ""
    hashes = f"script-src '{_hash(_script())}'; style-src '{_hash(_style())}'"
    return f"default-src 'none'; {hashes}; img-src data:; base-uri 'none'; form-action 'none'{own}"


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


@cache
def _style() -> str:
    return f"{_asset('uPlot.min.css')}\n{_asset('page.css')}"


@cache
def _script() -> str:
    own = "\n".join(map(_asset, _SCRIPTS))
    return f'/*\n{_asset("uPlot.LICENSE")}*/\n{_asset("uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{own}}})();\n'


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
