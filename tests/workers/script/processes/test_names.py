"""Names of a script's objects for other machines, and objects without such a name."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import ModelRefused
from stageline.workers.script.names import code_of_names, named

MODULE = """
import helpers_of_{0}

def build(width=4): ...
class Net: ...
from os import system
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user, which imports another."""
    monkeypatch.syspath_prepend(tmp_path)
    name = "user_of_test_named"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name))
    (tmp_path / f"helpers_of_{name}.py").write_text("")
    yield __import__(name)
    for each in (name, f"helpers_of_{name}"):
        sys.modules.pop(each, None)


def test_functions_and_partials_become_names_and_options(module: Any) -> None:
    assert named("model", module.build).table == {"factory": "user_of_test_named.build"}
    wide = partial(module.build, width=8)
    assert named("model", wide).table == {"factory": "user_of_test_named.build", "width": 8}
    adam = named("optimizer", partial(partial(torch.optim.AdamW, lr=0.1), betas=(0.9, 0.99)))
    assert adam.table == {"factory": "torch.optim.AdamW", "lr": 0.1, "betas": (0.9, 0.99)}
    assert named("loss", nn.functional.mse_loss, factory=False).reference == "torch.nn.functional.mse_loss"


def test_the_files_are_those_of_the_modules_and_of_what_they_import(module: Any) -> None:
    code = code_of_names([named("model", module.build), named("optimizer", torch.optim.SGD)])
    assert sorted(code.files) == ["helpers_of_user_of_test_named.py", "user_of_test_named.py"]
    assert code.torch == torch.__version__


def closure() -> Callable[[], None]:
    def build() -> None: ...

    return build


def in_the_script() -> None: ...


in_the_script.__module__ = "__main__"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (nn.Sequential(), "a model object, here an object of Sequential, cannot be sent; give the function that makes"),
        ([nn.Linear(1, 1)], "a model object, here an object of list, cannot be sent"),
        (closure(), "defined inside a function"),
        (lambda: None, "a lambda has no name"),
        (nn.Linear(1, 1).state_dict, "a method of an object"),
        (in_the_script, "defined in the script itself"),
        (partial(torch.optim.SGD, lr=torch.tensor(0.1)), "the argument lr of its partial is a Tensor"),
        (partial(torch.optim.SGD, []), "arguments without names"),
        (torch.load, "installed package"),
    ],
)
def test_what_other_machines_could_not_import_is_refused_with_the_way_out(value: object, why: str) -> None:
    with pytest.raises(ModelRefused) as refused:
        named("optimizer", value)
    assert str(refused.value).startswith("optimizer (")
    assert why in str(refused.value)
    assert "such as model.py" in str(refused.value)


def test_a_loss_is_a_function_without_arguments_of_a_partial(module: Any) -> None:
    with pytest.raises(ModelRefused, match="it is a class; expected a function of"):
        named("loss", module.Net, factory=False)
    with pytest.raises(ModelRefused, match=r"an object of CrossEntropyLoss .* such as nn.functional.cross_entropy"):
        named("loss", nn.CrossEntropyLoss(), factory=False)
    with pytest.raises(ModelRefused, match=r"an object of MSELoss .* such as nn.functional.mse_loss"):
        named("loss", nn.MSELoss(), factory=False)
    with pytest.raises(ModelRefused, match="arguments, which cannot be sent"):
        named("loss", partial(nn.functional.cross_entropy, label_smoothing=0.1), factory=False)


def test_a_tuple_for_a_users_function_would_arrive_as_a_list(module: Any) -> None:
    with pytest.raises(ModelRefused, match="width of its partial is a tuple"):
        named("model", partial(module.build, width=(1, 2)))
