"""Recomputation changes no bit of a run, also if the run freezes stages, stashes weights or loses a worker."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import Line, PlanRefused
from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer
from support.plain_loop import differing
from support.small_models import SMALL_MODELS
from support.whole_models import ADAM as WHOLE_ADAM
from support.whole_models import WHOLE_MODELS, mean_loss, train_whole

SUPPORT = Path(reference.__file__).parent
ADAM = partial(torch.optim.AdamW, lr=0.02)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
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
    assert outcome.facts["weights_sha256"] == reference.reference_digest(SUPPORT / "frozen")
    sets[-1] = 'stage.2.recompute=["middle"]'
    with pytest.raises(
        PlanRefused, match=r'^.*stage.2.recompute = \["middle"\]: no layer or module of one matches "mi'
    ):
        prepare(read_plan(SUPPORT / "frozen", sets=[*sets, 'model.cut=["middle", "later"]'], environment={}))


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
        read_plan(
            plan,
            sets=['memory.recompute="stage"', 'stage.1.recompute=["middle"]', "schedule.name=zb-h1", "model.stages=5"],
        )
    assert {error.key for error in refused.value.errors} == {"memory.recompute", "stage.1.recompute"}
    with pytest.raises(PlanRefused, match=r'no layer or module of one matches "midle.\*"; there are middle'):
        prepare(read_plan(plan, sets=['memory.recompute=["midle.*"]'], environment={}))
