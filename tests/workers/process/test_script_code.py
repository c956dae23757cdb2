"""Imports of a worker that joins a script, and its refusals before any import."""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stageline.broker.coordinator.run import ScriptCode
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan, from_mapping
from stageline.workers.process.script_code import demand_same_code
from stageline.workers.runs.records import hashes_of

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
        ({"nul\0.py": "0" * 64}, r"'nul\x00.py' cannot be read (ValueError)"),
        ({"circle.py": "0" * 64}, "circle.py cannot be read ("),
        ({"long" * 75 + ".py": "0" * 64}, "long" * 25 + "... cannot be read (File name too long)"),
        ({f"absent{each}.py": "0" * 64 for each in range(9)}, "absent4.py is not there; and 4 more. Copy"),
    ],
)
def test_other_files_are_named_and_nothing_is_imported(folder: Path, files: dict[str, str], why: str) -> None:
    (folder / "link.py").symlink_to(folder.parent / "outside.py")
    (folder / "circle.py").symlink_to("circle.py")
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


def test_a_file_that_python_finds_elsewhere_under_the_same_name_is_refused(folder: Path) -> None:
    """A folder without `__init__.py` comes after every package of its name on the path, wherever that is."""
    elsewhere = folder / ".venv"
    for package in (folder / "shadowed", elsewhere / "shadowed"):
        package.mkdir(parents=True)
        (package / "net.py").write_text(TEXT)
    code = ScriptCode(torch.__version__, hashes_of(folder, ["shadowed/net.py"]))
    (elsewhere / "shadowed" / "__init__.py").touch()
    sys.path.append(str(elsewhere))
    with pytest.raises(ModelRefused) as refused:
        demand_same_code(plan("shadowed.net.build"), code, folder, "desk")
    for place in (elsewhere, folder):
        assert str(place / "shadowed" / "net.py") in str(refused.value)
    assert not [*folder.rglob("imported")]
    sys.path.pop()
    demand_same_code(plan("shadowed.net.build"), code, folder, "desk")
    assert sys.modules.pop("shadowed.net").__file__ == str(folder / "shadowed" / "net.py")
    del sys.modules["shadowed"]


def test_a_module_that_is_loaded_from_another_file_inside_the_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = folder / ".venv" / f"{MODULE}.py"
    loaded = ModuleType(MODULE)
    loaded.__file__ = str(there)
    monkeypatch.setitem(sys.modules, MODULE, loaded)
    with pytest.raises(ModelRefused, match=f"{there} has that name here, as {folder / MODULE}.py has"):
        demand_same_code(plan(), code_in(folder), folder, "desk")


def test_what_was_imported_from_another_file_than_that_compared_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finders that others have put before Python's own are asked only by the import."""
    other = folder / ".venv" / f"{MODULE}.py"
    other.parent.mkdir()
    other.write_text(TEXT)

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, other) if name == MODULE else None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ModelRefused, match=f"{other} was imported, which is not the file"):
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
