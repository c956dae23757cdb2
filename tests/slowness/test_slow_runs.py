"""Real runs that are slow for a known reason: `why` alone names it. All kinds are run by `slowness.slow_runs`."""

import json

import pytest

from slowness.slow_run import CASES, SlowCase, answer, causes, draw, train
from support.workspace import Workspace

CLEAR = (
    *("slow stage of 3", "slow source", "small window", "far link of 2 stages"),
    *("little credit", "little room", "much evaluation", "slow script"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAR)
def test_why_names_what_limits_a_run(name: str, workspace: Workspace) -> None:
    (case,) = (each for each in CASES if each.name == name)
    told: list[object] = []
    assert _is_named(case, 0, workspace, told) or _is_named(case, 1, workspace, told), told


def _is_named(case: SlowCase, seed: int, workspace: Workspace, told: list[object]) -> bool:
    """True if `why` names the drawn causes of a run, maybe besides others; what it says is added to `told`.

    A run lasts for seconds, on cores that other tests use: where these have held it up, that is what limits it, and
    `why` is right. So a kind has a second run.
    """
    drawn = draw(case, seed)
    found = causes(answer(drawn, workspace))
    told.append((drawn.right, found))
    return drawn.right <= found


@pytest.mark.slow
def test_with_a_clock_that_is_3_seconds_ahead_no_message_is_taken_before_it_was_sent(workspace: Workspace) -> None:
    (case,) = (each for each in CASES if each.name == "healthy, 3 stages")
    train(draw(case, 0).plan.replace("width =", "clock = 3.0, at = 1, width =", 1), workspace)
    asked = workspace.command("timetable", str(workspace.runs()[-1]), "--steps", "8..11", "--json")
    facts = json.loads(asked.stdout)
    (ahead,) = {each["ahead"] for each in facts["clocks"] if each["worker"] == 1}
    assert abs(ahead + 3.0) < 1.0
    for step in facts["steps"]:
        at = {(each["kind"], each["stage"], each["microbatch"]): each for each in step["actions"]}
        forward = [(at["F", stage, m], other) for (kind, stage, m), other in _of(at, "F", -1)]
        backward = [(at["B", stage, m], other) for (kind, stage, m), other in _of(at, "B", 1)]
        assert len(forward) == len(backward) > 0
        # Messages go both ways: three seconds that were left in would turn one of them round.
        assert all(sent["end"] <= taken["start"] for sent, taken in [*forward, *backward])
        lasts = max(each["end"] for each in step["actions"]) - min(each["start"] for each in step["actions"])
        assert step["seconds"] == pytest.approx(lasts, abs=0.01)


def _of(at: dict, kind: str, to: int) -> list:
    """Actions of a kind, each with the place of the action that sends to it, which is `to` stages further."""
    return [
        ((kind, stage + to, microbatch), each)
        for (found, stage, microbatch), each in at.items()
        if found == kind and (kind, stage + to, microbatch) in at
    ]
