"""Every block of code of README.md and of the pages in docs/start, docs/guides and docs/concepts runs, page by page.

```python                     is executed, after the blocks above it
```python title="model.py"    is a file in the page's folder
```toml title="stageline.toml"  likewise, and is a plan
```toml                       is read over the page's plan, or over that of a workspace
```diff                       becomes a script without the lines that are taken away, which runs
```console                    has commands after "$ " and what they print; "..." stands for anything, and numbers,
                              names of runs and digests for others
```console title="desk"       is a machine with a folder of its own; "terminal 2" is another terminal in the same
```yaml                       is read
```text                       is a picture, or a part of an output
"""

import contextlib
import os
import re
import sys
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import yaml

from stageline.broker.keys.join_line import JoinLine
from stageline.pipeline.model.own_schedule import read_plan
from stageline.pipeline.plan import from_mapping
from support.fork_server import ForkServer
from support.page_terminal import LIMIT, Names, PageTerminal, Typed, typed
from support.pages import Block, blocks, named_files, outside_blocks
from support.paths import DOCS, EXAMPLES, ROOT
from support.redis_server import shared_server
from support.workspace import PLAN, Workspace

FOLDERS = ("start", "guides", "concepts")
PAGES = [ROOT / "README.md", *sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))]
KINDS = {"python", "toml", "diff", "console", "yaml", "text", "dockerfile"}
LONG = {"first-kill", "hospital-and-lab", "stuck-run", "checkpoints", "training", "what-a-cut-tells", "models", "taps"}
LONG |= {"weights", "memory", "split-learning", "placement", "after", "first-plan", "own-model", "two-machines"}
LONG |= {"data", "replicas", "features", "asynchronous", "machines-that-come-and-go"}
LONG |= {"slow-run", "metrics", "sequences", "schedules", "lightning", "transformers-trainer", "lora"}
REPLACED = re.compile(r"^<!-- in tests: (.+?) becomes (.+?) -->$", re.MULTILINE)
ALTERNATIVES = (
    (("run", "epochs"), ("run", "steps")),
    (("model", "cut"), ("model", "stages")),
    (("data", "source"), ("data", "dataset")),
)
LINE_SHOWN = "#k1...."  # end of a join line on a page
FILES_OF = re.compile(r"^<!-- files of (.+?) -->$", re.MULTILINE)

IDS = {page: str(page.relative_to(ROOT)) for page in PAGES}


