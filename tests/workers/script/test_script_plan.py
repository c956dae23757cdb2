"""A script's arguments as a plan."""

from functools import partial
from pathlib import Path

import pytest
import torch

from stageline.workers.runtime.job import ScriptJob
from stageline.workers.script.arguments import LineOptions
from stageline.workers.script.begin import plan_of, registered
from stageline.workers.script.names import remote_plan


@pytest.mark.parametrize("value", [False, "false"])
def test_a_setting_may_be_pythons_false_or_the_plans(value: object) -> None:
    options = LineOptions(loss=len, optimizer=len, cut=[1], settings={"data.check": value})  # type: ignore[arg-type]
    assert plan_of(options, 2).data.check is False


def test_metrics_have_the_same_names_wherever_the_workers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_metrics", "second_metrics"):
        (tmp_path / f"{name}.py").write_text("def accuracy(outputs, targets): ...\ndef build(): ...\n")
    first, second = __import__("first_metrics"), __import__("second_metrics")
    given = [first.accuracy, second.accuracy, partial(first.accuracy), torch.nn.functional.l1_loss]
    options = LineOptions(
        loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, metrics=given, cut=[1], microbatches=2
    )
    remote = remote_plan(first.build, options, "tcp://0.0.0.0:7000")
    names = []
    for tables in ({}, remote.tables):
        plan = plan_of(options, 2, tables)
        with registered(first.build, options):
            names.append(list(ScriptJob(plan, (), None, (), None, None).metrics))  # type: ignore[arg-type]
    assert names == [["accuracy_0", "accuracy_1", "accuracy_2", "l1_loss"]] * 2
    assert names[0] == list(options.named_metrics)  # as inline
