"""A script's own random numbers do not depend on what the layers draw."""

import pytest
import torch

from stageline.pipeline.stage.layers.passage import generators_kept

CPU = torch.device("cpu")


def test_what_is_drawn_afterwards_is_what_would_have_been_drawn():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    with generators_kept(CPU):
        torch.default_generator.manual_seed(9)
        torch.rand(2)
    assert torch.equal(torch.rand(4), wanted)


def test_an_exception_within_changes_that_as_little():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError), generators_kept(CPU):
        torch.rand(2) @ torch.rand(3)
    assert torch.equal(torch.rand(4), wanted)
