"""The documentation site: every page has a place in its navigation, and its pictures are what is drawn."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.pages import named_files
from support.paths import DOCS, ROOT
from support.workspace import Workspace

SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
ASSEMBLE = runpy.run_path(str(DOCS / "assemble.py"))


def in_navigation(entry: Any) -> list[str]:
    """Return the pages below an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    entries = entry if isinstance(entry, list) else entry.values()
    return [page for each in entries for page in in_navigation(each)]


def test_every_page_has_one_place_in_the_navigation() -> None:
    assert sorted(in_navigation(SITE["nav"])) == sorted(str(place) for place in ASSEMBLE["pages"]().values())


def test_a_link_out_of_the_pages_becomes_a_path(tmp_path: Path) -> None:
    page = DOCS / "guides" / "data.md"
    text = "[the net](../../examples/digits/model.py), [why](../project/promises.md#x), [docs](https://example.org)"
    shown = ASSEMBLE["for_site"](page, Path("guides/data.md"), text)
    assert shown == "the net (`examples/digits/model.py`), [why](../project/promises.md#x), [docs](https://example.org)"


def test_the_pages_of_the_root_are_part_of_the_site(tmp_path: Path) -> None:
    ASSEMBLE["assemble"](tmp_path / "pages")
    page = (tmp_path / "pages/project/architecture.md").read_text()
    assert "](adding.md)" in page
    assert "](docs/" not in page


def test_a_built_page_asks_no_other_site_and_links_its_pictures(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text('<script src="https://x.org/a.js"></script><img alt="a" src="images/a.svg"><img src="b.png">')
    ASSEMBLE["finish"](tmp_path)
    picture = '<a class="picture" href="images/a.svg"><img alt="a" src="images/a.svg"></a>'
    assert page.read_text() == f'<script src="search-in-files.js"></script>{picture}<img src="b.png">'


def test_every_picture_of_a_page_is_part_of_the_site(tmp_path: Path) -> None:
    """Those of a guide were missing: PNGs were not copied."""
    ASSEMBLE["assemble"](tmp_path)
    for page in tmp_path.rglob("*.md"):
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page.read_text()):
            assert (page.parent / picture).exists()
    assert "digits-3-none.png" in (tmp_path / "guides/what-a-cut-tells.md").read_text()


def test_the_pictures_of_the_concepts_are_what_is_drawn() -> None:
    folder = DOCS / "images" / "concepts"
    drawn = runpy.run_path(str(folder / "draw.py"))["drawn"]()
    assert {image.name: image.read_text(encoding="utf-8") for image in folder.glob("*.svg")} == drawn


@pytest.mark.slow
def test_the_first_script_gives_one_digest_however_it_is_cut(workspace: Workspace) -> None:
    script = named_files(DOCS / "start/first-script.md")["first.py"]
    short = script.replace("torch.randn(1000,", "torch.randn(40,")
    assert short != script
    digests = set()
    for cut in ("cut=[2]", "cut=[1, 3]", 'cut=[1], schedule="gpipe"'):
        workspace.write("first.py", short.replace("cut=[2]", cut))
        ended = python(workspace, "first.py")
        assert ended.returncode == 0, ended.stderr
        digests.add(ended.stdout)
    [printed] = digests
    assert re.fullmatch(r"loss \d\S*\nweights [0-9a-f]{64}\n", printed)


def test_the_plan_of_the_first_run_is_what_init_writes(workspace: Workspace) -> None:
    [shown] = re.findall(r"^```toml\n(.*?)^```$", (DOCS / "start/first-plan.md").read_text(), re.MULTILINE | re.DOTALL)
    assert workspace.command("init", "new").returncode == 0
    written = tomllib.loads((workspace.folder / "new/stageline.toml").read_text())
    for table, keys in tomllib.loads(shown).items():
        assert keys.items() <= written[table].items()


def python(workspace: Workspace, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in the workspace, as a reader does."""
    return subprocess.run([sys.executable, script], cwd=workspace.folder, capture_output=True, text=True)


def test_a_stranger_reads_the_readme_in_minutes() -> None:
    """It had 2,041 words, and its installation began at line 76."""
    text = re.sub(
        r"^```.*?^```$|^    .*?$|^\|.*?$", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert len(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).split()) <= 700
