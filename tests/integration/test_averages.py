"""Averages of weights (EMA) are those that torch's `AveragedModel` keeps of the unsplit model, to the bit."""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stageline import Line, ModelRefused, PlanRefused, load, load_weights, traced
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.exchange.stored_weights import WeightsUnusable
from support import reference, whole_models
from support.fork_server import ForkServer
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.whole_models import WHOLE_MODELS, logits_of, mean_loss, split, train_whole
from support.workspace import Workspace, wait_for

STEPS, MICROBATCHES, ACCUMULATE, DECAY = 6, 2, 3, 0.9
SIZES = (5, 8, 6) * STEPS  # rows of the batches
ADAM = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
TIED = Path(reference.__file__).parent / "tied"
TINY = TIED.parent / "tiny"
ALL = {
    "optimizer": ADAM,
    "microbatches": MICROBATCHES,
    "accumulate": ACCUMULATE,
    "autocast": "bf16",
    "groups": [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}],
    "lr_scheduler": HALVED,
    "lr_every": 2,
    "clip_norm": 0.3,
    "ema_decay": DECAY,
}  # what training loops have, together

pytestmark = pytest.mark.usefixtures("one_thread")


def averaged_model(model: nn.Module, decay: float = DECAY) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def _plain(name: str, steps: int = STEPS) -> PlainLoop:
    small, model = SMALL_MODELS[name], SMALL_MODELS[name].build()
    named = list(model.named_parameters())
    plain = [parameter for name, parameter in named if name.endswith(".bias") or "norm" in name]
    decayed = [parameter for name, parameter in named if not (name.endswith(".bias") or "norm" in name)]
    optimizer = ADAM([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])
    loop = PlainLoop(
        model,
        small.loss,
        optimizer,
        MICROBATCHES,
        accumulate=ACCUMULATE,
        autocast=True,
        lr_scheduler=HALVED(optimizer),
        lr_every=2,
        clip_norm=0.3,
        averaged=averaged_model(model),
    )
    return loop.train(small.batch(number, rows) for number, rows in enumerate(SIZES[: steps * ACCUMULATE]))


def _line(name: str, **options: Any) -> Line:
    small = SMALL_MODELS[name]
    return Line(small.build(), **{"cut": small.cut, "loss": small.loss, "workers": "inline", **ALL, **options})


def _train(line: Line, name: str, steps: range) -> None:
    batches = [SMALL_MODELS[name].batch(number, rows) for number, rows in enumerate(SIZES)]
    for step in steps:
        line.step(*zip(*batches[step * ACCUMULATE : (step + 1) * ACCUMULATE], strict=True))


def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    """As evaluation computes them: in as many microbatches as a step has."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return torch.cat([model.eval()(part) for part in x.tensor_split(MICROBATCHES * ACCUMULATE)])


@pytest.mark.parametrize("workers", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_lines_averages_are_those_of_the_plain_loop(name: str, workers: str, workspace: Workspace) -> None:
    plain, small = _plain(name), SMALL_MODELS[name]
    x, y = small.batch(99, 12)
    with _line(name, workers=workers, folder=workspace.folder) as line:
        assert not differing(line.state_dict(ema=True), small.build().state_dict())  # before the first step
        _train(line, name, range(STEPS))
        averages, weights = line.predict(x, ema=True), line.predict(x)
        assert line.evaluate([(x, y)], ema=True) != line.evaluate([(x, y)])
    assert not differing(line.state_dict(), plain.state())
    assert not differing(line.state_dict(ema=True), plain.averages())
    assert torch.equal(averages, _outputs(plain.averaged, x))  # type: ignore[arg-type]
    assert torch.equal(weights, _outputs(plain.model, x))


@pytest.mark.slow
def test_a_killed_worker_changes_nothing_of_all_that_training_loops_have(workspace: Workspace) -> None:
    """Convolutions in three stages; the middle one's worker is killed while it has averages to lose."""
    plain = _plain("convolutions")
    with chdir(workspace.folder):  # in which its processes are looked for
        given: dict[str, Any] = {"workers": "processes", "folder": workspace.folder / "runs"}
        line = _line("convolutions", **given, settings={"recovery.snapshot_every": 2})
    with line:
        _train(line, "convolutions", range(3))
        assert differing(line.state_dict(), line.state_dict(ema=True))
        wait_for(lambda: 0 not in line._run._driver.calls._after)  # the checkpoint of step 2 is complete
        os.kill(workspace.worker(1), signal.SIGKILL)
        _train(line, "convolutions", range(3, STEPS))
        assert not differing(line.state_dict(ema=True), plain.averages())
    assert not differing(line.state_dict(), plain.state())
    assert not differing(line.state_dict(ema=True), plain.averages())


