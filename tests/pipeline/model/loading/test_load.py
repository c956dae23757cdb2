"""Objects that a plan names are loaded from the user's files; every failure names the plan's key."""

import sys
from pathlib import Path

import pytest
import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.load import call, code_of, load_function, load_object, load_source
from stageline.pipeline.plan import read_plan
from support.small_plans import plan

MODEL = """
from neighbour import DEPTH

def build():
    return DEPTH

def broken():
    raise ValueError("no such layer")
"""


DATASETS = """
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

whole = TensorDataset(torch.arange(10), torch.arange(10))

def train(count=6):
    return TensorDataset(torch.arange(count), torch.arange(count))

class Named(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {"path": str(index), "image": torch.zeros(2), "label": index}

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))

def split(batch):
    return batch["image"], batch["label"]

def doubled(samples):
    return torch.utils.data.default_collate(samples + samples)

def broken():
    raise OSError("no such disk")
"""

PLAN = """
[run]
steps = 1
seed = 40
[model]
factory = "model.py:build"
loss = "torch.nn.functional.mse_loss"
[data]
batch_size = 4
dataset = "data.py:{name}"
{more}
[optimizer]
factory = "torch.optim.SGD"
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
    with pytest.raises(ModelRefused, match="is of type int, which cannot be called"):
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


def loaded(folder: Path, name: str, more: str = ""):
    (folder / "data.py").write_text(DATASETS)
    (folder / "stageline.toml").write_text(PLAN.format(name=name, more=more))
    return load_source(read_plan(folder))


def test_a_dataset_is_an_object_or_what_a_function_or_class_returns(folder):
    assert loaded(folder, "whole").steps_per_epoch == 3
    assert loaded(folder, "train").steps_per_epoch == 2
    assert loaded(folder, "train", "options = { count = 30 }").steps_per_epoch == 8
    assert loaded(folder, "Named", 'target = "data.py:split"').batch(0)[1].shape == (4,)


def test_the_keys_of_a_dataset_say_how_it_is_drawn(folder):
    more = 'held_out = "data.py:whole"\nshuffle = false\ncollate = "data.py:doubled"'
    source = loaded(folder, "train", more)
    assert source.batch(1)[0].tolist() == [4, 5, 4, 5]
    assert source.held_out().batch(0)[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_plan_that_drops_the_last_batch_has_as_many_steps_as_whole_batches(folder):
    assert loaded(folder, "whole", "drop_last = true").steps_per_epoch == 2
    with pytest.raises(
        ModelRefused, match=r'data\.dataset = "data\.py:train": drop_last .* 2 rows, and batch_size is 4'
    ):
        loaded(folder, "train", "drop_last = true\noptions = { count = 2 }")


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("Stream", "", r'data\.dataset = "data\.py:Stream": the dataset is a Stream, whose samples come in one order'),
        ("whole", "options = { count = 3 }", "is of type TensorDataset, which takes no data.options: leave them out"),
        (
            "broken",
            "",
            r"data\.dataset = \"data\.py:broken\": OSError: no such disk \(/.*/data\.py, line \d+, in broken",
        ),
        ("train", 'held_out = "data.py:tests"', r"data\.held_out = \"data\.py:tests\": data\.py has no 'tests'"),
        ("train", 'target = "data.py:splitt"', r"data\.target = \"data\.py:splitt\": data\.py has no 'splitt'"),
    ],
)
def test_a_dataset_that_cannot_be_drawn_is_refused_with_the_plans_key(folder, name, more, reason):
    with pytest.raises(ModelRefused, match=reason):
        loaded(folder, name, more)


def test_a_dataset_in_the_place_of_a_source_is_told_which_key_it_goes_to(folder):
    (folder / "rows.py").write_text(
        "class Data:\n    def __init__(self, **_): ...\n    def __getitem__(self, i): ...\n"
    )
    wrong = plan(data__source="rows.py:Data").model_copy(update={"file": folder / "stageline.toml"})
    with pytest.raises(ModelRefused, match=r'of type Data; .*: for a Dataset, write dataset = "\.\.\." instead'):
        load_source(wrong)


def test_what_a_dataset_executes_is_named_too():
    keys = {"data__source": None, "data__dataset": "data.py:train", "data__held_out": "test.py:test"}
    found = code_of(plan(**keys, data__target="parts.py:split", data__collate="package.padded"))
    names = [*(Path.cwd() / name for name in ("data.py", "test.py", "parts.py")), "package"]
    assert found[2:6] == [str(name) for name in names]
    assert len(code_of(plan(**keys, data__target="label"))) == 5
