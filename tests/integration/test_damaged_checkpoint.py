"""Whole runs whose newest checkpoint is damaged: resumed, they begin at another, and end as undisturbed."""

from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from stageline.broker.control.sqlite_store import SqliteStore
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin
from stageline.workers.runs import folder as runs
from support import action_log
from support.fork_server import ForkServer, Kill
from support.redis_server import shared_server
from support.whole_run import WholeRun, expected, plan_in

STEPS = 16
LENGTH = f"run.steps={STEPS}"
Undisturbed = Callable[..., tuple[object, ...]]


# The model of a worker that is started again is built after the one before is gone, and before snapshots are read.
DAMAGING = """
from pathlib import Path

DAMAGES = True

def build(plain=build):
    for step in sorted(Path('FOLDER').glob("step-*"))[1:] if DAMAGES else ():
        (step / "weights.safetensors").unlink(missing_ok=True)
    return plain()
"""


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def unreadable(file: Path) -> None:
    file.unlink()
    file.mkdir()


def steps_of(run: WholeRun, stage: int) -> list[int]:
    return SnapshotDirectory(run.folder / "checkpoints", Origin("", "")).steps(stage)


def snapshot(run: WholeRun, stage: int, step: int) -> Path:
    return run.folder / "checkpoints" / f"stage-{stage}" / f"step-{step:010d}"


def stopped(fork_server: ForkServer, plan: Path, *sets: str, after: int = 4) -> tuple[WholeRun, int]:
    """A run that was interrupted, and its newest complete checkpoint."""
    going = WholeRun(fork_server, plan, LENGTH, *sets)
    going.until_checkpoint(after)
    going.stop()
    outcome = going.end()
    assert outcome["code"] == 75
    return going, complete_of(going)


def complete_of(run: WholeRun) -> int:
    """The newest complete checkpoint. The last status may be older: the workers' last words come after it."""
    with closing(SqliteStore(run.folder / runs.STORE)) as store:
        registry: Any = store.load().facts["registry"]
    return int(registry["checkpoints"]["complete"])


def came_to(outcome: dict[str, Any]) -> tuple[object, ...]:
    assert outcome["code"] == 0, outcome["reason"]
    return tuple(outcome["facts"][name] for name in ("weights_sha256", "losses", "last_loss", "metrics", "finished"))


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    @cache
    def run(*sets: str) -> tuple[object, ...]:
        return came_to(WholeRun(fork_server, plan_in(tmp_path_factory.mktemp("undisturbed")), LENGTH, *sets).end())

    return run


def older_than(run: WholeRun, newest: int) -> list[int]:
    """The steps before, of which both stages have a snapshot: one, or two if the newest was never announced. More after
    a stop at the end of a step, since nothing is announced while the workers come there."""
    return [step for step in besides(run, newest) if step < newest]


def besides(run: WholeRun, newest: int) -> list[int]:
    """All steps but this one, of which both stages have a snapshot. What is newer was not known to be complete."""
    return [step for step in steps_of(run, 0) if step != newest and step in steps_of(run, 1)]


