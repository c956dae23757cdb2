"""Wrong arguments of a line are refused when the line is made, before a process is started."""

from functools import partial

import pytest
import torch
from torch import nn

from stageline import Line, ModelRefused, PlanRefused

GOOD = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"optimizer": 3},
            "optimizer = 3 is of type int, which cannot be called; expected a function of a stage",
        ),
        ({"loss": "mse"}, "loss = 'mse' is of type str, which cannot be called"),
        ({"metrics": [max, None]}, r"metrics\[1\] = None is of type NoneType, which cannot be called"),
        ({"lr_scheduler": 0.5}, "lr_scheduler = 0.5 is of type float, which cannot be called"),
        ({"loss": nn.L1Loss}, r"loss = L1Loss is a class; .*such as an object of it: L1Loss\(\)"),
        ({"metrics": [nn.L1Loss]}, r"metrics\[0\] = L1Loss is a class"),
        ({"loss": nn.L1Loss(reduction="sum")}, r'loss has reduction = "sum": .* Use reduction = "mean"'),
        ({"loss": partial(nn.functional.l1_loss, reduction="sum")}, r'loss has reduction = "sum"'),
        ({"device": "gpu"}, 'device = "gpu": torch knows no such device; expected'),
        ({"device": "meta"}, 'device = "meta": its tensors have no values'),
        ({"stages": 2}, r"cut = \[1\] and stages = 2 are two ways to say the same.* Leave out one"),
        ({"settings": {"queues.url": "memory://"}}, 'queues in memory do not reach .* or pass workers="inline"'),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_work_is_refused_with_its_argument_its_value_and_the_way_out(tmp_path, wrong, told):
    with pytest.raises(ModelRefused, match=told):
        Line(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **{"cut": [1], **GOOD, **wrong}, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_text_for_the_model_is_refused_before_it_is_called(tmp_path):
    """Python's own error was "'str' object is not callable"."""
    with pytest.raises(ModelRefused, match=r"^model = 'model.py:build': expected a torch module, Layers, a list"):
        Line("model.py:build", **GOOD, folder=tmp_path)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs == targets).float().mean()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cut": 4}, "cut = 4: expected a list of layers' numbers or names, such as [4]"),
        ({"cut": [4.0]}, "cut = [4.0]: expected a list of layers' numbers or names, such as [4]"),
        ({"cut": "auto"}, "cut = 'auto': expected a list of layers' numbers or names"),
        ({"cut": [True]}, "cut = [True]: expected a list"),
        ({"cut": []}, "cut = []: expected a list"),
        ({"cut": [9]}, "cut = [9]: 9 is out of range"),
        ({"cut": None, "stages": "2"}, "stages = '2': expected a whole number of at least 1"),
        ({"cut": None, "stages": 9}, "stages = 9, but the model has 2 layers"),
        ({"placement": [0, 1]}, "placement = [0, 1]: expected a list with the stages of each worker"),
        ({"window": 3}, "window = 3: expected a list"),
        ({"seed": "x"}, "seed = 'x': expected a whole number of at least 0"),
        ({"seed": 1 << 64}, "seed = 18446744073709551616: expected a whole number"),
        ({"metrics": accuracy}, "metrics = accuracy: expected a list of functions of (outputs, targets), such as ["),
        ({"settings": 3}, "settings is of type int: expected a dict of a plan's keys"),
        ({"settings": {"recovery": {"lease": 3}}}, "settings['recovery'] is of type dict: expected single keys"),
        ({"settings": {3: 4}}, "settings: the key 3 is of type int: expected a plan's keys"),
        ({"broker": 3}, "broker = 3: expected an address such as"),
        ({"folder": None}, "folder = None: expected the path of a folder"),
        ({"folder": ""}, "folder = '': expected the path of a folder"),
        ({"lr_every": 1.5}, 'lr_every = 1.5: expected "epoch", "evaluation" or a number of steps of at least 1'),
        ({"progress": "no"}, "progress = 'no': expected True, False or None"),
        ({"resume": 3}, "resume = 3: expected the folder of a run"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_value_of_another_kind_is_refused_with_its_argument_and_what_is_expected(tmp_path, wrong, told):
    """The error that Python raised somewhere below did not name the argument."""
    with pytest.raises(ModelRefused) as refused:
        Line(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **{"cut": [1], **GOOD, "folder": tmp_path, **wrong})
    assert str(refused.value).startswith(told)
    assert not list(tmp_path.iterdir())


WHOLE = "expected a whole number from 1 to 1024"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"microbatches": 0}, ["microbatches = 0: expected a whole number from 1 to 65536"]),
        ({"microbatches": "4"}, ['microbatches = "4": expected a whole number from 1 to 65536, got text']),
        ({"threads": 0}, [f"threads = 0: {WHOLE}"]),
        ({"name": "a/b"}, ['name = "a/b": expected a name of letters, digits and - _ .']),
        (
            {"window": [1, 1]},
            ['window = [1, 1]: schedule = "1f1b" does not use it; use schedule = "window", or leave it out'],
        ),
        (
            {"settings": {"recovery.leese": "30s"}},
            ['settings: recovery.leese: there is no such key; did you mean "lease"'],
        ),
        ({"settings": {"workers.0.threads": 0}}, [f"settings: workers.0.threads = 0: {WHOLE}"]),
        (
            {"placement": [[0], [0]]},
            [
                "placement: stage 0 is owned by worker 0 and worker 1; give it to exactly one worker",
                "placement: stage 1 is owned by no worker; give it to exactly one worker",
            ],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_plan_refuses_is_said_of_the_argument(tmp_path, wrong, told):
    """It named the keys of a plan file, which a script does not have."""
    with pytest.raises(PlanRefused) as refused:
        Line(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **{"cut": [1], **GOOD, **wrong}, folder=tmp_path)
    lines = str(refused.value).splitlines()
    assert len(lines) == len(told)
    assert all(line.startswith(each) for line, each in zip(lines, told, strict=True)), lines
    assert not list(tmp_path.iterdir())


def test_a_device_that_a_process_cannot_use_is_no_bug_of_stageline():
    """Whether there is a GPU is known in the worker alone: asking for one in the script would spoil its forks."""
    from stageline.pipeline.model.plan_stage import _demand_device

    with pytest.raises(ModelRefused, match=r'device = "cuda:99" of stage 1 cannot be used in this process: .*'):
        _demand_device("cuda:99", 1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"optimizer": lambda parameters: None}, "^optimizer returned an object of type NoneType without step"),
        ({"optimizer": partial(torch.optim.SGD, rate=3)}, "^optimizer: TypeError: .*'rate'"),
        ({"lr_scheduler": lambda optimizer: None}, "^lr_scheduler returned an object of type NoneType without step"),
    ],
    ids=["optimizer", "its option", "lr_scheduler"],
)
def test_a_function_that_makes_no_optimizer_or_scheduler_is_refused_by_the_name_of_its_argument(wrong, told):
    """Without processes, a scheduler that was None was no scheduler, without a word."""
    with pytest.raises(ModelRefused, match=told):
        Line(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **{"cut": [1], **GOOD, **wrong}, workers="inline")