@pytest.mark.parametrize(
    ("name", "is_traced"),
    [
        ("u-net", False),
        pytest.param("u-net", True, marks=pytest.mark.slow),
        pytest.param("resnet18", True, marks=pytest.mark.slow),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in WHOLE_MODELS if name != "u-net"),
    ],
)
def test_averages_of_models_that_are_no_sequential(name: str, *, is_traced: bool) -> None:
    whole, models, averaged = WHOLE_MODELS[name], [], []
    layers = traced(whole.made(), whole.batches(1)[0][0]) if is_traced else whole.layers(whole.made())

    def build() -> Any:
        models.append(whole.build())
        return models[0]

    def average(*_: object) -> None:
        if not averaged:
            averaged.append(averaged_model(models[0]))
        averaged[0].update_parameters(models[0])

    seeded = ("", *layers.names[1:]) if is_traced else whole.seeded
    with register_optimizer_step_post_hook(average):
        train_whole(replace(whole, build=build, seeded=seeded), 3, MICROBATCHES)
    given = {"loss": mean_loss, "optimizer": whole_models.ADAM, "microbatches": MICROBATCHES, "workers": "inline"}
    x, _ = whole.batches(4)[3]
    with Line(layers, stages=3, ema_decay=DECAY, **given) as line:
        for batch in whole.batches(3):
            line.step(*batch)
        found = line.predict(x, ema=True)
        assert not differing(line.state_dict(ema=True), averaged[0].module.state_dict())
    with torch.no_grad():
        model = averaged[0].module.eval()
        wanted = torch.cat([logits_of(model, part) for part in split(x, MICROBATCHES)])
    assert torch.equal(found["logits"] if isinstance(found, dict) else found, wanted)


@pytest.mark.slow
def test_a_line_is_saved_and_goes_on_with_its_averages_in_another_cut(workspace: Workspace) -> None:
    options: dict[str, Any] = {"workers": "processes", "folder": workspace.folder / "runs"}
    with _line("transformer", **options) as line:
        _train(line, "transformer", range(2))
        line.save(workspace.folder / "saved")
    given = {**ALL, "loss": SMALL_MODELS["transformer"].loss, **options}
    with Line.resume(workspace.folder / "saved", SMALL_MODELS["transformer"].build(), cut=[2], **given) as line:
        assert not differing(line.state_dict(ema=True), _plain("transformer", 2).averages())
        _train(line, "transformer", range(2, STEPS))
    plain = _plain("transformer")
    assert not differing(line.state_dict(), plain.state())
    assert not differing(line.state_dict(ema=True), plain.averages())
    with pytest.raises(PlanRefused, match=r"with other arguments: ema_decay: 0.5 here, 0.9 there"):
        Line.resume(workspace.folder / "saved", SMALL_MODELS["transformer"].build(), **{**given, "ema_decay": 0.5})


@pytest.mark.parametrize("frozen", [(0, 1), (2, 3), (4, 5, 6)], ids=["first", "middle", "last"])
def test_a_stage_of_frozen_layers_has_no_averages_and_the_weights_in_their_place(frozen: tuple[int, ...]) -> None:
    small = SMALL_MODELS["convolutions"]

    def build() -> nn.Sequential:
        model = small.build()
        for layer in frozen:
            model[layer].requires_grad_(False)
        return model

    model = build()
    optimizer, averaged = ADAM([each for each in model.parameters() if each.requires_grad]), averaged_model(model)
    batches = [small.batch(number, 6) for number in range(STEPS)]
    plain = PlainLoop(model, small.loss, optimizer, MICROBATCHES, averaged=averaged).train(batches)
    given = {"cut": small.cut, "loss": small.loss, "optimizer": ADAM, "microbatches": MICROBATCHES}
    with Line(build(), ema_decay=DECAY, workers="inline", **given) as line:
        for batch in batches:
            line.step(*batch)
        assert not differing(line.state_dict(ema=True), plain.averages())
        stages = [stage for executor in line._run._executors for stage in executor.stages.values()]
    assert [bool(stage.averages) for stage in stages].count(False) == 1


