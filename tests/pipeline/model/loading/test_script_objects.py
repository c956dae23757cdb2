"""Objects of a user's script, by the names that a plan has for them."""

from pathlib import Path

import pytest

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.load import code_of, load_function, load_object
from stageline.pipeline.model.object_names import OBJECTS
from support.small_plans import plan


@pytest.fixture
def loss(monkeypatch: pytest.MonkeyPatch):
    def loss(outputs, targets):
        return outputs

    monkeypatch.setitem(OBJECTS, "loss", loss)
    return loss


def test_an_object_of_the_script_is_found_by_its_name(loss) -> None:
    assert load_object("script:loss", Path(), "model.loss") is loss
    assert load_function("script:loss", Path(), "model.loss") is loss


def test_another_process_is_told_whose_objects_they_are() -> None:
    with pytest.raises(ModelRefused, match=r'^model.loss = "script:loss" belongs to a script: .* Run the script again'):
        load_object("script:loss", Path(), "model.loss")


def test_objects_of_a_script_are_in_no_file() -> None:
    of_script = plan(run__epochs=None, data__source="script:batches", model__factory="script:model")
    assert code_of(of_script) == ["torch.nn.functional", "torch.optim"]
