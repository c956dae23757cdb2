"""Copies the pages of the documentation into one folder, from which the site is built, and finishes the built site.

    python docs/assemble.py build/docs
    zensical build --strict
    python docs/assemble.py --finish build/site

Pages in docs/ link to files of the repository as a reader of the repository needs them. The site has only pages. So a
link from a page to another page stays, the pages at the repository's root (`ROOT_PAGES`) get a place in the site, and a
link to any other file becomes its path in a code font.
"""

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
COPIED = (".md", ".svg", ".png", ".json", ".css", ".js")
SEARCH = "search-in-files.js"
FETCHED = re.compile(r'<script src="https?://[^"]*"[^>]*></script>')
PICTURE = re.compile(r'<img [^>]*src="([^"]+\.svg)"[^>]*>')
LINE_ANCHOR = re.compile(r'<a id="[^"]*__codelineno-[^"]*"[^>]*></a>')  # links without a name, before each line of code
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def pages() -> dict[Path, Path]:
    """Return every page of the site: its file in the repository, and its place in the site."""
    found = {path: path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))}
    return found | {ROOT / name: Path(place) for name, place in ROOT_PAGES.items() if name != "README.md"}


def for_site(page: Path, place: Path, text: str) -> str:
    """Return `text` of `page` with links that hold at `place` in the site."""

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = Path(os.path.normpath(page.parent / target))
        to = _place(path)
        if to is not None:
            return f"{image}[{words}]({os.path.relpath(to, place.parent)}{anchor})"
        shown = f"`{path.relative_to(ROOT)}`"
        return shown if words.strip("`") in (shown.strip("`"), path.name) else f"{words} ({shown})"

    return LINK.sub(link, text)


def _place(path: Path) -> Path | None:
    """Return the place of a file in the site; None if the site does not have it."""
    if path.is_relative_to(DOCS):
        path = path / "index.md" if path.is_dir() else path
        return path.relative_to(DOCS) if path.suffix in COPIED else None
    place = ROOT_PAGES.get(str(path.relative_to(ROOT)))
    return Path(place) if place else None


def assemble(folder: Path) -> None:
    """Write the site's pages and pictures into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for page, place in pages().items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(for_site(page, place, page.read_text(encoding="utf-8")), encoding="utf-8")
    for path in sorted(path for path in DOCS.rglob("*") if path.suffix in COPIED and path.suffix != ".md"):
        target = folder / path.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def finish(site: Path) -> None:
    """Replace the script that pages would fetch over the network, remove links without a name, and link pictures.

    The script lets browsers search in pages that are files. A picture leads to itself, in a window of its own size.
    """
    for page in site.rglob("*.html"):
        own = f'<script src="{os.path.relpath(site / SEARCH, page.parent)}"></script>'
        text = LINE_ANCHOR.sub("", FETCHED.sub(own, page.read_text(encoding="utf-8")))
        text = PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', text)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--finish":
        finish(Path(sys.argv[2]))
    else:
        assemble(Path(sys.argv[1]))
