"""A user's features give the same bits however the model is cut, over every transport, and whatever is killed."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stageline import ComputeFailed, Feature, FeatureRefused, Line, ModelRefused, PlanRefused
from stageline.pipeline.plan import PlanError
from support import reference
from support.fork_server import ForkServer
from support.pages import named_files
from support.paths import DOCS
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.workspace import Workspace, free_port, wait_for

TIED = Path(reference.__file__).parent / "tied"
NOISE = named_files(DOCS / "guides/features.md")["noise.py"]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
STEPS, MICROBATCHES = 6, 2
NAMED = 'features=["noise.py:GradientNoise"]'

DRIFT = """
import torch
from stageline import Feature

class Drift(Feature):
    # Adds to each gradient the sum of all that came before: its state.

    def __init__(self):
        self.sums = {}

    def around(self, stage, kind, compute):
        sums = self.sums.setdefault(stage.index, {})

        def update(operation, received):
            for name, parameter in stage.trainable().items():
                sums[name] = parameter.grad + sums.get(name, 0.0)
                parameter.grad = sums[name] * 0.5
            return compute(operation, received)

        return update if kind == "U" else compute

    def state(self, stage):
        return {name: each.clone() for name, each in self.sums[stage.index].items()}

    def restore(self, stage, state):
        self.sums[stage.index].update(state)
"""

pytestmark = pytest.mark.usefixtures("one_thread")


def _noise() -> Any:
    names: dict[str, Any] = {"__name__": "noise"}
    exec(compile(NOISE, "noise.py", "exec", dont_inherit=True), names)  # noqa: S102  # our own page
    return names["GradientNoise"]()


def _with_noise(optimizer: torch.optim.Optimizer, model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """Adds the page's noise to the gradients of a whole model."""
    feature, steps = _noise(), iter(range(1000))

    def add(*_: object) -> None:
        step = next(steps)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad += feature.deviation * feature.noise(seed, name, step, parameter)

    optimizer.register_step_pre_hook(add)
    return optimizer


@cache
def _unsplit() -> str:
    models: list[Any] = []
    recipe = reference.recipe(TIED)

    def build() -> Any:
        models.append(recipe.build())
        return models[0]

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return _with_noise(recipe.optimizer(parameters), models[0], recipe.seed)

    return reference.train(replace(recipe, build=build, optimizer=optimizer)).weights_sha256


