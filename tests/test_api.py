"""The public API: documented name by name, and every code block of its page runs as it stands."""

import contextlib
import importlib
import json
import re
import subprocess
import sys

import pytest

import stageline
from support.pages import code_blocks, named_files
from support.paths import DOCS
from support.workspace import Workspace

PAGE = DOCS / "reference/api.md"


def test_the_code_of_the_page_runs_from_top_to_bottom(workspace: Workspace, monkeypatch):
    monkeypatch.syspath_prepend(workspace.folder)  # as a script has its own folder
    names: dict[str, object] = {"__name__": PAGE.stem}
    with contextlib.chdir(workspace.folder), workspace.forking():
        for block in code_blocks(PAGE):
            exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)  # noqa: S102  # our own page
    assert code_blocks(PAGE)
    assert not named_files(PAGE)


@pytest.mark.slow
def test_the_three_files_of_a_plan_are_trained_as_they_stand(workspace: Workspace):
    """Its plan named functions, and no page showed how those are called."""
    files = named_files(DOCS / "guides/own-model.md")
    assert list(files) == ["stageline.toml", "model.py", "data.py"]
    for name, text in files.items():
        workspace.write(name, text)
    ended = workspace.command("train", ".", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["metrics"]["accuracy"] > 0.8


@pytest.mark.parametrize("name", stageline.__all__)
def test_every_public_name_is_documented_on_the_page_and_where_it_is_defined(name):
    assert f"\n::: stageline.{name}\n" in PAGE.read_text()
    assert name == "Batch" or getattr(stageline, name).__doc__  # a type alias has no docstring


def test_every_entry_of_the_page_is_defined_where_it_says():
    for entry in re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE):
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry


def test_a_name_that_is_not_public_is_refused_with_the_public_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'Worker'; it has AddNoise, Batch, .*Line"):
        _ = stageline.Worker


def test_importing_stageline_does_not_import_torch():
    code = "import sys, stageline; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_the_public_names_are_listed_once_each_in_order():
    assert sorted(set(stageline.__all__)) == sorted(stageline.__all__)
    assert dir(stageline) == sorted(stageline.__all__)
