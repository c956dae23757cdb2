"""A run is checked and named before any process starts."""

from collections.abc import Iterator

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.launch.launch import Launch, prepare_launch, run_launch
from stageline.workers.launch.template import Template
from stageline.workers.runs import folder as runs
from support.fork_server import ForkServer, ServedTemplate
from support.workspace import Workspace

MEMORY = "queues.url=memory://"


@pytest.fixture(autouse=True)
def in_its_folder(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.folder)


@pytest.fixture
def template(fork_server: ForkServer) -> Iterator[Template]:
    with ServedTemplate(fork_server) as template:
        yield template


def prepared(workspace: Workspace, template: Template, *sets: str) -> Launch:
    arguments = [str(workspace.folder), *(argument for each in sets for argument in ("--set", each))]
    return prepare_launch(read_plan(workspace.folder, sets=sets), arguments, template)


def test_a_run_gets_a_folder_with_its_plan(workspace: Workspace, template: Template) -> None:
    launch = prepared(workspace, template, MEMORY)
    assert launch.folder.name == launch.run
    assert (launch.folder / runs.PLAN).exists()
    assert (launch.steps, launch.resumes) == (6, False)


def test_a_plan_that_cannot_work_leaves_no_folder(workspace: Workspace, template: Template) -> None:
    with pytest.raises(PlanRefused):
        prepared(workspace, template, "queues.retain_bytes=100")
    assert workspace.runs() == []


def test_a_finished_run_keeps_its_result(workspace: Workspace, template: Template) -> None:
    launch = prepared(workspace, template, MEMORY)
    ended = run_launch(launch, [], lambda facts: None, template)
    assert (ended.code, ended.timed) == (0, ())
    assert ended.result is not None
    assert ended.result.weights_sha256 in (launch.folder / runs.RESULT).read_text()
