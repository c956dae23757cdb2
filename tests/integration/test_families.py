"""Models that are no nn.Sequential train as plain `model(**inputs)` does, to the bit, wherever they are cut."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from stageline import Line
from stageline.pipeline.schedule import Placement
from support.shapes import looped
from support.whole_models import ADAM, WHOLE_MODELS, mean_loss, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MICROBATCHES = 2, 4
PLACEMENTS = {2: looped(1, 2), 3: looped(1, 3), 4: looped(2, 2)}  # for interleaving
WITHOUT_TRANSFORMERS = ("resnet18", "u-net")  # which takes seconds to import


@cache
def reference(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    return train_whole(WHOLE_MODELS[name], STEPS, MICROBATCHES)


def cases() -> Iterator[Any]:
    for name, whole in WHOLE_MODELS.items():
        for stages, cuts in whole.cuts.items():
            for cut in cuts:
                for schedule, placement in (("1f1b", None), ("interleaved-1f1b", PLACEMENTS[stages])):
                    deciding = stages == 4 and placement and name in WITHOUT_TRANSFORMERS
                    marks = () if deciding else pytest.mark.slow
                    yield pytest.param(name, cut, schedule, placement, marks=marks, id=f"{name}-{cut}-{schedule}")


@pytest.mark.parametrize(("name", "cut", "schedule", "placement"), list(cases()))
def test_a_model_trains_as_it_does_unsplit(
    name: str, cut: list[int | str], schedule: str, placement: Placement | None
) -> None:
    whole, (state, losses) = WHOLE_MODELS[name], reference(name)
    with Line(
        whole.layers(whole.made()),
        cut=cut,
        placement=placement,
        schedule=schedule,
        loss=mean_loss,
        optimizer=ADAM,
        microbatches=MICROBATCHES,
        workers="inline",
    ) as line:
        found = [line.step(x, y).item() for x, y in whole.batches(STEPS)]
    trained = line.state_dict()
    assert found == losses
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[key], value) for key, value in state.items())


def test_dropout_moves_the_bits_of_the_reference() -> None:
    """So layers that were seeded otherwise would not give them."""
    state, _ = train_whole(WHOLE_MODELS["u-net"], STEPS, MICROBATCHES, seed=1)
    assert not all(torch.equal(reference("u-net")[0][key], value) for key, value in state.items())