def _folder(workspace: Workspace, **files: str) -> Path:
    folder = workspace.folder / "plan"
    shutil.copytree(TIED, folder)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    "sets", [("model.stages=1",), ("model.cut=[1]",), ("model.cut=[1, 3]",), ("schedule.name=gpipe",)], ids=str
)
def test_noise_on_gradients_is_that_of_the_unsplit_model_in_one_process(
    sets: Sequence[str], workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several stages share a parameter, whose copies must get the same noise."""
    given = ("queues.url=memory://", NAMED, *sets)
    arguments = [word for each in given for word in ("--set", each)]
    assert workspace.here("train", str(_folder(workspace, noise=NOISE)), "--json", *arguments) == 0
    assert json.loads(capsys.readouterr().out)["weights_sha256"] == _unsplit()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "kills"),
    [(("model.cut=[1, 3]",), (("worker-1", 20),)), ((), (("worker-2", 40), ("worker-0", 33)))],
    ids=str,
)
def test_noise_on_gradients_is_that_of_the_unsplit_model_whatever_is_killed(
    sets: Sequence[str], kills: Sequence[Any], fork_server: ForkServer, workspace: Workspace
) -> None:
    plan, run = _folder(workspace, noise=NOISE) / "stageline.toml", workspace.folder / "run"
    given = ("queues.url=shm://", f"run.dir={workspace.folder}", NAMED, *sets)
    outcome = fork_server.train(plan, *given, folder=run, kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == _unsplit()
    assert outcome["facts"]["weights_sha256"] != reference.reference_digest(TIED)


@pytest.mark.parametrize("workers", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cut", [None, [2], [1, 3]], ids=str)
def test_a_line_takes_a_feature_that_was_made_in_the_script(
    cut: list[int] | None, workers: Any, workspace: Workspace
) -> None:
    small = SMALL_MODELS["transformer"]
    model = small.build()
    batches = [small.batch(number, 6) for number in range(STEPS)]
    plain = PlainLoop(model, small.loss, _with_noise(SGD(model.parameters()), model, 0), MICROBATCHES).train(batches)
    options: dict[str, Any] = {"optimizer": SGD, "microbatches": MICROBATCHES, "folder": workspace.folder}
    with Line(small.build(), loss=small.loss, cut=cut, workers=workers, features=[_noise()], **options) as line:
        for batch in batches:
            line.step(*batch)
    assert not differing(line.state_dict(), plain.state())


@pytest.mark.slow
def test_a_state_that_a_feature_keeps_is_in_snapshots(fork_server: ForkServer, workspace: Workspace) -> None:
    folder = _folder(workspace, drift=DRIFT)
    sets = (f"run.dir={workspace.folder}", 'features=["drift.py:Drift"]')
    found = []
    for number, kills in enumerate([(), (("worker-2", 40), ("worker-1", 47))]):
        run = workspace.folder / f"run-{number}"
        outcome = fork_server.train(folder / "stageline.toml", *sets, folder=run, kills=kills)
        assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
        found.append(outcome["facts"]["weights_sha256"])
    assert found[0] == found[1]
    assert found[0] != reference.reference_digest(TIED)


class FailingFeature(Feature):
    """Fails in one hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def around(self, stage: Any, kind: str, compute: Any) -> Any:
        if self.hook == "around":
            raise KeyError("weights")

        def failing(operation: Any, received: Any) -> Any:
            raise KeyError(f"weights of {operation.step}")

        return failing if kind == self.hook else compute


class RefusingFeature(Feature):
    """Refuses a key of the plan."""

    def refuses(self, plan: Any) -> Any:
        if plan.optimizer.clip_norm is not None:
            yield PlanError("optimizer.clip_norm", "noise is clipped with the gradients; leave one of the two out")


def _has_checkpoint(line: Line) -> bool:
    return 0 not in line._run._driver.calls._after


def _line(*features: Any, **options: Any) -> Line:
    small = SMALL_MODELS["transformer"]
    given = {"loss": small.loss, "optimizer": SGD, "microbatches": 2, "workers": "inline", **options}
    return Line(small.build(), features=features, **given)


@pytest.mark.parametrize(("hook", "operation"), [("F", "0F0"), ("U", "0U")])
def test_a_hook_that_fails_is_named_with_its_feature_and_the_operation(hook: str, operation: str) -> None:
    wanted = rf"stage 0 .*feature FailingFeature failed in {operation} of step 0.*KeyError"
    with _line(FailingFeature(hook)) as line, pytest.raises(ComputeFailed, match=wanted) as failed:
        line.step(*SMALL_MODELS["transformer"].batch(0, 6))
    assert isinstance(failed.value.__cause__, KeyError)


def test_what_is_no_feature_or_cannot_be_combined_is_refused(workspace: Workspace, capsys: Any) -> None:
    with pytest.raises(ModelRefused, match=r"features = .*expected a list of features"):
        _line("noise.py:GradientNoise")
    with pytest.raises(FeatureRefused, match="two features are called FailingFeature"):
        _line(FailingFeature("F"), FailingFeature("U"))
    with pytest.raises(FeatureRefused, match="ties has the name of one of stageline's own"):
        _line(type("ties", (Feature,), {}))
    for workers in ("inline", "processes"):
        with pytest.raises(PlanRefused, match=r"clip_norm.*noise is clipped with the gradients"):
            _line(RefusingFeature(), clip_norm=1.0, workers=workers, folder=workspace.folder)
    folder = _folder(workspace, noise=NOISE)
    for reference_, told in (("noise.py:sha256", "features"), ("noise.py:Noise", "has no 'Noise'"), ("7", "features")):
        assert workspace.here("plan", str(folder), "--set", f'features=["{reference_}"]') == 78
        assert told in capsys.readouterr().err


def test_an_object_cannot_go_to_workers_on_other_machines(workspace: Workspace) -> None:
    with pytest.raises(
        ModelRefused, match=r"features\[0\].*an object of FailingFeature has no name; give the class FailingFeature"
    ):
        _line(
            FailingFeature("F"), workers="processes", broker=f"tcp://127.0.0.1:{free_port()}", folder=workspace.folder
        )


@pytest.mark.slow
def test_a_line_goes_on_with_its_feature_after_a_worker_was_killed(workspace: Workspace) -> None:
    small, digests = SMALL_MODELS["transformer"], []
    for kills in (False, True):
        options: dict[str, Any] = {"workers": "processes", "folder": workspace.folder / "runs", "cut": [2]}
        with chdir(workspace.folder):  # in which its processes are looked for
            line = _line(_noise(), **options, settings={"recovery.snapshot_every": 2})
        with line:
            for step in range(STEPS):
                if step == 3 and kills:
                    wait_for(partial(_has_checkpoint, line))  # the checkpoint of step 2 is complete
                    os.kill(workspace.worker(1), signal.SIGKILL)
                line.step(*small.batch(step, 6))
        digests.append(line.state_dict())
    assert not differing(*digests)
