"""The audit of a plan."""

from pathlib import Path

import pytest

from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.plan import Plan, from_mapping
from stageline.workers.audit.audit import audit
from stageline.workers.audit.report import AuditChoice

MODEL = """
from torch import nn
from stageline import Layer, Layers

def build(dropout=0.0):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 2))

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(16, 8), nn.Linear(8, 2)

def table():
    return Layers(Table(), [Layer("low"), Layer("high")])

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()

def square(outputs, targets):
    return (outputs - targets).square().mean()
"""

DATA = """
import torch
from stageline import Rows

def batches(batch_size, seed, shape=(1, 4, 4), rows=120, numbers=False, held_out=True):
    x = torch.rand(rows, *shape, generator=torch.Generator().manual_seed(3))
    y = (x.flatten(1)[:, :8].sum(1) > x.flatten(1)[:, 8:].sum(1)).long()
    y = torch.stack([y, y], 1).float() if numbers else y
    kept = (x[:20], y[:20]) if held_out else None
    return Rows(x[20:], y[20:], batch_size, seed, held_out=kept)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "data.py").write_text(DATA)
    return tmp_path


def plan(folder: Path, model: dict[str, object] | None = None, **data: object) -> Plan:
    tables = {
        "run": {"steps": 4},
        "model": {
            "factory": "model.py:build",
            "loss": "torch.nn.functional.cross_entropy",
            "metrics": ["model.py:accuracy"],
            **(model or {}),
        },
        "data": {"source": "data.py:batches", "batch_size": 20, "options": data},
        "optimizer": {"factory": "torch.optim.Adam", "lr": 0.02},
    }
    return from_mapping(tables, file=str(folder / "stageline.toml"))


def test_rows_that_only_change_their_shape_are_told_whole_and_each_cut_is_named(folder: Path) -> None:
    pictures = []
    report = audit(plan(folder), AuditChoice(steps=3), lambda cut, picture: pictures.append(picture))
    assert [(each.cut, each.layer, each.features) for each in report.cuts] == [
        (1, "0", 16),
        (2, "1", 12),
        (3, "2", 12),
        (4, "3", 12),
    ]
    flat, *_ = report.cuts
    assert flat.linear > 0.999
    assert flat.dependence > 1 - 1e-6
    assert flat.by_chance < 0.7
    assert (report.trained, report.tested, report.measure) == (75, 25, "accuracy")
    assert all(picture.shape == (3 * 66 + 2, 8 * 66 + 2, 3) for picture in pictures)


@pytest.mark.slow
def test_it_says_the_same_twice_and_leaves_layers_of_the_plan_as_they_were(folder: Path) -> None:
    once, again = (audit(plan(folder, {"options": {"dropout": 0.5}}), AuditChoice((4,), 3)) for _ in range(2))
    assert once == again


@pytest.mark.slow
def test_a_defence_tells_less_and_its_cost_is_measured(folder: Path) -> None:
    report = audit(plan(folder), AuditChoice((2,), 40, defended=True, noise=3.0))
    none, noise, clip, equal = report.cuts
    assert [each.defence.split()[0] for each in report.cuts] == ["none", "noise", "clip", "equal"]
    assert noise.linear < none.linear - 0.3
    assert noise.dependence < none.dependence
    assert none.score is not None
    assert noise.score is not None
    assert noise.score < none.score
    assert none.by_norm is not None
    assert equal.by_norm is not None
    assert clip.linear > 0.2
    assert equal.by_direction == 1.0  # of two classes, the gradients' directions are opposite


@pytest.mark.slow
def test_equal_norms_tell_nothing_by_the_norm(folder: Path) -> None:
    report = audit(plan(folder), AuditChoice((2,), 10, defended=True))
    none, *_, equal = report.cuts
    assert none.by_norm is not None
    assert equal.by_norm is not None
    assert equal.by_norm < none.by_norm


def test_inputs_that_are_no_images_and_targets_that_are_no_classes_are_audited_without_pictures(folder: Path) -> None:
    pictures = []
    given = plan(
        folder,
        {"factory": "model.py:table", "loss": "model.py:square", "metrics": []},
        shape=[16],
        numbers=True,
        held_out=False,
    )
    report = audit(given, AuditChoice(), lambda cut, picture: pictures.append(picture))
    (only,) = report.cuts
    assert (only.layer, only.by_norm, only.by_direction, only.score, report.measure) == ("low", None, None, None, None)
    assert pictures == [None]


@pytest.mark.parametrize(
    ("given", "choice", "error", "reason"),
    [
        ({}, AuditChoice((5,)), ModelRefused, "there is no cut before layer 5: layers 1 to 4 may begin a stage"),
        ({"rows": 30}, AuditChoice((1,)), DataError, "gives 10 rows; an audit needs 20 at least"),
        (
            {"shape": [1, 3, 3]},
            AuditChoice((2,)),
            ModelRefused,
            "the audit of cut 2, after layer 1, failed: RuntimeError",
        ),
    ],
)
def test_what_cannot_be_audited_is_named(
    given: dict[str, object], choice: AuditChoice, error: type[Exception], reason: str, folder: Path
) -> None:
    with pytest.raises(error, match=reason):
        audit(plan(folder, **given), choice)
