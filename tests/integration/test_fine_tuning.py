"""Everything that fine-tuning has, each alone and all together, on a GPT-2 and on convolutions: to the bit as in one
plain loop, whatever is killed.

stage 0 (frozen) -- forward-1 -->  stage 1  -- forward-2 -->  stage 2
                    prefix cache   stage 1 <-- norms-1 ---    stage 2
                                   stage 1  --- clip-2 -->    stage 2
workers 0 and 1 <------------------------- verdict-0, verdict-1 ---- worker 2
"""

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stageline import read_taps
from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.checkpoint.source import checkpoint_rows, source_in
from stageline.workers.cli.app import run
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support.action_log import ACTION, DONE, EVALUATED, JUDGED, KEEPING, Place
from support.fine_tuning import FEATURES, TOGETHER, FineTuned, Keys, fine_tune, path_of, sets_of
from support.finetuned.convolutions import build
from support.finetuned.data import images
from support.fork_server import ForkServer, Kill
from support.plain_loop import differing

KINDS = ["convolutions", pytest.param("gpt2", marks=pytest.mark.slow)]
ON_DISK = "keep best"  # needs checkpoints, which a run in one process does not write

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def together(kind: str) -> FineTuned:
    return fine_tune(kind)


def in_memory(kind: str, changes: Keys, folder: Path) -> dict[str, Any]:
    sets = [*sets_of(changes), "queues.url=memory://", f"run.dir={folder}"]
    outcome = run_memory(prepare(read_plan(path_of(kind), sets=sets, environment={})), "run", folder / "run")
    assert outcome.code == 0, outcome.reason
    return outcome.facts


def check_facts(facts: dict[str, Any], plain: FineTuned) -> None:
    assert facts["weights_sha256"] == plain.weights_sha256
    assert list(facts["losses"].values()) == plain.losses
    assert facts["evaluations"] == plain.rounds
    assert facts["training_steps"] == plain.steps
    assert bool(facts.get("stopped_early")) is plain.stopped_early


@pytest.mark.parametrize("kind", ["convolutions", "gpt2"])
def test_the_plain_loop_has_what_the_tests_below_are_about(kind: str) -> None:
    plain = together(kind)
    assert plain.stopped_early
    assert 2 < plain.best < plain.steps < 16  # type: ignore[operator]  # an epoch has two steps
    assert max(line.get("gradient_norm", 0) for line in plain.lines) > TOGETHER["optimizer.clip_norm"]
    assert differing(plain.weights[plain.steps], plain.averages[plain.steps])


@pytest.mark.parametrize("feature", sorted({*FEATURES} - {ON_DISK}))
@pytest.mark.parametrize("kind", KINDS)
def test_each_alone_is_what_the_plain_loop_does(kind: str, feature: str, tmp_path: Path) -> None:
    check_facts(in_memory(kind, FEATURES[feature], tmp_path), fine_tune(kind, FEATURES[feature]))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*combinations(sorted({*FEATURES} - {ON_DISK}), 2)], ids=" and ".join)
