"""Recomputation and offload are chosen for a limit of memory, by the counts of a trial."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import Plan, PlanRefused, read_plan
from stageline.workers.extras.preflight.memory_choice import chosen_memory
from stageline.workers.extras.preflight.trial import estimate
from stageline.workers.extras.preflight.trial_result import ChosenMemory
from support import reference
from support.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20
SUPPORT = Path(reference.__file__).parent
MODEL = """
from torch import nn

def build(writes=False):
    first = [nn.Linear(4, 4096), *([nn.ReLU(inplace=True)] if writes else [])]
    return nn.Sequential(*first, *(nn.Tanh() for _ in range(6)), nn.Linear(4096, 4), nn.Linear(4, 2))
"""
DATA = """
import torch
from stageline import Rows

def batches(batch_size, seed):
    return Rows(torch.ones(2048, 4), torch.zeros(2048, dtype=torch.int64), batch_size, seed)
"""
SETS = ("model.metrics=[]", "model.cut=[8]", "schedule.name=gpipe", "schedule.microbatches=4", "data.batch_size=2048")


@pytest.fixture
def wide(workspace: Workspace) -> Workspace:
    """Its first stage keeps seven tensors of 8 MiB of each of four microbatches, and hardly any weights."""
    workspace.write("model.py", MODEL)
    workspace.write("data.py", DATA)
    return workspace


def plan(workspace: Workspace, *sets: str) -> Plan:
    return read_plan(workspace.folder, sets=[*SETS, *sets])


def chosen(plan: Plan) -> ChosenMemory:
    return chosen_memory(plan, lambda what: None)


def test_with_room_for_all_nothing_is_done_and_nothing_left_open(wide: Workspace) -> None:
    wanted = plan(wide, "memory.limit=1GiB")
    found = chosen(wanted)
    assert found.keys == {
        "stage.0.recompute": "nothing",
        "stage.0.offload": [],
        "stage.1.recompute": "nothing",
        "stage.1.offload": [],
        "memory.tight": [],
    }
    assert wanted.chooses_memory
    assert not wanted.with_memory(found.keys).chooses_memory


def test_a_limit_that_only_just_has_room_is_tight_and_the_forecast_is_that_of_the_decision(wide: Workspace) -> None:
    """It is better to wait for snapshots than to recompute."""
    wanted = plan(wide, "memory.limit=270MiB")
    found = chosen(wanted)
    assert (found.keys["stage.0.recompute"], found.keys["stage.0.offload"]) == ("nothing", [])
    assert found.keys["memory.tight"] == [0]
    worker, ample = estimate(wanted.with_memory(found.keys)).workers
    assert (worker.tight, worker.bytes["snapshots"], ample.tight) == (True, 0, False)
    assert ample.bytes["snapshots"] > 0
    assert worker.ample is not None
    enough = chosen(plan(wide, f"memory.limit={worker.ample}"))
    assert enough.keys["memory.tight"] == []
    assert chosen(plan(wide, f"memory.limit={worker.ample - 1}")).keys["memory.tight"] == [0]
    kept = chosen(plan(wide, "memory.limit=270MiB", "memory.tight=[1]"))
    assert "memory.tight" not in kept.keys


@pytest.mark.slow
@pytest.mark.parametrize("limit", [230, 160])
def test_what_is_chosen_is_what_the_plan_then_foresees_within_its_limit(limit: int, wide: Workspace) -> None:
    wanted = plan(wide, f"memory.limit={limit}MiB")
    found = chosen(wanted)
    assert found.keys["stage.1.recompute"] == "nothing"
    assert (found.keys["stage.0.recompute"], found.keys["stage.0.offload"]) != ("nothing", [])
    assert found.stages[0].share > 0
    worker = estimate(wanted.with_memory(found.keys)).workers[0]
    assert worker.limit == limit * MIB
    assert worker.total <= limit * MIB * 7 // 8
    assert chosen(wanted) == found


@pytest.mark.slow
def test_what_the_plan_says_is_kept_and_the_rest_is_chosen(wide: Workspace) -> None:
    kept = chosen(plan(wide, "memory.limit=200MiB", "memory.offload=[]"))
    assert set(kept.keys) == {"stage.0.recompute", "stage.1.recompute", "memory.tight"}
    assert kept.keys["stage.0.recompute"] != "nothing"
    kept = chosen(plan(wide, "memory.limit=200MiB", "stage.0.recompute=nothing"))
    assert kept.keys["stage.0.offload"] == ["activations"]
    assert "stage.0.recompute" not in kept.keys


def test_a_worker_may_have_a_limit_of_its_own(wide: Workspace) -> None:
    owners = ("workers.0.stages=[1]", "workers.1.stages=[0]")
    found = chosen(plan(wide, *owners, "memory.limit=1MiB", "workers.1.memory=1GiB", "workers.0.memory=100MiB"))
    assert found.keys["stage.0.offload"] == []


@pytest.mark.slow
def test_where_nothing_fits_the_worker_the_closest_and_the_least_limit_are_named(wide: Workspace) -> None:
    with pytest.raises(PlanRefused) as refused:
        chosen(plan(wide, "workers.0.stages=[0]", "workers.1.stages=[1]", "workers.0.memory=20MiB"))
    (error,) = refused.value.errors
    assert error.key == "workers.0.memory"
    assert "worker 0 would take" in error.reason
    assert "with the closest choice: stage 0 with recompute" in error.reason
    enough = error.reason.partition('Use "')[2].partition('"')[0]
    assert chosen(plan(wide, f"memory.limit={enough}")).stages[0].share > 0


def test_a_limit_is_a_promise_of_the_plan_for_what_is_said_of_all_stages_too(wide: Workspace) -> None:
    said = ("stage.0.recompute=nothing", "stage.1.recompute=nothing", "memory.offload=[]")
    with pytest.raises(PlanRefused, match=r"memory.limit = 104857600: worker 0 would take \d+ bytes with what"):
        estimate(plan(wide, "memory.limit=100MiB", *said))


@pytest.mark.slow
def test_a_way_of_recomputing_that_the_model_does_not_allow_is_left_out(wide: Workspace) -> None:
    found = chosen(
        plan(wide, "model.options={ writes = true }", "model.cut=[9]", "memory.limit=200MiB", "memory.offload=[]")
    )
    assert found.keys["stage.0.recompute"] == "stage"
    (why,) = found.left_out
    assert 'recompute = "layers" is not considered' in why
    assert "writes to what it is given" in why


OTHERS = {
    "frozen stages": ("frozen",),
    "replicas": ("replicated", "stage.1.replicas=2"),
    "asynchronous": ("frozen", "schedule.mode=async", "schedule.microbatches=1"),
    "backwards in halves": ("frozen", "schedule.name=zb-h1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("folder", OTHERS)
def test_in_other_runs_too_the_limit_that_is_named_is_enough(folder: str) -> None:
    name, *sets = OTHERS[folder]
    with pytest.raises(PlanRefused) as refused:
        chosen(read_plan(SUPPORT / name, sets=[*sets, "memory.limit=1KiB"]))
    assert refused.value.errors
    assert {each.key for each in refused.value.errors} == {"memory.limit"}
    least = max(int(each.reason.partition('Use "')[2].partition("MiB")[0]) for each in refused.value.errors)
    enough = read_plan(SUPPORT / name, sets=[*sets, f"memory.limit={least}MiB"])
    found = chosen(enough)
    assert all(worker.limit for worker in estimate(enough.with_memory(found.keys)).workers)
    recomputed = {value for key, value in found.keys.items() if key.endswith(".recompute")}
    assert "zb" not in str(sets) or recomputed == {"nothing"}
