"""The pages name files and folders that are there, and classes with members that they have."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import DOCS, EXAMPLES, ROOT, TESTS

TOPS = ("benchmarks", "broker", "docker", "docs", "examples", "pipeline", "tests", "workers")
PATH = re.compile(rf"(?<![\w/.:-])(?:{'|'.join(TOPS)})/[\w./-]*\w")  # also in a command; not in an address
FILE = re.compile(r"`([\w./-]+\.(?:py|md))`")
LINK = re.compile(r"\]\(([^)\s]*)\)")
MEMBER = re.compile(r"`([A-Z]\w*)\.(\w+)(?:\(\))?`")
PLACED = re.compile(r"`(\w+)(?:\.\w+)?`\s+in\s+`([\w/]+\.py)`")  # a name and the file that defines it
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# In docs: files that a reader has, or has mistyped.
OTHERS = "compared.md"  # names files of other projects
USERS = {"mine.py", "unet.py", "modle.py", "noise.py", "norms.py", "first.py"}

PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted([*DOCS.rglob("*.md"), *EXAMPLES.rglob("*.md")]),
]


@pytest.fixture(scope="module")
def files() -> frozenset[str]:
    """Of the project, from its root on, each with "/" before it."""
    inside = (path for top in TOPS for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts)
    return frozenset(f"/{path.relative_to(ROOT)}" for path in [*ROOT.iterdir(), *inside])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path, files: frozenset[str]) -> None:
    """ARCHITECTURE.md named a file that had been deleted."""
    text = page.read_text()
    paths = [path for path in PATH.findall(text) if not (ROOT / path).exists() and not (TESTS / path).exists()]
    names = [name for name in FILE.findall(text) if name not in USERS and not _is_end_of_one(name, files)]
    assert not paths + [name for name in names if page.name != OTHERS]
    assert not [target for target in LINK.findall(text) if not _leads_somewhere(page, target)]


def _is_end_of_one(name: str, files: frozenset[str]) -> bool:
    """Tables name a file once with its folder, and those beside it without."""
    return any(file.endswith(f"/{name}") for file in files)


def _leads_somewhere(page: Path, target: str) -> bool:
    if "://" in target:
        return True
    file, _, heading = target.partition("#")
    found = page.parent / file if file else page
    return found.exists() and (not heading or found.suffix != ".md" or heading in _anchors(found.read_text()))


def _anchors(text: str) -> Iterator[str]:
    """Yield the anchors that GitHub makes for the headings of `text`."""
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        yield re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


class DefinedNames(ast.NodeVisitor):
    """The names that the product's files define, and the members and bases of classes by name."""

    def __init__(self) -> None:
        self.defined: dict[str, set[str]] = defaultdict(set)  # by file
        self.members: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)

    def read(self, path: Path) -> None:
        tree = ast.parse(path.read_text())
        self.defined[str(path.relative_to(ROOT))] = {*_defined(tree)}
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.members[node.name] |= {*_defined(node)}
        self.bases[node.name] |= {*re.findall(r"\w+", " ".join(map(ast.unparse, node.bases)))} - {node.name}
        self.generic_visit(node)

    def has(self, name: str, member: str) -> bool:
        """Return True if the class has the member, or has a base from elsewhere, which may have it."""
        if name not in self.bases:
            return False
        return member in self.members[name] or any(self.has(base, member) for base in self.bases[name])


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.ImportFrom(names=imported):
                yield from (alias.name for alias in imported)
            case _:
                pass


def test_a_member_or_a_definition_that_a_page_names_is_there(files: frozenset[str]) -> None:
    """Readers look for `Stash.kept` and for `read_header` in `message.py`; code moves, and pages do not."""
    names = DefinedNames()
    for top in ("pipeline", "broker", "workers"):
        for path in (ROOT / top).rglob("*.py"):
            names.read(path)
    wrong = []
    for page in PAGES:
        text = page.read_text()
        known = [found for found in MEMBER.findall(text) if found[0] in names.bases]
        wrong += [(page.name, *found) for found in known if not names.has(*found)]
        placed = [found for found in PLACED.findall(text) if page.name != OTHERS and found[1] not in USERS]
        wrong += [(page.name, *found) for found in placed if not _is_defined_in(*found, names)]
    assert not wrong


def _is_defined_in(name: str, file: str, names: DefinedNames) -> bool:
    return any(f"/{path}".endswith(f"/{file}") and name in found for path, found in names.defined.items())


def test_the_pages_are_looked_for_where_they_are() -> None:
    assert len(PAGES) > 40
    assert all(page.exists() for page in PAGES)


def test_the_changelog_is_one_page_until_a_version_is_released() -> None:
    """It had 375 lines about a version that was never released."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text
    assert len(text.splitlines()) <= 80 or re.search(r"^## \d", text, re.MULTILINE)
