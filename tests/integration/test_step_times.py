"""The broker, which makes its schedule without the model, tells the actions that each stage ran in a step.

It once chose among lists of actions by their length: for `2F0 2B0 2T0 2F1 ...` it told `2F0 2I0 2F1 2I1 ...`.
"""

from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stageline.broker.control.sqlite_store import SqliteStore
from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runs import folder as runs
from stageline.workers.runs.records import measured
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import prepare
from support import reference

FOLDER = Path(reference.__file__).parent
FROZEN = ('model.trainable=["tail.*", "head.*"]', "model.cut=[2, 4, 6, 8]")  # the first three of five stages
V_SHAPED = ("workers.0.stages=[0, 3]", "workers.1.stages=[1, 2]", "schedule.name=zb-v")
ASYNC = ("schedule.mode=async", "schedule.microbatches=1")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[str]]:
    """The actions that executors carry out in training steps, in order, by stage and step."""
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    within = Executor.within

    def noting(self: Executor, features: Any) -> Any:
        carry_out = within(self, features)

        def noted(instruction: Any, received: Any) -> Any:
            if instruction.counted and not instruction.evaluates:
                found[instruction.action.stage, instruction.step].append(str(instruction.action))
            return carry_out(instruction, received)

        return noted

    monkeypatch.setattr(Executor, "within", noting)
    return found


@pytest.mark.parametrize(
    ("model", "sets"),
    [
        ("frozen", (*FROZEN, "schedule.name=zb-h1")),
        ("frozen", (*FROZEN, "schedule.name=1f1b", "optimizer.clip_norm=0.5")),
        ("frozen", (*FROZEN, *ASYNC)),
        ("prefix", ()),
        ("tied", ("schedule.name=zb-h1",)),
        ("tied", ("schedule.name=zb-h1", "schedule.tied=step")),
        ("tied", V_SHAPED),
        ("tied", (*V_SHAPED, "optimizer.clip_norm=0.5")),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_the_records_of_a_run_tell_the_actions_that_its_stages_ran(
    model: str, sets: tuple[str, ...], ran: dict[tuple[int, int], list[str]], tmp_path: Path
) -> None:
    plan = read_plan(FOLDER / model / "stageline.toml", sets=sets, environment={})
    outcome = run_memory(prepare(plan), "run", tmp_path)
    assert outcome.code == 0, outcome.reason
    told: dict[tuple[int, int], list[str]] = defaultdict(list)
    with closing(SqliteStore(tmp_path / runs.STORE)) as store:
        for each in measured(store, plan.make_schedule(), range(outcome.facts["training_steps"])):
            told[each.action.stage, each.step].append(str(each.action))
    assert told == ran
