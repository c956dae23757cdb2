"""The audit of a plan."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stageline import EqualNormGradients
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.load import load_source
from stageline.pipeline.plan import Plan, from_mapping
from stageline.workers.extras.audit.audit import AuditChoice, audit
from stageline.workers.extras.audit.audited_model import AuditedModel, CutCodecs, codecs_at
from support.plain_codecs import cut_at, int8

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


def plan(folder: Path, model: dict[str, object] | None = None, codec: object = "lossless", **data: object) -> Plan:
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
        "queues": {"codec": codec},
    }
    return from_mapping(tables, file=str(folder / "stageline.toml"))


@pytest.mark.slow
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


def test_with_codecs_it_learns_and_measures_what_a_plain_loop_with_those_at_the_cut_does(folder: Path) -> None:
    given = plan(folder)
    source = load_source(given)
    (part,) = build_segments(given)
    model = cut_at(nn.Sequential(*part.layers), {2: ("int8", "bf16")})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for x, y in map(source.batch, range(3)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = source.batch(4)
    sent = model[:2](x).detach().requires_grad_()
    nn.functional.cross_entropy(model[2:](sent), y).backward()

    audited = AuditedModel.of(given).cut_before(2, codecs=CutCodecs("int8", "bf16"))
    audited.train(source, 3)
    crossing, gradients = audited.crossing((x, y))
    assert torch.equal(crossing, int8(sent.detach()))
    assert torch.equal(gradients, sent.grad)


def test_gradients_of_equal_norms_are_encoded_after_they_were_made_so(folder: Path) -> None:
    given = plan(folder)
    model = AuditedModel.of(given).cut_before(2, EqualNormGradients(), CutCodecs("lossless", "bf16"))
    _, gradients = model.crossing(load_source(given).batch(0))
    assert torch.equal(gradients, gradients.bfloat16().float())
    assert gradients.norm(dim=1).std() < 0.01 * gradients.norm(dim=1).mean()


def test_a_cut_of_the_plan_has_the_codecs_of_its_queues_and_another_those_of_their_directions(folder: Path) -> None:
    named = {"forward": "bf16", "forward-1": "int8", "backward-0": "bf16"}
    given = plan(folder, {"cut": [2]}, named)
    assert codecs_at(given, (1, 2)) == {1: CutCodecs("bf16", "lossless"), 2: CutCodecs("int8", "bf16")}
    assert codecs_at(plan(folder, codec="bf16"), (3,)) == {3: CutCodecs("bf16", "bf16")}
    report = audit(given, AuditChoice((2,), 2))
    assert [(each.codec, each.codec_back) for each in report.cuts] == [("int8", "bf16")]


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