@pytest.mark.slow
def test_the_complete_checkpoint_before_the_newest_is_kept_and_what_is_older_is_not(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    going = WholeRun(fork_server, plan_in(tmp_path), "run.steps=100")
    going.wait_for(lambda: all(min(steps_of(going, stage), default=0) > 2 for stage in (0, 1)))
    going.stop(at_step_end=False)
    assert going.end()["code"] == 75
    assert 1 <= len(older_than(going, complete_of(going))) <= 2


def lose_records(run: WholeRun) -> None:
    for file in run.folder.glob(f"{runs.STORE}*"):
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_a_resumed_run_without_records_goes_on_with_its_snapshots(
    damaged: bool, fork_server: ForkServer, tmp_path: Path
) -> None:
    """It was refused, as if there were no run."""
    plan = plan_in(tmp_path)
    before, _ = stopped(fork_server, plan)
    *_, older, newest = older_than(before, STEPS + 1)  # the broker may not have heard of the newest on the disks
    lose_records(before)
    if damaged:
        flip(snapshot(before, 1, newest) / "weights.safetensors")
    resumed = WholeRun(fork_server, plan, LENGTH, resume=True)
    assert resumed.digest() == expected(STEPS)
    assert "there are no records of run tiny here: asking all workers how far the run is" in resumed.log("broker")
    assert f"every stage begins at step {older if damaged else newest}" in resumed.log("broker")


@pytest.mark.slow
def test_a_run_whose_records_are_lost_after_its_last_step_knows_the_loss_of_that_step(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    plan, seldom = plan_in(tmp_path), "run.log_every=10"
    before = WholeRun(fork_server, plan, LENGTH, seldom)
    assert came_to(before.end()) == undisturbed(seldom)
    lose_records(before)
    resumed = WholeRun(fork_server, plan, LENGTH, seldom, resume=True)
    assert came_to(resumed.end()) == undisturbed(seldom)
    assert f"every stage begins at step {STEPS}" in resumed.log("broker")


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        pytest.param(flip, "weights.safetensors", marks=pytest.mark.slow),
        pytest.param(unreadable, "training.safetensors", marks=pytest.mark.slow),
        pytest.param(Path.unlink, "manifest.json", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_whose_newest_checkpoint_is_damaged_names_the_file_and_begins_at_the_newest_other(
    harm: Callable[[Path], None], name: str, fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    run, newest = stopped(fork_server, plan)
    other = besides(run, newest)[-1]
    damaged = snapshot(run, 1, newest)
    harm(damaged / name)
    resumed = WholeRun(fork_server, plan, LENGTH, resume=True)
    outcome = resumed.end()
    assert came_to(outcome) == undisturbed()
    assert outcome["facts"]["weights_sha256"] == expected(STEPS)
    damage, back = outcome["facts"]["damaged"]
    assert back == f"checkpoint {newest} cannot be used: the run begins at checkpoint {other} instead"
    for said in (damage, resumed.log("broker")):
        assert str(damaged) in said
        assert name in said
    assert f"checkpoint {newest} cannot be used: the run begins at checkpoint {other} instead" in resumed.log("broker")
    assert outcome["facts"]["restarts"] == 0


@pytest.mark.slow
def test_with_all_others_damaged_too_the_run_does_not_go_on_and_names_all(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    run, newest = stopped(fork_server, plan)
    others = besides(run, newest)
    for step in others:
        flip(snapshot(run, 0, step) / "weights.safetensors")
    flip(snapshot(run, 1, newest) / "training.safetensors")
    before = [steps_of(run, stage) for stage in (0, 1)]
    for _ in range(2):  # it is no other the second time
        outcome = WholeRun(fork_server, plan, LENGTH, resume=True).end()
        assert outcome["code"] == 1
        assert "there is no other one that can" in outcome["reason"]
        assert f"{snapshot(run, 1, newest)} cannot be used: training.safetensors" in outcome["reason"]
        for step in others:
            assert f"{snapshot(run, 0, step)} cannot be used: weights.safetensors" in outcome["reason"]
    assert [steps_of(run, stage) for stage in (0, 1)] == before


@pytest.mark.slow
@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "redis"])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("stage", [0, 1])
def test_messages_of_before_do_not_stand_in_the_way(
    url: str, mode: str, stage: int, fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    queues = shared_server().own_database() if url == "redis" else url
    sets = (f"queues.url={queues}", *(("schedule.mode=async", "schedule.microbatches=1") if mode == "async" else ()))
    plan = plan_in(tmp_path)
    run, newest = stopped(fork_server, plan, *sets)
    rmtree(snapshot(run, stage, newest))
    resumed = WholeRun(fork_server, plan, LENGTH, *sets, resume=True).end()
    assert len(resumed["facts"]["damaged"]) == 2  # what is damaged, and where the run begins
    assert came_to(resumed) == undisturbed(*sets[1:])


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[("worker-1", 3), ("worker-0", 9)], [("broker", 5)], [("broker", 60)]])
def test_a_run_that_has_gone_back_loses_processes_like_any_other(
    kills: list[Kill], fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    run, newest = stopped(fork_server, plan)
    flip(snapshot(run, 0, newest) / "weights.safetensors")
    again = WholeRun(fork_server, plan, LENGTH, resume=True, kills=kills)
    assert came_to(again.end()) == undisturbed()


@pytest.mark.slow
def test_a_worker_that_is_replaced_does_not_bring_the_others_back_and_names_what_does(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    model = plan.parent / "model.py"
    folder = tmp_path / "runs" / "tiny" / "checkpoints" / "stage-1"
    model.write_text(model.read_text() + DAMAGING.replace("FOLDER", str(folder)))
    going = WholeRun(fork_server, plan, LENGTH, kills=[("worker-1", 30)])
    outcome = going.end()
    assert any(entry.what == action_log.KILLED for entry in going.entries())
    assert outcome["code"] == 1
    assert "The other stages do not go back for one of them" in outcome["reason"]
    assert "--resume" in outcome["reason"]
    model.write_text(model.read_text().replace("DAMAGES = True", "DAMAGES = False"))
    resumed = WholeRun(fork_server, plan, LENGTH, resume=True)
    assert resumed.digest() == expected(STEPS)
