"""Code that runs only when a container itself is called is refused by name where its layers are called one by one."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.utils.flop_counter import FlopCounterMode

from stageline import Layer, Layers, Line, ModelRefused, Stage
from support.resnet import resnet18
from support.whole_models import gpt2

Change = Callable[[Any], object]


def double(*given: Any) -> Any:
    """Changes what a forward returns or a backward is given, as a hook of either kind."""
    found = given[-1]
    return tuple(2 * each for each in found) if isinstance(found, tuple) else 2 * found if len(given) == 3 else found


def renamed(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
    state["other"] = state.pop(next(iter(state)))


class OwnCall(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Backwards(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return reversed(list(super().__iter__()))


class Extra(nn.Sequential):
    def get_extra_state(self) -> Tensor:
        return torch.ones(1)


class Stripped(nn.Sequential):
    def state_dict(self, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {f"net.{name}": each for name, each in super().state_dict(**options).items()}


HOOKS: dict[str, Change] = {
    "forward hook double": lambda model: model.register_forward_hook(double),
    "forward pre-hook double": lambda model: model.register_forward_pre_hook(double),
    "backward hook double": lambda model: model.register_full_backward_hook(double),
    "backward pre-hook double": lambda model: model.register_full_backward_pre_hook(double),
    "state_dict hook renamed": lambda model: model._register_state_dict_hook(renamed),
    "compile()": lambda model: model.compile(),
}


def layers() -> list[nn.Module]:
    return [nn.Linear(2, 2), nn.Linear(2, 2)]


def line_of(model: Any, cut: Any = (1,), schedule: str = "1f1b") -> Line:
    return Line(
        model,
        cut=list(cut),
        schedule=schedule,
        loss=functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        workers="inline",
    )


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_the_container_is_refused_by_name(name: str) -> None:
    model = nn.Sequential(*layers())
    line_of(model).close()
    HOOKS[name](model)
    for refused in (lambda: line_of(model), lambda: Stage(model)):
        with pytest.raises(ModelRefused, match=f"the {re.escape(name)} of the model itself would"):
            refused()


def test_a_forward_of_its_own_and_a_class_that_computes_otherwise_are_refused() -> None:
    patched = nn.Sequential(*layers())
    patched.forward = MethodType(lambda self, x: x, patched)  # type: ignore[method-assign]
    for model, named in (
        (patched, "the forward of its own"),
        (OwnCall(*layers()), "the __call__ of OwnCall"),
        (Backwards(*layers()), "the __iter__ of Backwards"),
        (Stripped(*layers()), "the state_dict of Stripped"),
        (Extra(*layers()), "the get_extra_state of Extra"),
    ):
        with pytest.raises(ModelRefused, match=named):
            line_of(model)


def test_hooks_of_load_state_dict_are_accepted_and_called_with_what_a_line_has_trained() -> None:
    model, called = nn.Sequential(*layers()), []
    model.register_load_state_dict_pre_hook(lambda *_: called.append("pre-hook"))
    model.register_load_state_dict_post_hook(lambda *_: called.append("post-hook"))
    with line_of(model) as line:
        model.load_state_dict(line.state_dict())
    assert called == ["pre-hook", "post-hook"]


def test_a_counter_of_operations_around_a_line_is_refused_with_a_way_out() -> None:
    model = nn.Sequential(*layers())
    with (
        FlopCounterMode(display=False),
        pytest.raises(ModelRefused, match=r"of all modules .*outside of the `with`.*FlopCounterMode"),
    ):
        line_of(model)
    with line_of(model) as line, FlopCounterMode(display=False):
        line.step(torch.ones(4, 2), torch.ones(4, 2))


def test_a_stage_of_one_model_with_a_forward_of_its_own_is_refused_with_the_way_to_call_it_whole() -> None:
    with pytest.raises(ModelRefused, match=re.escape("Stage([model])")):
        Stage(OwnCall(*layers()))
    assert Stage([OwnCall(*layers())]).names == ("0",)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_of_all_modules_is_refused(kind: str) -> None:
    with (
        getattr(modules, f"register_module_{kind}")(double),
        pytest.raises(ModelRefused, match="double of all modules"),
    ):
        line_of(nn.Sequential(*layers()))
    line_of(nn.Sequential(*layers())).close()


@pytest.mark.parametrize("path", ["", "transformer", "transformer.h"])
def test_a_hook_of_a_module_that_a_familys_layers_do_not_call_is_refused(path: str) -> None:
    model = gpt2()
    line_of(model, ["transformer.h.2"]).close()
    model.get_submodule(path).register_full_backward_hook(double)
    with pytest.raises(ModelRefused, match=f"the backward hook double of {path or 'the model itself'} would"):
        line_of(model, ["transformer.h.2"])


def test_a_group_of_a_resnet_with_a_hook_or_a_forward_of_its_own_is_refused() -> None:
    model = resnet18(4, 3)
    model.layer2.register_forward_hook(double)
    with pytest.raises(ModelRefused, match="the forward hook double of layer2"):
        line_of(model, ["layer3"])
    model = resnet18(4, 3)
    model.layer2.forward = lambda x: x
    with pytest.raises(ModelRefused, match="layer2 is of type Sequential, whose forward"):
        line_of(model, ["layer3"])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.act = nn.Sequential(*layers()), nn.Linear(2, 2), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.body(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ["", "body", "act"])
def test_a_hook_of_a_module_that_no_layer_has_is_refused(path: str) -> None:
    listed = Layers(model := Two(), [Layer("body.0"), Layer("body.1", lambda x, one: one(x).tanh()), Layer("head")])
    line_of(listed).close()
    model.get_submodule(path).register_forward_hook(double)
    with pytest.raises(ModelRefused, match=f"the forward hook double of {path or 'the model itself'}"):
        line_of(listed)


@pytest.mark.parametrize("split", [False, True])
def test_hooks_of_layers_and_of_modules_in_them_are_called_as_in_the_unsplit_model(split: bool) -> None:
    """Containers within a layer are called as ever, and so is each module of a list of ready stages."""

    def made() -> nn.Sequential:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Sequential(*layers()), nn.Sequential(*layers()))
        for name in filter(lambda name: name.endswith("hook double"), HOOKS):
            HOOKS[name](model["backward" in name])
        return model

    x, y = torch.randn(4, 2), torch.randn(4, 2)
    plain = made()
    functional.mse_loss(plain(x), y).backward()
    schedule = "zb-h1" if split else "1f1b"
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with Line(
        made(),
        cut=[1],
        microbatches=1,  # as the model computes the batch here
        schedule=schedule,
        loss=functional.mse_loss,
        optimizer=optimizer,
        workers="inline",
    ) as line:
        line.step(x, y)
    optimizer(plain.parameters()).step()
    trained = line.state_dict()
    assert all(torch.equal(trained[key], value) for key, value in plain.state_dict().items())
