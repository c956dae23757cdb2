"""What stages recompute changes no bit of a run, whatever else it does: freezes, stashes weights, loses a worker."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import Line, PlanRefused
from stageline.pipeline.model_names import matches
from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.whole_models import ADAM as WHOLE_ADAM
from support.whole_models import WHOLE_MODELS, mean_loss, train_whole

SUPPORT = Path(reference.__file__).parent
STAGE, MODULES = 'memory.recompute="stage"', 'memory.recompute=["first", "middle.*", "later", "end"]'
TRAINED = {"everything": ["*"], "the middle": ["middle.*"], "all but a norm": ["[!n]*"]}
ADAM = partial(torch.optim.AdamW, lr=0.02)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def _plain(trained: str, mode: str, cut: tuple[int, ...]) -> reference.ReferenceResult:
    recipe = reference.recipe(SUPPORT / "frozen", microbatches=1 if mode == "async" else 4)
    make = recipe.build

    def frozen() -> Any:
        model: Any = make()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(matches(name, TRAINED[trained]))
        return model

    recipe = replace(recipe, build=frozen)
    return reference.train(recipe) if mode == "sync" else reference.train_pipedream(recipe, cut)


@pytest.mark.parametrize("recompute", [STAGE, MODULES])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_recomputes_equals_the_plain_loop(mode: str, trained: str, recompute: str, tmp_path: Path) -> None:
    sets = [f"model.cut={[2, 5, 8]}", f"model.trainable={_listed(TRAINED[trained])}", recompute]
    if mode == "async":
        sets += ["schedule.mode=async", "schedule.microbatches=1"]
    job = prepare(read_plan(SUPPORT / "frozen", sets=sets, environment={}))
    outcome = run_memory(job, "frozen", tmp_path / "run")
    assert outcome.code == 0, outcome.reason
    wanted = _plain(trained, mode, (2, 5, 8))
    losses = [outcome.facts["losses"][str(step)] for step in range(len(wanted.losses))]
    assert (outcome.facts["weights_sha256"], losses) == (wanted.weights_sha256, wanted.losses)


def _listed(patterns: Sequence[str]) -> str:
    return str(patterns).replace("'", '"')


@pytest.mark.parametrize(
    ("mode", "recompute"),
    [
        ("sync", 'memory.recompute="stage"'),
        pytest.param("async", 'memory.recompute="stage"', marks=pytest.mark.slow),
        pytest.param("sync", 'memory.recompute=["[1357]"]', marks=pytest.mark.slow),
    ],
)
def test_nor_does_it_where_workers_are_killed(
    mode: str, recompute: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    recipe = reference.recipe(SUPPORT / "tiny", microbatches=1 if mode == "async" else 0)
    wanted = reference.train(recipe) if mode == "sync" else reference.train_pipedream(recipe, [4])
    sets = ["schedule.mode=async", "schedule.microbatches=1"] if mode == "async" else []
    kills = [("worker-1", 14)] if mode == "sync" else [("worker-0", 24), ("worker-1", 14)]
    plan = SUPPORT / "tiny" / "stageline.toml"
    outcome = fork_server.train(plan, f"run.dir={tmp_path}", recompute, *sets, folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == wanted.weights_sha256


@pytest.mark.parametrize(
    ("name", "recompute"), [("transformer", "stage"), ("transformer", ["*.mlp", "*.norm1"]), ("convolutions", "stage")]
)
def test_a_line_recomputes_in_bfloat16(name: str, recompute: Any) -> None:
    small, model = SMALL_MODELS[name], SMALL_MODELS[name].build()
    batches = [small.batch(number, 10) for number in range(3)]
    plain = PlainLoop(model, small.loss, ADAM(model.parameters()), 3, autocast=True, clip_norm=0.3).train(batches)
    given: dict[str, Any] = {"loss": small.loss, "optimizer": ADAM, "cut": small.cut, "microbatches": 3}
    with Line(small.build(), **given, autocast="bf16", clip_norm=0.3, recompute=recompute, workers="inline") as line:
        assert [line.step(*batch).item() for batch in batches] == plain.losses
    assert not differing(line.state_dict(), plain.state())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["stage", ["transformer.h.*.mlp", "transformer.ln_f"]], ids=str)
def test_gpt2_recomputes_modules_by_their_names(recompute: Any) -> None:
    # Its embeddings are its head, and dropout comes before, between and after what runs again.
    whole = WHOLE_MODELS["gpt2 tied"]
    wanted, losses = train_whole(whole, 3, 2)
    given: dict[str, Any] = {"loss": mean_loss, "optimizer": WHOLE_ADAM, "microbatches": 2, "workers": "inline"}
    with Line(whole.made(), stages=3, recompute=recompute, **given) as line:
        assert [line.step(*batch).item() for batch in whole.batches(3)] == losses
    assert not differing(line.state_dict(), wanted)


def test_one_stage_recomputes_otherwise_than_all(tmp_path: Path) -> None:
    sets = [f"model.cut={[2, 5, 8]}", 'model.trainable=["*"]', 'memory.recompute="stage"']
    sets += ['stage.1.recompute="nothing"', 'stage.2.recompute=["later"]']
    plan = read_plan(SUPPORT / "frozen", sets=sets, environment={})
    assert [plan.recompute_of(stage) for stage in range(4)] == ["stage", None, ("later",), "stage"]
    without = read_plan(SUPPORT / "frozen", sets=sets[:2], environment={})
    assert plan.digest() == without.digest()  # machines may differ in it
    outcome = run_memory(prepare(plan), "frozen", tmp_path / "run")
    assert outcome.facts["weights_sha256"] == _plain("everything", "sync", (2, 5, 8)).weights_sha256
    sets[-1] = 'stage.2.recompute=["middle"]'
    with pytest.raises(
        PlanRefused, match=r'^.*stage.2.recompute = \["middle"\]: no layer or module of one matches "mi'
    ):
        prepare(read_plan(SUPPORT / "frozen", sets=[*sets, 'model.cut=["middle", "later"]'], environment={}))


def test_replicas_of_a_stage_recompute_to_the_same_bits(tmp_path: Path) -> None:
    digests = {
        run_memory(
            prepare(read_plan(SUPPORT / "replicated", sets=sets, environment={})),
            "replicated",
            tmp_path / str(len(sets)),
        ).facts["weights_sha256"]
        for sets in ([], [STAGE])
    }
    assert len(digests) == 1


def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is() -> None:
    small = SMALL_MODELS["transformer"]
    given: dict[str, Any] = {"loss": small.loss, "optimizer": ADAM, "cut": small.cut, "workers": "inline"}
    with pytest.raises(
        PlanRefused, match=r'recompute = \["\*.mpl"\]: no layer or module of one matches "\*.mpl"; .*mlp'
    ):
        Line(small.build(), recompute=["*.mpl"], **given)
    with pytest.raises(PlanRefused, match=r'recompute = "all": expected "stage", "layers" or a list of patterns'):
        Line(small.build(), recompute="all", **given)
    plan = SUPPORT / "frozen"
    with pytest.raises(PlanRefused, match=r'memory.recompute = "midle.\*": expected "stage", "layers" or a list'):
        read_plan(plan, sets=['memory.recompute="midle.*"'])
    with pytest.raises(PlanRefused, match=r'recompute = .*schedule.name = "zb-h1" splits backwards in two') as refused:
        read_plan(plan, sets=[STAGE, 'stage.1.recompute=["middle"]', "schedule.name=zb-h1", "model.stages=5"])
    assert {error.key for error in refused.value.errors} == {"memory.recompute", "stage.1.recompute"}
    with pytest.raises(PlanRefused, match=r'no layer or module of one matches "midle.\*"; there are middle'):
        prepare(read_plan(plan, sets=['memory.recompute=["midle.*"]'], environment={}))
