"""A model can be made without memory for its parameters; what could then not be right is refused."""

from threading import Thread

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import make_segments
from stageline.pipeline.model.stage_weights import made_without_memory


class Kept(nn.Module):
    """Has a parameter, and a buffer that `keep` makes of it."""

    def __init__(self, keep, *, persistent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", keep(self.weight), persistent=persistent)


def made(keep, **options) -> None:
    make_segments(lambda: nn.Sequential(nn.Linear(3, 3), Kept(keep, **options)), 0, [1], stored=True)


def test_a_parameter_that_two_modules_get_stays_one():
    def make():
        shared = nn.Parameter(torch.randn(3, 3))
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        first.weight = second.weight = shared
        return first, second

    (first, second), again = made_without_memory(make, 0)
    assert first.weight is second.weight
    assert first.weight.is_meta
    assert again is not None  # it draws


def test_a_model_that_draws_nothing_is_made_once():
    assert made_without_memory(lambda: nn.Linear(3, 3), 0)[1] is None


def test_modules_of_other_threads_are_as_ever():
    found = []

    def make():
        other = Thread(target=lambda: found.append(nn.Linear(3, 3)))
        other.start()
        other.join()
        return nn.Linear(3, 3)

    assert made_without_memory(make, 0)[0].weight.is_meta
    assert not found[0].weight.is_meta
    assert not nn.Linear(3, 3).weight.is_meta


def test_a_buffer_that_follows_from_parameters_must_be_in_the_file():
    with pytest.raises(ModelRefused, match=r"1.kept is computed from parameters .* register it as a persistent buffer"):
        made(lambda weight: weight.detach() * 2)
    made(lambda weight: weight.detach() * 2, persistent=True)


def test_a_buffer_that_is_drawn_must_be_in_the_file():
    with pytest.raises(ModelRefused, match=r"1.kept is drawn at random .* register it as a persistent buffer"):
        made(lambda weight: torch.randn(3))
    made(lambda weight: torch.randn(3), persistent=True)
    made(lambda weight: torch.full((3,), float("nan")) + 0 * torch.randn(3))