def test_each_pair_is_what_the_plain_loop_does(pair: Sequence[str], tmp_path: Path) -> None:
    changes = {**FEATURES[pair[0]], **FEATURES[pair[1]]}
    check_facts(in_memory("convolutions", changes, tmp_path), fine_tune("convolutions", changes))


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without their times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def exported(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    with redirect_stdout(io.StringIO()):
        assert run(["export", str(folder), str(file), *options]) == 0
    return load_file(file)


def check_folder(folder: Path, plain: FineTuned) -> None:
    """Weights, averages and optimizer of the end and of the best round, and what was measured."""
    assert lines_in(folder) == plain.lines
    assert [row.step for row in checkpoint_rows(source_in(folder)) if row.best and row.complete] == [plain.best]
    for options, step in (((), plain.steps), (("--best",), plain.best)):
        assert step is not None
        assert not differing(of_model(exported(folder, *options)), plain.weights[step])
        averages = exported(folder, "--ema", *options)
        assert not differing(of_model(averages), plain.averages[step])
    found: dict[str, Any] = {}
    for stage in range(3):
        state = source_in(folder).snapshots.load(stage, plain.steps).state
        found |= {
            state.parameters[number]: each for number, each in (state.optimizer or {"state": {}})["state"].items()
        }
        if stage:
            assert state.lr_scheduler is not None
            assert plain.lr_scheduler is not None
            for key in ("last_epoch", "_last_lr"):
                assert state.lr_scheduler[key] == plain.lr_scheduler[key]
    assert found.keys() == plain.optimizer.keys()
    for name, wanted in plain.optimizer.items():
        assert not differing(found[name], wanted), name


def of_model(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With both names of GPT-2's embeddings, which are its head."""
    tied = "transformer.wte.weight"
    return {**found, "lm_head.weight": found[tied]} if tied in found else found


def disturbed(
    kind: str, kills: Sequence[Kill], fork_server: ForkServer, folder: Path, more: Keys = MappingProxyType({})
) -> None:
    sets = [*sets_of({**TOGETHER, **more}), f"run.dir={folder}"]
    outcome = fork_server.train(path_of(kind), *sets, folder=folder / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == outcome["orphans"] == outcome["left"] == []
    check_facts(outcome["facts"], together(kind))
    check_folder(folder / "run", together(kind))


# Steps have four microbatches; a round has two batches, and ends with verdict number `step`.
NORMS_ARE_SENT = ("worker-2", Place(DONE, 3, "2N"))
NORMS_HAVE_COME = ("worker-1", Place(ACTION, 3, "1N"))
TOTAL_IS_SENT = ("worker-1", Place(DONE, 5, "1C"))
TOTAL_HAS_COME = ("worker-2", Place(ACTION, 5, "2C"))
ONE_IS_TOLD = ("worker-2", Place(JUDGED, 5))
VERDICT_HAS_COME = ("worker-0", Place(JUDGED, 5))
LAST_VERDICT = ("worker-2", Place(JUDGED, 9))
HALF_KEPT = ("worker-1", Place(KEEPING, times=8))
KEPT = ("worker-1", Place(DONE, 1, "1F1"))
FIRST_EVALUATES = ("worker-0", Place(EVALUATED, 9, "0F1"))
MIDDLE_EVALUATES = ("worker-1", Place(ACTION, 9, "1F2"))
LAST_EVALUATES = ("worker-2", Place(EVALUATED, 8, "2F3"))

KILLS: dict[str, tuple[Kill, ...]] = {
    "undisturbed": (),
    "norms are sent": (NORMS_ARE_SENT,),
    "norms have come": (NORMS_HAVE_COME,),
    "total is sent": (TOTAL_IS_SENT,),
    "total has come": (TOTAL_HAS_COME,),
    "one is told": (ONE_IS_TOLD,),
    "verdict has come": (VERDICT_HAS_COME,),
    "verdict that ends the run": (LAST_VERDICT,),
    "cache half kept": (HALF_KEPT,),
    "cache kept": (KEPT,),
    "first evaluates": (FIRST_EVALUATES,),
    "middle evaluates": (MIDDLE_EVALUATES,),
    "last evaluates": (LAST_EVALUATES,),
    "one of each": (HALF_KEPT, NORMS_ARE_SENT, FIRST_EVALUATES, ("worker-1", Place(DONE, 4, "1C")), ONE_IS_TOLD),
    "each twice": (HALF_KEPT, ("worker-1", Place(KEEPING, times=2)), LAST_EVALUATES, LAST_VERDICT, ("broker", 60)),
}
DEFAULT = ("undisturbed", "one of each")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in KILLS]
)
@pytest.mark.parametrize("kind", KINDS)
def test_all_together_end_as_the_plain_loop_whatever_is_killed(
    kind: str, name: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    disturbed(kind, KILLS[name], fork_server, tmp_path)


TAPS = {"taps.layers": ["conv2", "norm3"], "taps.every": 1, "taps.evaluation": True}


def tapped_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "taps").rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [(ONE_IS_TOLD, FIRST_EVALUATES, KEPT), (LAST_VERDICT, MIDDLE_EVALUATES), (LAST_EVALUATES, TOTAL_IS_SENT)]
)
def test_what_is_tapped_of_steps_and_evaluations_is_the_same_whatever_is_killed_and_changes_nothing(
    kills: Sequence[Kill], fork_server: ForkServer, tmp_path: Path
) -> None:
    """With averages, which are what is evaluated, up to the early end."""
    plain = together("convolutions")
    disturbed("convolutions", (), fork_server, tmp_path / "whole", TAPS)
    disturbed("convolutions", kills, fork_server, tmp_path / "killed", TAPS)
    assert tapped_files(tmp_path / "killed" / "run") == tapped_files(tmp_path / "whole" / "run")
    (tmp_path / "killed" / "run" / "result.json").touch()  # which `train` writes
    taps = read_taps(tmp_path / "killed" / "run")
    assert taps.count() == plain.steps * 4
    assert taps.count(evaluation=True) == len(plain.rounds) * 2 * 4
    assert torch.equal(taps.read("conv2", evaluation=True).activations, evaluated(plain.averages))


def evaluated(averages: dict[int, dict[str, Any]]) -> torch.Tensor:
    """Outputs of conv2 with each round's averages for the rows held out, cut as they are evaluated."""
    source, found = images(6, 5), []
    model = build().eval()
    for state in averages.values():
        model.load_state_dict(state)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            for batch in source.held_out()[0].split(6):
                found += [model[:4](part) for part in batch.tensor_split(4)]
    return torch.cat(found)


def test_what_does_not_go_together_is_refused_by_name() -> None:
    asynchronous = sets_of({**TOGETHER, "schedule.mode": "async", "schedule.microbatches": 1})
    with pytest.raises(PlanRefused) as refused:
        read_plan(path_of("convolutions"), sets=asynchronous, environment={})
    for key in ("schedule.accumulate", "optimizer.clip_norm", "evaluation.every"):
        assert f"{key} = " in str(refused.value)
    for more, key in (({"taps.layers": ["conv1"]}, "taps.layers"), ({"schedule.accumulate": 3}, "model.prefix_cache")):
        plan = read_plan(path_of("convolutions"), sets=sets_of({**TOGETHER, **more, "run.steps": 9}), environment={})
        with pytest.raises(PlanRefused, match=f"{key} = "):
            prepare(plan)
