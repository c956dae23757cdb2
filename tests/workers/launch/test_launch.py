"""A run is checked and named before any process starts."""

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.launch.launch import prepare_launch, run_launch
from stageline.workers.launch.template import Template
from stageline.workers.runs import folder as runs
from support.workspace import Workspace

MEMORY = "queues.url=memory://"


@pytest.fixture(autouse=True)
def in_its_folder(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.folder)


def test_a_run_gets_a_folder_with_its_plan(workspace: Workspace) -> None:
    launch = prepare_launch(read_plan(workspace.folder, sets=[MEMORY]))
    assert launch.folder.name == launch.run
    assert (launch.folder / runs.PLAN).exists()
    assert (launch.steps, launch.resumes) == (6, False)


def test_a_plan_that_cannot_work_leaves_no_folder(workspace: Workspace) -> None:
    plan = read_plan(workspace.folder, sets=["queues.retain_bytes=100"])
    with pytest.raises(PlanRefused):
        prepare_launch(plan)
    assert not list(plan.run.dir.glob("*"))


def test_a_finished_run_keeps_its_result(workspace: Workspace) -> None:
    launch = prepare_launch(read_plan(workspace.folder, sets=[MEMORY]))
    with Template() as template:
        ended = run_launch(launch, [], lambda facts: None, template)
    assert (ended.code, ended.timed) == (0, ())
    assert ended.result is not None
    assert ended.result.weights_sha256 in (launch.folder / runs.RESULT).read_text()
