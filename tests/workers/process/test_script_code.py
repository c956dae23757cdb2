"""What a worker that joins a script imports, and what it refuses before it has imported anything."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan, from_mapping
from stageline.workers.process.script_code import demand_same_code
from stageline.workers.runs.code import hashes_of

MODULE = "joined_in_test"
TEXT = """
from os import system
from pathlib import Path
(Path(__file__).parent / "imported").touch()
def build(): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    there = tmp_path / "code"
    there.mkdir()
    (there / f"{MODULE}.py").write_text(TEXT)
    (tmp_path / "outside.py").write_text(TEXT)
    yield there
    sys.modules.pop(MODULE, None)


def plan(factory: str = f"{MODULE}.build", **model: Any) -> Plan:
    tables: dict[str, Any] = {
        "model": {"factory": factory, "loss": "torch.nn.functional.mse_loss", "stages": 2, **model},
        "data": {"source": "script:batches", "batch_size": 1},
        "optimizer": {"factory": "torch.optim.SGD"},
    }
    return from_mapping(tables)


def code_in(folder: Path) -> ScriptCode:
    return ScriptCode(torch.__version__, hashes_of(folder, [f"{MODULE}.py"]))


def test_the_same_code_is_imported(folder: Path) -> None:
    demand_same_code(plan(), code_in(folder), folder, "desk")
    assert sys.modules[MODULE].__file__ == str(folder / f"{MODULE}.py")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"absent.py": "0" * 64}, "absent.py is not there"),
        ({f"{MODULE}.py": "0123456789abcdef"}, f"{MODULE}.py differs (SHA-256 "),
        ({"../outside.py": "0" * 64}, "../outside.py leads out of the folder"),
        ({"link.py": "0" * 64}, "link.py leads out of the folder"),
        ({"/etc/passwd": "0" * 64}, "/etc/passwd leads out of the folder"),
    ],
)
def test_other_files_are_named_and_nothing_is_imported(folder: Path, files: dict[str, str], why: str) -> None:
    (folder / "link.py").symlink_to(folder.parent / "outside.py")
    with pytest.raises(ModelRefused) as refused:
        demand_same_code(plan(), ScriptCode(torch.__version__, files), folder, "desk")
    assert why in str(refused.value)
    assert "on desk is not the script's" in str(refused.value)
    assert not (folder / "imported").exists()


@pytest.mark.parametrize(
    "reference",
    [
        "os.system",
        "subprocess.run",
        "torch.hub.load",
        "outside.build",
        "unlisted.build",
        f"{MODULE}.py:build",
        "script:model",
        f"package.{MODULE}.build",
    ],
)
def test_a_name_outside_of_the_compared_files_is_refused_before_an_import(folder: Path, reference: str) -> None:
    (folder / "unlisted.py").write_text(TEXT)
    with pytest.raises(ModelRefused, match="is not imported"):
        demand_same_code(plan(reference), code_in(folder), folder, "desk")
    with pytest.raises(ModelRefused, match=r"model\.metrics = .* is not imported"):
        demand_same_code(plan(metrics=[reference]), code_in(folder), folder, "desk")
    assert not (folder / "imported").exists()


def test_what_a_file_has_imported_itself_is_refused(folder: Path) -> None:
    """With model.options, `model.system` would run any command."""
    with pytest.raises(ModelRefused, match="does not itself define"):
        demand_same_code(plan(f"{MODULE}.system"), code_in(folder), folder, "desk")


def test_a_file_that_another_would_be_imported_in_place_of_is_refused(folder: Path) -> None:
    (folder / MODULE).mkdir()
    (folder / MODULE / "__init__.py").write_text(TEXT)
    with pytest.raises(ModelRefused, match="is not imported"):
        demand_same_code(plan(), code_in(folder), folder, "desk")


def test_a_name_that_python_has_itself_is_refused(folder: Path) -> None:
    (folder / "random.py").write_text(TEXT)
    code = ScriptCode(torch.__version__, hashes_of(folder, ["random.py"]))
    with pytest.raises(ModelRefused, match="Python's own module random has that name here"):
        demand_same_code(plan("random.build"), code, folder, "desk")


def test_another_version_of_torch_is_refused_but_not_another_build(folder: Path) -> None:
    code = code_in(folder)
    demand_same_code(plan(), ScriptCode(torch.__version__.partition("+")[0] + "+cu126", code.files), folder, "desk")
    with pytest.raises(ModelRefused, match=r"desk has torch .*, the script's machine 1\.2\.3"):
        demand_same_code(plan(), ScriptCode("1.2.3", code.files), folder, "desk")
