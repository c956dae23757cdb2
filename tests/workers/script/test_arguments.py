"""An argument sets a key of the plan, and what the plan refuses of that key is told of the argument."""

import re
from pathlib import Path

import pytest

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import PlanRefused
from stageline.pipeline.plan.errors import Setting
from stageline.workers.checkpoint.continuable import needs_recut
from stageline.workers.checkpoint.source import CheckpointSource
from stageline.workers.script.arguments import ARGUMENTS, argument_of, in_arguments_words
from support.paths import ROOT
from support.small_plans import plan


def test_what_a_run_was_begun_with_is_told_by_the_names_of_arguments() -> None:
    """It named keys of a plan, and an option of a command."""
    before = {"workers": {"0": {"stages": [0]}, "1": {"stages": [1]}}}
    source = CheckpointSource(Path("runs/line-1"), "line-1", plan(**before).resolved(2))
    now = {"workers": {"0": {"stages": [0, 1]}}, "schedule__name": "gpipe", "optimizer__lr": 0.2}
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(**now, run__seed=7).resolved(2), source)
    assert str(refused.value).endswith(
        "run line-1 was begun with other arguments: optimizer.lr: 0.2 here, 0.1 there; seed: 7 here, 0 there (here: "
        "these, there: the run's). Call Line.resume with the arguments that it began with, but for cut, stages, "
        "placement, "
        "stage.N.tensor, stage.N.styles, stage.N.shard, schedule, window, schedule.times, schedule.rows, "
        "recovery.snapshot_every, taps, or begin another run with Line(...) [SL101]"
    )
    tied = CheckpointSource(Path("runs/line-1"), "line-1", plan(schedule__tied="step").resolved(2))
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(model__cut=[3], schedule__tied="step").resolved(2), tied)
    assert "these arguments cut the model in another way: cut: [3] here, [5] there" in str(refused.value)
    coded = CheckpointSource(Path("runs/line-1"), "line-1", plan(queues__codec="int8").resolved(2))
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(model__cut=[3], queues__codec="int8").resolved(2), coded)
    assert ' = "int8", and these arguments cut the model in another way: cut: [3]' in str(refused.value)


def test_another_number_of_microbatches_is_told_once() -> None:
    """A scripted plan has it as the size of a batch, too."""
    scripted = {"run__epochs": None, "data__source": "script:batches"}
    before = plan(**scripted, schedule__microbatches=2, data__batch_size=2)
    source = CheckpointSource(Path("runs/line-1"), "line-1", before.resolved(2))
    with pytest.raises(PlanRefused) as refused, in_arguments_words():
        needs_recut(plan(**scripted, schedule__microbatches=4, data__batch_size=4).resolved(2), source)
    assert "was begun with other arguments: microbatches: 4 here, 2 there (here" in str(refused.value)


def test_each_argument_that_sets_a_key_is_the_name_of_that_key() -> None:
    for name, row in ARGUMENTS.items():
        assert {argument_of(key) for key in (row.key, *row.further, *row.told) if key} <= {name}
    assert argument_of("workers.3.threads") == "threads"
    assert argument_of("recovery.lease") == "recovery.lease"


def test_a_way_out_is_told_as_python_has_it() -> None:
    with pytest.raises(ModelRefused) as refused, in_arguments_words():
        raise ModelRefused("pass ", Setting("model.accept_difference", value=True), ", or leave it")
    assert str(refused.value) == "pass accept_difference = True, or leave it [SL201]"


def test_docs_name_the_key_of_each_argument() -> None:
    page = (ROOT / "docs" / "reference" / "api-line.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", page, re.MULTILINE)).items() >= {
        (name, row.key) for name, row in ARGUMENTS.items() if row.key
    }
