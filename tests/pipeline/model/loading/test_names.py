"""By which names objects are found elsewhere."""

import sys

import pytest
import torch
from torch import nn

from stageline.pipeline.model.object_names import defines, is_torch_name, torch_name


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.optim.SGD, "torch.optim.SGD"),
        (torch.optim.lr_scheduler.StepLR, "torch.optim.lr_scheduler.StepLR"),
        (nn.functional.cross_entropy, "torch.nn.functional.cross_entropy"),
        (torch.load, None),
        (nn.ReLU(), None),
        (print, None),
    ],
)
def test_what_torch_documents_has_that_name(value: object, name: str | None) -> None:
    assert torch_name(value) == name


@pytest.mark.parametrize(
    "name", ["os.system", "torch.load", "torch.hub.load", "torch.nn.functional.warnings", "torch.optim._functional"]
)
def test_nothing_else_of_torch_is_named(name: str) -> None:
    assert not is_torch_name(name)


def test_what_a_module_imports_is_not_its_own() -> None:
    here = sys.modules[__name__]
    assert defines(here, "test_what_a_module_imports_is_not_its_own")
    assert not defines(here, "defines")
    assert not defines(here, "sys")
