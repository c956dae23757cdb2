"""Pairs of features that a plan cannot have together: each row is met by a plan, and docs list them all."""

import re

import pytest

from stageline.pipeline.plan.refusals import REFUSED, Refusal, refused_inline
from stageline.pipeline.plan.traits import HALVING
from stageline.pipeline.schedule import ScheduleRefused, make_schedule, schedule_names
from support.paths import ROOT
from support.small_plans import plan, refusal


def test_docs_list_every_pair_with_its_reason() -> None:
    page = (ROOT / "docs" / "reference" / "plan.md").read_text()
    told = re.findall(r"^\| (.+?) \| (.+?) \| (mathematical|physical|not built) \| (.+?) \|$", page, re.MULTILINE)
    assert told == [(row.trait.name, row.beside.name, str(row.why), row.text) for row in REFUSED]


def test_no_pair_is_listed_twice() -> None:
    pairs = [frozenset({row.trait.name, row.beside.name}) for row in REFUSED]
    assert len(set(pairs)) == len(pairs)


def test_the_schedules_that_split_backwards_are_those_of_the_catalogue() -> None:
    halving = set()
    for name in schedule_names():
        for placement in (((0,), (1,)), ((0, 3), (1, 2))):
            try:
                halving |= {name} if make_schedule(name, placement, 4).halves_backwards else set()
            except ScheduleRefused:
                continue
    assert halving == set(HALVING)


REPLICATED = {"stage": {"1": {"replicas": 2}}, "schedule__microbatches": 2}
GROUPED = {"stage": {"1": {"shard": 2}}}


@pytest.mark.parametrize(
    ("changes", "key", "beside"),
    [
        ({**REPLICATED, "optimizer__clip_norm": 1.0}, "stage.1.replicas", "optimizer.clip_norm = 1.0"),
        ({**REPLICATED, "taps": {"layers": ["0"]}}, "stage.1.replicas", "taps"),
        ({**GROUPED, "optimizer__ema_decay": 0.5}, "stage.1.shard", "optimizer.ema_decay = 0.5"),
        ({**GROUPED, "memory__recompute": "stage"}, "stage.1.shard", 'memory.recompute = "stage"'),
        ({"schedule__name": "zb-h1", "memory__recompute": "stage"}, "memory.recompute", 'schedule.name = "zb-h1"'),
        (
            {"queues__url": "memory://", "evaluation": {"keep_best": True, "every": 1}},
            "evaluation.keep_best",
            "memory://",
        ),
    ],
)
def test_a_pair_is_refused_on_one_key_and_names_the_other(changes: dict[str, object], key: str, beside: str) -> None:
    found = [error for error in refusal(**changes) if error.key == key]
    assert [error for error in found if beside in error.reason], found


def test_two_that_meet_in_no_stage_are_no_pair() -> None:
    apart = {"0": {"recompute": "stage"}, "1": {"shard": 2}}
    assert plan(stage=apart).stage_plan(1).shard == 2
    together = refusal(stage={"1": {"recompute": "stage", "shard": 2}})
    assert [(error.key, "stage.1.recompute" in error.reason) for error in together] == [("stage.1.shard", True)]


def test_what_inline_workers_cannot_have_is_told_of_a_plan_that_is_sound() -> None:
    skipping = plan(recovery__on_bad_microbatch="skip", memory__offload=["activations"])
    assert {error.key for error in refused_inline(skipping)} == {"recovery.on_bad_microbatch", "memory.offload"}
    assert not list(refused_inline(plan()))


def test_a_row_is_a_value() -> None:
    assert all(isinstance(row, Refusal) and row.text for row in REFUSED)
