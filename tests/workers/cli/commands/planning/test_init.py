"""Files that `stageline init` writes: a plan that trains as it is, with the schema by which editors check it."""

import contextlib
import json
import subprocess
import sys
import tomllib

import jsonschema
import pytest

from stageline.pipeline.plan import read_plan
from stageline.pipeline.plan.keys.models import plan_schema
from stageline.workers.cli.app import run

FILES = {"stageline.toml", "model.py", "data.py", ".stageline.schema.json"}


@pytest.mark.slow
def test_what_init_writes_into_an_empty_folder_trains_to_a_good_accuracy(tmp_path):
    for command in (["init"], ["train", "--json"]):
        arguments = [sys.executable, "-P", "-m", "stageline", *command]
        ended = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["metrics"]["accuracy"] > 0.95


def test_init_makes_the_folder_and_names_what_it_wrote(tmp_path, capsys):
    folder = tmp_path / "new" / "spiral"
    assert run(["init", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == FILES
    told = capsys.readouterr().out
    assert all(str(folder / name) in told for name in FILES)
    assert f"stageline train {folder}" in told


@pytest.mark.parametrize("name", sorted(FILES))
def test_init_overwrites_nothing_and_names_the_file_that_is_there(tmp_path, capsys, name):
    (tmp_path / name).write_text("mine")
    assert run(["init", str(tmp_path)]) == 2
    assert f"already holds {name}" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_the_plan_names_the_schema_beside_it_and_agrees_with_it(tmp_path):
    assert run(["init", str(tmp_path)]) == 0
    text = (tmp_path / "stageline.toml").read_text()
    assert text.startswith("#:schema ./.stageline.schema.json\n")
    schema = json.loads((tmp_path / ".stageline.schema.json").read_text())
    assert schema == plan_schema()
    jsonschema.validate(tomllib.loads(text), schema)
    assert read_plan(tmp_path).warnings == ()


def test_a_command_without_config_takes_the_plan_of_the_current_folder(workspace, capsys):
    folder = workspace.folder / "new"
    assert run(["init", str(folder)]) == 0
    with contextlib.chdir(folder), workspace.forking():
        assert run(["plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]["model"]["factory"] == "model.py:build"


@pytest.mark.parametrize("command", ["train", "worker", "broker", "plan"])
def test_a_command_without_config_in_a_folder_without_a_plan_names_what_is_missing(tmp_path, capsys, command):
    with contextlib.chdir(tmp_path):
        assert run([command]) == 78
    assert "stageline.toml: there is no such file; name a plan" in capsys.readouterr().err
