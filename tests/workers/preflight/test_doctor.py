"""What `stageline doctor` finds on this machine, and in a plan."""

from pathlib import Path

from stageline.pipeline.plan import Plan, read_plan
from stageline.workers.preflight.doctor import CheckResult, Health, examine
from support.workspace import DATA, Workspace


def findings(plan: Plan | None, folder: Path) -> dict[str, CheckResult]:
    folder.mkdir()
    return {finding.what: finding for finding in examine(plan, folder)}


def test_this_machine_is_fit(tmp_path: Path) -> None:
    found = findings(None, tmp_path / "scratch")
    assert {"python", "torch", "memory", "hardware", "fingerprint", "ipc sockets"} <= found.keys()
    assert [finding for finding in found.values() if finding.health is Health.BAD] == []


def test_a_plan_that_works_is_computed_twice_with_the_same_bits(workspace: Workspace, tmp_path: Path) -> None:
    found = findings(read_plan(workspace.folder, sets=["broker.url=tcp://127.0.0.1:0"]), tmp_path / "scratch")
    assert found["plan"].found.startswith("2 stages, 6 steps; digest ")
    assert "gave the same bits" in found["determinism"].found
    assert [finding for finding in found.values() if finding.health is Health.BAD] == []


def test_data_that_depends_on_more_than_the_seed_is_found(workspace: Workspace, tmp_path: Path) -> None:
    entropy = "int.from_bytes(__import__('os').urandom(4))"
    workspace.write("data.py", DATA.replace("manual_seed(1)", f"manual_seed({entropy})"))
    found = findings(read_plan(workspace.folder, sets=["broker.url=tcp://127.0.0.1:0"]), tmp_path / "scratch")
    assert found["determinism"].health is Health.BAD
    assert "depends on more than the seed" in found["determinism"].found


def test_more_threads_than_cores_are_noted(workspace: Workspace, tmp_path: Path) -> None:
    sets = ["workers.0.stages=[0,1]", "workers.0.threads=4096", "model.factory=model.py:none"]
    found = findings(read_plan(workspace.folder, sets=sets), tmp_path / "scratch")
    assert found["threads"].health is Health.NOTE
    assert found["plan"].health is Health.BAD  # and nothing after it is tried
    assert "determinism" not in found