def test_loaded_weights_leave_averages_as_a_plain_loop_does() -> None:
    small, model = SMALL_MODELS["transformer"], SMALL_MODELS["transformer"].build()
    batches = [small.batch(number, 6) for number in range(4)]
    plain = PlainLoop(model, small.loss, ADAM(model.parameters()), MICROBATCHES, averaged=averaged_model(model))
    options = {"accumulate": 1, "autocast": None, "groups": None, "lr_scheduler": None, "clip_norm": None}
    with _line("transformer", **options) as line:
        plain.train(batches[:2])
        for batch in batches[:2]:
            line.step(*batch)
        other = {name: tensor * 0.5 for name, tensor in line.state_dict().items()}
        line.load_state_dict(other)
        model.load_state_dict(other)
        assert not differing(line.state_dict(ema=True), plain.averages())
        plain.train(batches[2:])
        for batch in batches[2:]:
            line.step(*batch)
        assert not differing(line.state_dict(), plain.state())
        assert not differing(line.state_dict(ema=True), plain.averages())


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(PlanRefused, match=r"^ema_decay = 1.5: expected a number from 0 to 1, such as 0.999"):
        _line("transformer", ema_decay=1.5)
    with pytest.raises(PlanRefused, match=r'optimizer.ema_decay = "high": expected a number from 0 to 1.* got text'):
        read_plan(TIED, sets=["optimizer.ema_decay=high"], environment={})
    with pytest.raises(ModelRefused, match=r"settings\[.optimizer.ema_decay.\]: .*Pass ema_decay = ... instead"):
        _line("transformer", ema_decay=None, settings={"optimizer.ema_decay": 0.9})
    x, y = SMALL_MODELS["transformer"].batch(0, 6)
    with _line("transformer", ema_decay=None) as line:
        for call in (line.state_dict, partial(line.predict, x), partial(line.evaluate, [(x, y)])):
            with pytest.raises(ModelRefused, match=r"no averages of its weights. Make it with ema_decay = 0.999"):
                call(ema=True)
        line.step(*[[x] * ACCUMULATE, [y] * ACCUMULATE])


@cache
def _reference(folder: Path) -> tuple[reference.ReferenceResult, dict[str, Tensor]]:
    """The unsplit model and its averages, after a synchronous plan."""
    models: list[nn.Module] = []
    averages: list[AveragedModel] = []
    recipe = reference.recipe(folder)

    def build() -> Any:
        models.append(recipe.build())
        return models[0]

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        averages.append(averaged_model(models[0]))
        made = recipe.optimizer(parameters)
        made.register_step_post_hook(lambda *_: averages[0].update_parameters(models[0]))
        return made

    result = reference.train(replace(recipe, build=build, optimizer=optimizer))
    return result, averages[0].module.state_dict()


def _merged(workspace: Workspace, run: Path, *arguments: str) -> dict[str, Tensor]:
    file = workspace.folder / f"{len(list(workspace.folder.iterdir()))}.safetensors"
    assert workspace.here("export", str(run), str(file), *arguments) == 0
    return load_file(file)


