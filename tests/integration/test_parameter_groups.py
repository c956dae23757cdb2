"""Settings of the optimizer for parameters by their names: as a plain loop with the same groups, to the bit."""

from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import Line, ModelRefused, PlanRefused
from stageline.pipeline.plan import read_plan
from support import reference
from support.paths import EXAMPLES
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.whole_models import WHOLE_MODELS
from support.workspace import Workspace

STEPS, MICROBATCHES, ROWS = 4, 2, 6
ADAM = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
GROUPS = [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}, {"match": "*.weight", "lr": 0.01, "betas": (0.8, 0.9)}]
TIED = Path(reference.__file__).parent / "tied"

pytestmark = pytest.mark.usefixtures("one_thread")


def grouped_adam(model: nn.Module, *others: str) -> torch.optim.Optimizer:
    """As one writes it in plain torch."""
    plain, second, rest = [], [], []
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in (*GROUPS[0]["match"], *others)):
            plain.append(parameter)
        elif name.endswith(".weight"):
            second.append(parameter)
        else:
            rest.append(parameter)
    return ADAM(
        [{"params": plain, "weight_decay": 0.0}, {"params": second, "lr": 0.01, "betas": (0.8, 0.9)}, {"params": rest}]
    )


def _line(name: str, **options: Any) -> Line:
    small = SMALL_MODELS[name]
    given = {"loss": small.loss, "optimizer": ADAM, "cut": small.cut, "groups": GROUPS, "workers": "inline"}
    return Line(small.build(), microbatches=MICROBATCHES, **{**given, **options})


def _batches(name: str) -> list[tuple[Tensor, Tensor]]:
    return [SMALL_MODELS[name].batch(number, ROWS) for number in range(STEPS)]


@pytest.mark.parametrize("workers", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_lines_groups_are_those_of_the_plain_loop(name: str, workers: str, workspace: Workspace) -> None:
    small, model = SMALL_MODELS[name], SMALL_MODELS[name].build()
    plain = PlainLoop(model, small.loss, grouped_adam(model), MICROBATCHES).train(_batches(name))
    with _line(name, workers=workers, folder=workspace.folder) as line:
        losses = [line.step(*batch).item() for batch in _batches(name)]
    assert losses == plain.losses
    assert not differing(line.state_dict(), plain.state())
    ungrouped = small.build()
    without = PlainLoop(ungrouped, small.loss, ADAM(ungrouped.parameters()), MICROBATCHES).train(_batches(name))
    assert differing(without.state(), plain.state())


def test_a_parameter_that_stages_share_is_in_the_group_of_its_first_name() -> None:
    """The head's copy is called 5.weight in its stage, which the pattern does not match."""
    recipe = reference.recipe(TIED, steps=STEPS)
    model = recipe.build()
    optimizer = ADAM([{"params": [model[0].weight], "lr": 0.3}, {"params": list(model.parameters())[1:]}])
    batches = [recipe.batch(step) for step in range(STEPS)]
    given = {"loss": recipe.loss, "optimizer": ADAM, "cut": [1, 3, 5], "microbatches": 4, "workers": "inline"}
    torch.manual_seed(0)
    with Line(recipe.build, groups=[{"match": ["0.*"], "lr": 0.3}], **given) as line:
        model.load_state_dict(line.state_dict())
        plain = PlainLoop(model, recipe.loss, optimizer, 4).train(batches)
        for batch in batches:
            line.step(*batch)
    assert not differing(line.state_dict(), plain.state())


@pytest.mark.slow
def test_other_stages_go_on_with_the_groups(workspace: Workspace) -> None:
    small, model = SMALL_MODELS["transformer"], SMALL_MODELS["transformer"].build()
    plain = PlainLoop(model, small.loss, grouped_adam(model), MICROBATCHES).train(_batches("transformer"))
    options = {"workers": "processes", "folder": workspace.folder / "runs"}
    with _line("transformer", **options) as line:
        for batch in _batches("transformer")[:2]:
            line.step(*batch)
        line.save(workspace.folder / "saved")
    with _line("transformer", cut=[2], resume=workspace.folder / "saved", **options) as line:
        for batch in _batches("transformer")[2:]:
            line.step(*batch)
    assert not differing(line.state_dict(), plain.state())


def test_names_are_those_of_a_known_familys_model() -> None:
    whole = WHOLE_MODELS["resnet18"]
    with pytest.raises(PlanRefused, match=r'"\*.biass" of group 0. Parameters have names such as .*bias'):
        Line(
            whole.build(),
            loss=nn.functional.cross_entropy,
            optimizer=ADAM,
            groups=[{"match": "*.biass", "lr": 1.0}],
            workers="inline",
        )


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([], "a list of tables such as"),
        ({"match": "*"}, r"expected a list of tables such as .*, got a table"),
        ([{"weight_decay": 0.0}], "group 0 requires match, patterns of parameter names"),
        ([{"match": ["*.bias"]}], "group 0 requires settings of the optimizer"),
        ([{"match": ["*.bias"], "lr": 1.0}, 3], "group 1 is a whole number"),
        (
            [{"match": ["*.none"], "lr": 1.0}],
            r'no parameter of the model matches "\*.none" of group 0. Parameters have names such as ',
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: Any, said: str) -> None:
    with pytest.raises(PlanRefused, match=rf"^groups = .*{said}"):
        _line("transformer", groups=groups)


def test_a_setting_that_the_optimizer_does_not_know_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"group 0 sets weight_decays, which AdamW does not know; it has lr, betas"):
        _line("transformer", groups=[{"match": ["*.bias"], "weight_decays": 0.0}])


class Prodigy(torch.optim.SGD):
    """Called as one that computes a step size of all parameters."""


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS needs a closure, which computes the loss again: no stage can"),
        (Prodigy, "Prodigy computes with all parameters at once, and each stage has its own"),
    ],
)
def test_an_optimizer_that_no_stage_can_have_is_refused_by_name(optimizer: Any, reason: str) -> None:
    with pytest.raises(ModelRefused, match=f"the optimizer {reason}.* such as torch.optim.AdamW"):
        _line("transformer", optimizer=optimizer, groups=None)


def test_a_plan_refuses_them_with_78(workspace: Workspace, capsys: Any) -> None:
    plan = workspace.folder / "mlp" / "stageline.toml"
    plan.parent.mkdir()
    for file in (EXAMPLES / "mlp").iterdir():
        if file.is_file():
            (plan.parent / file.name).write_bytes(file.read_bytes())
    text = plan.read_text().replace("lr = 0.5\n", 'lr = 0.5\n\n[[optimizer.groups]]\nmatch = ["*.none"]\nlr = 0.1\n')
    plan.write_text(text)
    line = text.splitlines().index("[[optimizer.groups]]") + 1
    assert read_plan(plan).optimizer.groups == ({"match": ["*.none"], "lr": 0.1},)
    assert workspace.here("plan", str(plan)) == 78
    assert 'no parameter of the model matches "*.none" of group 0' in (said := capsys.readouterr().err)
    plan.write_text(text.replace('match = ["*.none"]\n', ""))
    assert workspace.here("plan", str(plan)) == 78
    assert f"stageline.toml:{line}: optimizer.groups" in capsys.readouterr().err
    assert "group 0 requires match" not in said
    assert workspace.here("plan", str(EXAMPLES / "mlp"), "--set", "optimizer.factory=torch.optim.LBFGS") == 78
    assert "the optimizer LBFGS needs a closure" in capsys.readouterr().err
