"""What a line's arguments tell by themselves is refused when the line is made, before a process is started."""

import pytest
import torch
from torch import nn

from stageline import Line, ModelRefused

GOOD = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"optimizer": 3},
            "optimizer = 3 is an int, which cannot be called; wanted is a function of a stage",
        ),
        ({"loss": "mse"}, "loss = 'mse' is a str, which cannot be called"),
        ({"metrics": [max, None]}, r"metrics\[1\] = None is a NoneType, which cannot be called"),
        ({"lr_scheduler": 0.5}, "lr_scheduler = 0.5 is a float, which cannot be called"),
        ({"device": "gpu"}, 'device = "gpu": torch knows no such device; wanted is'),
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


def test_a_device_that_a_process_cannot_use_is_no_bug_of_stageline():
    """Whether there is a GPU is known in the worker alone: asking for one in the script would spoil its forks."""
    from stageline.pipeline.model.cut import _demand_device

    with pytest.raises(ModelRefused, match=r'device = "cuda:99" of stage 1 cannot be used in this process: .*'):
        _demand_device("cuda:99", 1)