@pytest.mark.parametrize(
    "kills", [(), pytest.param((("worker-2", 40),), marks=pytest.mark.slow)], ids=["undisturbed", "killed"]
)
def test_a_plans_averages_are_those_of_the_unsplit_model_whatever_is_killed(
    kills: Sequence[Any], fork_server: ForkServer, workspace: Workspace
) -> None:
    """One of its parameters is in three stages."""
    result, averages = _reference(TIED)
    folder = workspace.folder / "run"
    sets = [f"run.dir={workspace.folder}", f"optimizer.ema_decay={DECAY}"]
    outcome = fork_server.train(TIED / "stageline.toml", *sets, folder=folder, kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == result.weights_sha256  # of the weights, not of averages
    assert not differing(load_weights(folder), result.state)
    assert not differing(load_weights(folder, ema=True), averages)
    assert not differing(_merged(workspace, folder, "--ema"), averages)
    assert not differing(_merged(workspace, folder), result.state)


def test_a_plan_without_averages_says_so(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert workspace.here("train", str(TINY), "--set", "queues.url=memory://") == 0
    [run] = workspace.runs()
    with pytest.raises(FileNotFoundError, match=r"holds no averages-\*.safetensors: the run averaged no weights"):
        load_weights(run, ema=True)
    assert workspace.here("export", str(run), "out.safetensors", "--ema") == 2
    refusal = "has no averages of its weights: a plan has them with optimizer.ema_decay"
    assert refusal in capsys.readouterr().err
    save_file({"x": torch.zeros(2, 4)}, workspace.folder / "x.safetensors")
    for words in (("eval",), ("predict", "--input", "x.safetensors", "--output", "out.npy")):
        assert workspace.here(*words, str(run), "--ema") == 2
        assert refusal in capsys.readouterr().err
    with pytest.raises(WeightsUnusable, match=refusal):
        load(run, ema=True)
    assert not list(workspace.folder.glob("out*"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "stages"])
def test_averages_are_exported_in_the_forms_of_weights(form: str, workspace: Workspace) -> None:
    _, averages = _reference(TIED)
    arguments = ("--set", "queues.url=memory://", "--set", f"optimizer.ema_decay={DECAY}")
    assert workspace.here("train", str(TIED), *arguments) == 0
    out = workspace.folder / "out"
    assert workspace.here("export", str(workspace.runs()[0]), str(out), "--format", form, "--ema") == 0
    files = sorted(out.glob("stage-*.safetensors")) if form == "stages" else [out]
    assert len(files) == (4 if form == "stages" else 1)
    assert not differing({name: each for file in files for name, each in load_file(file).items()}, averages)


METRIC = """

def logits(outputs, targets):
    return outputs.double().square().sum()
"""


def test_metrics_of_a_plan_measure_the_averages(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write("model.py", (workspace.folder / "model.py").read_text() + METRIC)
    plan = workspace.folder / "stageline.toml"
    plan.write_text(plan.read_text().replace("steps = 6", "steps = 6\nseed = 0"))
    metrics = ("--set", 'model.metrics=["model.py:logits"]', "--set", "queues.url=memory://")
    _, averages = _reference(workspace.folder)
    model, source = _model_and_source(workspace.folder)
    found = []
    for more in ((), ("--set", f"optimizer.ema_decay={DECAY}")):
        assert workspace.here("train", "--json", *metrics, *more) == 0
        found.append(json.loads(capsys.readouterr().out))
    model.load_state_dict(averages)
    x, _ = source.held_out()
    total = 0.0
    with torch.no_grad():
        for part in (part for batch in x.split(6) for part in batch.tensor_split(3) if len(part)):
            total += float(model(part).double().square().sum()) * len(part)
    assert found[1]["metrics"] == {"logits": total / len(x)}
    assert found[0]["metrics"] != found[1]["metrics"]
    run = str(max(workspace.runs(), key=lambda each: each.stat().st_mtime_ns))
    assert not differing(dict(load(run, ema=True).state_dict()), averages)
    for options, metrics_then in (((), found[0]), (("--ema",), found[1])):
        assert workspace.here("eval", run, "--json", "--workers", "inline", *options) == 0
        measured = json.loads(capsys.readouterr().out)
        assert (measured["metrics"], measured["ema"]) == (metrics_then["metrics"], bool(options))
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def _model_and_source(folder: Path) -> tuple[nn.Module, Any]:
    recipe = reference.recipe(folder)
    return recipe.build().eval(), recipe.batch.__self__  # type: ignore[union-attr, attr-defined]


@pytest.mark.parametrize(
    "kills", [(), pytest.param((("worker-0", 11),), marks=pytest.mark.slow)], ids=["undisturbed", "killed"]
)
def test_in_asynchronous_mode_each_stage_averages_after_its_own_updates(
    kills: Sequence[Any], fork_server: ForkServer, workspace: Workspace
) -> None:
    recipe = reference.recipe(TINY, microbatches=1)
    kept: list[tuple[nn.ParameterList, AveragedModel]] = []
    models: list[Any] = []

    def build() -> Any:
        models.append(recipe.build())
        return models[0]

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        held = nn.ParameterList(parameters)
        averaged = averaged_model(held)
        made = recipe.optimizer(parameters)
        made.register_step_post_hook(lambda *_: averaged.update_parameters(held))
        kept.append((held, averaged))
        return made

    result = reference.train_pipedream(replace(recipe, build=build, optimizer=optimizer), [4])
    averages = {id(own): each for held, averaged in kept for own, each in zip(held, averaged.module, strict=True)}
    wanted = {name: averages.get(id(own), own) for name, own in models[0].state_dict(keep_vars=True).items()}
    folder = workspace.folder / "run"
    sets = ("schedule.mode=async", "schedule.microbatches=1", f"optimizer.ema_decay={DECAY}")
    outcome = fork_server.train(
        TINY / "stageline.toml", f"run.dir={workspace.folder}", *sets, folder=folder, kills=kills
    )
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == result.weights_sha256
    assert not differing(load_weights(folder, ema=True), wanted)


def test_the_forecast_of_memory_counts_averages(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for more in ((), ("--set", f"optimizer.ema_decay={DECAY}")):
        assert workspace.here("plan", str(TIED), "--json", *more) == 0
        stages = json.loads(capsys.readouterr().out)["stages"]
        assert [stage["total"] for stage in stages] == [sum(stage["bytes"].values()) for stage in stages]
        sizes.append([stage["bytes"] for stage in stages])
    assert [each["averages"] for each in sizes[0]] == [0] * 4
    assert [each["averages"] for each in sizes[1]] == [each["gradients"] for each in sizes[1]]  # of what is trained
