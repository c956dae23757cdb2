"""Models that cannot be kept by sample are refused before the run, by the layer's name."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.preflight.trial import estimate
from stageline.workers.extras.preflight.trial_result import Estimate
from support import reference

FOLDER = Path(reference.__file__).parent / "prefix"
DATA = "Rows(ids[:ROWS], targets[:ROWS], batch_size, seed, held_out=(ids[ROWS:], targets[ROWS:]))"

pytestmark = pytest.mark.usefixtures("one_thread")


def _estimate(folder: Path, *sets: str, model: tuple[str, str] = ("", ""), data: str = DATA) -> Estimate:
    """Of the plan with a change in its model, and other data."""
    shutil.copytree(FOLDER, folder / "plan")
    for name, change in (("model.py", model), ("data.py", (DATA, data))):
        file = folder / "plan" / name
        file.write_text(file.read_text().replace(*change))
    return estimate(read_plan(folder / "plan" / "stageline.toml", sets=sets, environment={}))


def test_a_plan_tells_what_the_cache_will_hold(tmp_path: Path) -> None:
    found = _estimate(tmp_path)
    kept = found.prefix_cache
    assert kept is not None
    assert (kept.stage, kept.worker, kept.replayed_from, kept.samples) == (2, 2, 4, 27)
    assert (kept.row_bytes, kept.bytes) == (5 * 6 * 4 + 5, 27 * 125)
    assert not found.warnings


def test_one_epoch_has_nothing_to_use_again(tmp_path: Path) -> None:
    found = _estimate(tmp_path, "run.epochs=1")
    assert found.prefix_cache is None
    assert "model.prefix_cache: the run has 4 steps, an epoch has 4: nothing would be used" in found.warnings[0]


PLAIN_ACT = "act=nn.ReLU(inplace=True)"
LAYER = """

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        BODY


def build()"""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            ("norm.eval()", "norm"),
            "norm of stage 1, of type BatchNorm1d, is in training mode and computes with the other rows",
        ),
        (
            (PLAIN_ACT, "act=nn.Dropout(0.1)"),
            r"of type Dropout, is in training mode and draws with p = 0.1",
        ),
        (("BatchNorm1d(LENGTH)\n    norm", "BatchNorm1d(LENGTH)\n    norm.running_mean = None #"), "has no statistics"),
        ((PLAIN_ACT, "act=nn.RReLU()"), "act of stage 1, of type RReLU, is in training mode and draws; call eval"),
    ],
    ids=["BatchNorm", "dropout", "no statistics", "RReLU"],
)
def test_modules_that_draw_or_count_are_named(model: tuple[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(StagelineError, match=message):
        _estimate(tmp_path, model=model)


def test_all_of_them_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(StagelineError) as refused:
        _estimate(tmp_path, model=(PLAIN_ACT, "act=nn.Dropout(0.1), other=nn.Dropout(0.2)"))
    assert str(refused.value).count("model.prefix_cache = true") == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return x + torch.rand(())", "stage 1, which is frozen, draws random numbers: it gave the same microbatch"),
        ("self.seen += 1; return x", "the buffer act.seen of stage 1, which is frozen, changes in a forward"),
        ("return x, torch.ones(LENGTH, 3)", r"no row for each sample: tensor 1 of it has the shape \[5, 3\]"),
        (
            "return x, torch.ones(3, 2)",
            r"no row for each sample: tensor 1 of it has the shape \[3, 2\], of a microbatch",
        ),
        ("return x.repeat(1, int(x.sum() * 100) % 3 + 1, 1)", "has sample shapes that vary: float32"),
        ("raise RuntimeError('no')", "the trial of model.prefix_cache failed in stage 1, layer act.*no"),
    ],
    ids=["draws", "counts", "no rows", "as many as rows", "shapes", "raises"],
)
def test_what_a_users_own_module_does_shows_in_a_trial(body: str, message: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": ("\n\ndef build()", LAYER.replace("BODY", body))}
    shutil.copytree(FOLDER, tmp_path / "own")
    file = tmp_path / "own" / "model.py"
    file.write_text(file.read_text().replace(*changes["model"]).replace(PLAIN_ACT, "act=Own()"))
    sets = ("model.cut=[2, 3]", "data.batch_size=12", "model.trainable=['norm.*', 'join.*']")
    with pytest.raises(StagelineError, match=message):
        estimate(read_plan(tmp_path / "own" / "stageline.toml", sets=sets, environment={}))


AUGMENTED = """type("Augmented", (Rows,), {"batch": lambda self, step: (
        (Rows.batch(self, step)[0] + (step > 3)) % 11, Rows.batch(self, step)[1])})(
        ids[:ROWS], targets[:ROWS], batch_size, seed)"""
LONGER = """type("Longer", (Rows,), {"batch": lambda self, step: (
        Rows.batch(self, step)[0][:, : 5 - (step > 3)], Rows.batch(self, step)[1])})(
        ids[:ROWS], targets[:ROWS], batch_size, seed)"""
UNNUMBERED = """type("Unnumbered", (), {"steps_per_epoch": 4, "held_out": lambda self: None,
        "batch": lambda self, step: (ids[:8], targets[:8])})()"""
WRONG = """type("Wrong", (), {"steps_per_epoch": 4, "held_out": lambda self: None, "samples": lambda self, step: [1, 2],
        "batch": lambda self, step: (ids[:8], targets[:8])})()"""
FEWER = """type("Fewer", (), {"steps_per_epoch": 4, "held_out": lambda self: None,
        "samples": lambda self, step: torch.arange(7), "batch": lambda self, step: (ids[:8], targets[:8])})()"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (AUGMENTED, r"the inputs of sample \d+ differ between two epochs: it is augmented"),
        (
            LONGER,
            r"sample shapes that vary: the inputs of sample \d+ are int64 \[1, 5\] in one epoch and int64 \[1, 4\]",
        ),
        (UNNUMBERED, r'"data.py:batches" returned a source without samples\(step\), which says which samples'),
        (WRONG, r"the data source's samples\(0\) is list; expected numbers from 0 on, int64 \[rows\]"),
        (FEWER, r"samples\(0\) has 7 numbers for 8 rows"),
    ],
    ids=["augmented", "longer", "unnumbered", "no numbers", "fewer"],
)
def test_data_that_give_a_sample_other_inputs_are_refused(data: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StagelineError, match=message):
        _estimate(tmp_path, "model.metrics=[]", data=data)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("model.trainable=['*']",), "prefix_cache = true: the first layer, embed, is trained, so no stage before it"),
        (("model.cut=[6]",), r"stage 0, of layers embed to join, trains layer join; cut there.*model.cut = \[5, ...\]"),
        (("recovery.on_bad_microbatch=skip",), "samples that are left out in the first epoch"),
        (("schedule.accumulate=3", "run.epochs=3"), r"model.prefix_cache = true: an epoch has 4 batches, which are no"),
        (
            ("schedule.accumulate=3", "run.epochs=3", "model.prefix_cache=false", "evaluation.every=epoch"),
            'evaluation.every = "epoch": an epoch has 4 batches, .*; use a number of steps',
        ),
        (
            ("taps.layers=['first', 'act', 'head']",),
            "first, act: in frozen first stages, which model.prefix_cache = true",
        ),
    ],
    ids=["nothing frozen", "cut elsewhere", "skip", "accumulate", "accumulate without", "tapped"],
)
def test_plans_without_a_prefix_that_can_be_kept_are_refused(
    sets: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StagelineError, match=message):
        _estimate(tmp_path, *sets)
