"""Findings of `stageline doctor` on this machine, and in a plan."""

from functools import partial

import pytest

from stageline.pipeline.plan import read_plan
from stageline.workers.extras.preflight.doctor import CheckResult, Health, examine
from stageline.workers.extras.preflight.trials import try_plan
from support.fork_server import ForkServer
from support.workspace import DATA, Workspace

ANY_PORT = "broker.url=tcp://127.0.0.1:0"


class Examine:
    """Examines this machine, and with `sets` the plan of a workspace."""

    def __init__(self, workspace: Workspace, fork_server: ForkServer) -> None:
        self._folder = workspace.folder
        self._spawn = fork_server.spawn

    def __call__(self, *sets: str) -> dict[str, CheckResult]:
        scratch = self._folder / "scratch"
        scratch.mkdir()
        arguments = [str(self._folder), *(argument for each in sets for argument in ("--set", each))]
        trial = partial(try_plan, arguments=arguments, spawn=self._spawn)
        plan = read_plan(self._folder, sets=sets) if sets else None
        return {finding.what: finding for finding in examine(plan, scratch, trial)}


@pytest.fixture
def findings(workspace: Workspace, fork_server: ForkServer) -> Examine:
    return Examine(workspace, fork_server)


def test_this_machine_is_fit(findings: Examine) -> None:
    found = findings()
    assert {"python", "torch", "memory", "hardware", "fingerprint", "ipc sockets"} <= found.keys()
    assert [finding for finding in found.values() if finding.health is Health.BAD] == []


def test_a_plan_that_works_is_computed_twice_with_the_same_bits(findings: Examine) -> None:
    found = findings(ANY_PORT)
    assert found["plan"].found.startswith("2 stages, 6 steps; digest ")
    assert "gave the same bits" in found["determinism"].found
    assert [finding for finding in found.values() if finding.health is Health.BAD] == []


def test_data_that_depends_on_more_than_the_seed_is_found(workspace: Workspace, findings: Examine) -> None:
    entropy = "int.from_bytes(__import__('os').urandom(4))"
    workspace.write("data.py", DATA.replace("manual_seed(1)", f"manual_seed({entropy})"))
    found = findings(ANY_PORT, "data.check=false")  # which lets `train` go on
    assert found["plan"].health is Health.GOOD
    assert found["determinism"].health is Health.BAD
    assert "batch(0) gave other values in another process: row 0 of inputs" in found["determinism"].found


def test_more_threads_than_cores_are_noted(findings: Examine) -> None:
    found = findings("workers.0.stages=[0,1]", "workers.0.threads=1000", "model.factory=model.py:none")
    assert found["threads"].health is Health.NOTE
    assert found["plan"].health is Health.BAD  # and nothing after it is tried
    assert "determinism" not in found
