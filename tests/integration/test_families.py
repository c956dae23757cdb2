"""Models of known families train as plain `model(**inputs)` does, to the bit, wherever they are cut."""

import pytest
import torch

from stageline import Line
from support.shapes import looped
from support.whole_models import ADAM, WHOLE_MODELS, mean_loss, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_a_model_of_a_family_trains_as_it_does_unsplit(name) -> None:
    whole = WHOLE_MODELS[name]
    steps, microbatches = 2, 4
    state, losses = train_whole(whole, steps, microbatches)
    for stages, cuts in whole.cuts.items():
        for cut in cuts:
            interleaved = [("interleaved-1f1b", looped(2, stages // 2))] if stages % 2 == 0 else []
            for schedule, placement in [("1f1b", None), *interleaved]:
                model = whole.made()
                with Line(model, cut=cut, placement=placement, schedule=schedule, loss=mean_loss, optimizer=ADAM, microbatches=microbatches, workers="inline") as line:
                    found = [line.step(x, y).item() for x, y in whole.batches(steps)]
                assert found == losses
                assert line.state_dict().keys() == state.keys()
                assert all(torch.equal(line.state_dict()[name], value) for name, value in state.items())
