"""Objects that a plan names are loaded from the user's files; every failure names the plan's key."""

import sys
from pathlib import Path

import pytest
import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.load import call, code_of, load_function, load_object
from support.small_plans import plan

MODEL = """
from neighbour import DEPTH

def build():
    return DEPTH

def broken():
    raise ValueError("no such layer")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "neighbour.py").write_text("DEPTH = 3")
    (tmp_path / "pipeline.py").write_text(MODEL)
    (tmp_path / "typo.py").write_text("import nothing_of_this_name")
    return tmp_path


def test_a_file_may_have_any_name_and_import_its_neighbours(folder):
    assert load_object("pipeline.py:build", folder, "model.factory")() == 3


def test_a_dotted_name_is_imported(folder):
    assert load_object("torch.nn.Linear", folder, "model.factory") is torch.nn.Linear


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("build", 'names nothing. Write "file.py:name"'),
        ("pipeline.py", 'is a file: write "pipeline.py:NAME"'),
        ("missing.py:build", "there is no file"),
        ("pipeline.py:bild", "has no 'bild'. It has: broken, build"),
        ("typo.py:build", r"ModuleNotFoundError: .*nothing_of_this_name.* \(/.*/typo\.py, line 1, in <module>\)"),
        ("nothing_of_this_name.build", "cannot import nothing_of_this_name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_plans_key(folder, reference, reason):
    with pytest.raises(ModelRefused, match=f"^model.factory.*{reason}"):
        load_object(reference, folder, "model.factory")


def test_an_error_of_the_users_factory_is_named_with_its_line(folder):
    factory = load_object("pipeline.py:broken", folder, "model.factory")
    with pytest.raises(
        ModelRefused, match=r"model.factory: ValueError: no such layer \(/.*/pipeline\.py, line 8, in broken\)"
    ):
        call(factory, "model.factory")


def test_a_class_becomes_one_of_its_objects(folder):
    assert isinstance(load_function("torch.nn.BCELoss", folder, "model.loss"), torch.nn.BCELoss)
    assert load_function("torch.nn.functional.relu", folder, "model.loss") is torch.nn.functional.relu
    with pytest.raises(ModelRefused, match="is a int, which cannot be called"):
        load_function("neighbour.py:DEPTH", folder, "model.loss")


def test_what_a_plan_executes_is_named_by_file_and_module(folder: Path):
    found = code_of(plan(model__metrics=["metrics.py:accuracy"], data__source="package.data.batches"))
    here = Path.cwd()
    assert found == [
        str(here / "model.py"),
        "torch.nn.functional",
        str(here / "metrics.py"),
        "package.data",
        "torch.optim",
    ]