def _name(page: Path) -> str:
    return IDS[page]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.stem in LONG else []) for page in PAGES],
    ids=_name,
)
def test_the_code_of_a_page_runs(
    page: Path, workspace: Workspace, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(workspace.folder)  # as a script has its own folder
    with ShownPage(page, workspace, fork_server) as shown:
        shown.run()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_each_block_of_a_page_says_in_which_language_it_is(page: Path) -> None:
    found = list(blocks(page))
    assert not [block for block in found if block.kind not in KINDS]
    assert not [block for block in found if block.kind == "text" and re.search(r"^\S*\$ ", block.text, re.MULTILINE)]
    assert not re.findall(r"\n\n    +\S.*", outside_blocks(page)), "an indented block has no language"


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left = {(IDS[page], block.line): block.not_run for page in PAGES for block in blocks(page) if block.not_run}
    assert len(left) <= 15, left
    assert all(block.not_run for page in PAGES for block in blocks(page) if block.kind == "dockerfile")


class ShownPage:
    """A page that is carried out in the folder of a workspace."""

    def __init__(self, page: Path, workspace: Workspace, fork_server: ForkServer) -> None:
        self._page = page
        self._workspace = workspace
        self._fork_server = fork_server
        self._folder = workspace.folder
        self._names: dict[str, Any] = {"__name__": page.stem}
        self._learnt = Names()
        self._terminals: dict[str, PageTerminal] = {}
        self._files: dict[str, str] = {}
        self._here = Here(page)
        for name in ("stageline.toml", "model.py", "data.py"):
            (self._folder / name).unlink()

    def __enter__(self) -> "ShownPage":
        self._modules = set(sys.modules)
        return self

    def __exit__(self, *_: object) -> None:
        self._workspace.kill()
        for name in set(sys.modules) - self._modules:
            if str(self._folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]  # another page has one of that name

    def run(self) -> None:
        for name in FILES_OF.findall(self._page.read_text(encoding="utf-8")):
            for file, text in named_files(self._page.parent / name).items():
                self._write(file, text)
        if "examples/" in self._page.read_text(encoding="utf-8"):
            (self._folder / "examples").symlink_to(EXAMPLES)
        for block in blocks(self._page):
            if not block.not_run:
                self._run(block, self._here(block.text))
        for terminal in self._terminals.values():
            terminal.finish()

    def _run(self, block: Block, text: str) -> None:
        match block.kind:
            case _ if block.is_file:
                self._write(block.title, text)
            case "python":
                self._execute(text, block.line)
            case "toml":
                self._read_over(block, text)
            case "yaml":
                yaml.safe_load(text)
            case "diff":
                self._run_changed(text)
            case "console":
                self._type(block, text)

    def _write(self, name: str, text: str) -> None:
        for folder in (self._folder, *(each.folder for each in self._terminals.values())):
            (folder / name).write_text(text)
        self._files[name] = text
        if name == "stageline.toml":
            read_plan(self._folder)

    def _execute(self, text: str, line: int) -> None:
        for terminal in self._terminals.values():
            terminal.finish()
        code = compile("\n" * line + self._learnt.here(text), self._page.name, "exec", dont_inherit=True)
        with contextlib.chdir(self._folder), self._workspace.forking(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of other packages
            exec(code, self._names)  # noqa: S102  # our own page

    def _read_over(self, block: Block, text: str) -> None:
        """A comment before the block, "with: model.stages=3", says what else the plan has, if the page shows none."""
        base, tables = tomllib.loads(self._files.get("stageline.toml", PLAN)), tomllib.loads(text)
        for keys in ALTERNATIVES:
            for table, key in keys:
                if any(other in tables.get(table, {}) for table, other in keys):
                    base[table].pop(key, None)
        more = block.note.removeprefix("with: ").split() if block.note.startswith("with: ") else []
        from_mapping(_over(base, tables), file=self._folder / "stageline.toml", sets=more)

    def _run_changed(self, text: str) -> None:
        before, after = (_without(sign, text) for sign in "+-")
        compile(before, "before.py", "exec")
        (self._folder / "changed.py").write_text(after)
        self._terminal("").type(next(typed("$ python changed.py")), again=False)

    def _type(self, block: Block, text: str) -> None:
        terminal = self._terminal(block.title)
        others = [each for each in self._terminals.values() if each is not terminal]
        for one in typed(text):
            shown = "" if block.is_example else one.shown
            terminal.finish()
            terminal.varies = block.varies
            terminal.type(Typed(self._with_line(one.command), shown), again=any(each.going for each in others))

    def _with_line(self, command: str) -> str:
        """The command with the join line that a process has printed, in place of that of the page."""
        shown = re.search(rf"([^\s']+){re.escape(LINE_SHOWN)}", command)
        if shown is None:
            return command
        deadline = monotonic() + LIMIT
        while (found := re.search("--join '(.*)'", self._printed())) is None:
            assert monotonic() < deadline, self._printed()
            sleep(0.05)
        return command.replace(shown[0], replace(JoinLine.parse(found[1]), address=shown[1]).text)

    def _printed(self) -> str:
        """Text that the commands that go on have printed."""
        return "".join(each.going.output() for each in self._terminals.values() if each.going is not None)

    def _terminal(self, title: str) -> PageTerminal:
        if title not in self._terminals:
            here = not title or title.startswith("terminal")
            folder = self._folder if here else self._machine(title.partition(",")[0])
            environment = {**os.environ, "TMPDIR": str(self._workspace.temporary)}
            self._terminals[title] = PageTerminal(folder, environment, self._fork_server, self._learnt)
        return self._terminals[title]

    def _machine(self, title: str) -> Path:
        folder = self._folder / title
        folder.mkdir(exist_ok=True)
        for name, text in self._files.items():
            (folder / name).write_text(text)
        return folder


class Here:
    """The text of a page with addresses that are free here, and with the replacements that its comments list."""

    _TCP = re.compile(r"tcp://(?!\d+\.\d+\.\d+\.\d+:0\b)([\w.]+):(\d+(?:-\d+)?)?")
    _REDIS = re.compile(r"rediss?://[^\s/]+/0")

    def __init__(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        self._replaced = REPLACED.findall(text)
        self._joins = LINE_SHOWN in text  # its broker has keys, since it listens at all interfaces
        self._server: str | None = None

    def __call__(self, text: str) -> str:
        for theirs, ours in self._replaced:
            text = text.replace(theirs, ours)
        return self._REDIS.sub(self._redis, self._TCP.sub(self._tcp, text))

    def _tcp(self, found: "re.Match[str]") -> str:
        """An address of the loopback that no other test has, since pages have the same ports; else other ports."""
        pid = os.getpid()
        ports = found[2] or ""
        if self._joins:
            ports = re.sub(r"\d+", lambda port: str(int(port[0]) + 10_000 + pid % 400 * 25), ports)
            if found[1] == "0.0.0.0":  # noqa: S104 - of a page
                return f"tcp://0.0.0.0:{ports}"
        number = found[1].rpartition(".")[2] if found[1].startswith("10.") else "1"
        return f"tcp://127.{pid // 250 % 250 + 1}.{pid % 250 + 1}.{number}:{ports}"

    def _redis(self, _: "re.Match[str]") -> str:
        if self._server is None:
            self._server = shared_server().tcp_url_of(shared_server().own_number())
        return self._server


def _over(base: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a plan over those of another."""
    both = {name: _over(base[name], each) for name, each in tables.items() if isinstance(base.get(name), dict)}
    return {**base, **tables, **both}


def _without(sign: str, change: str) -> str:
    return "\n".join(line[1:] for line in change.splitlines() if not line.startswith(sign))
