"""A user's feature adds an operation and a retained queue: gradient norms go to stage 0.

docs/project/adding.md shows it.
"""

import json
from pathlib import Path

import pytest

from stageline.pipeline.feature import FeatureFailed
from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support.fork_server import ForkServer
from support.pages import named_files
from support.paths import ROOT
from support.workspace import Workspace

PAGE = ROOT / "docs" / "project" / "adding.md"


def plan(workspace: Workspace, url: str) -> list[str]:
    workspace.write("norms.py", named_files(PAGE)["norms.py"])
    return ['features=["norms.py:GradientNorms"]', "model.cut=[1,2]", f"queues.url={url}", "run.steps=3"]


def norms(workspace: Workspace) -> list[list[float]]:
    return [json.loads(line) for line in (workspace.folder / "norms.jsonl").read_text().splitlines()]


def test_the_first_stage_has_the_norms_of_all_stages_of_each_step(workspace: Workspace, tmp_path: Path) -> None:
    job = prepare(read_plan(workspace.folder, sets=plan(workspace, "memory://")))
    assert run_memory(job, "alone", tmp_path / "alone").code == 0
    check(norms(workspace))


def test_over_sockets_it_has_them_too(workspace: Workspace, fork_server: ForkServer, tmp_path: Path) -> None:
    outcome = fork_server.train(
        workspace.folder, *plan(workspace, "ipc://"), f"run.dir={tmp_path}", folder=tmp_path / "run"
    )
    assert outcome["code"] == 0, outcome["reason"]
    check(norms(workspace)[-3:])  # after those of the trial


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ('name=f"Norms-{stage}"', r"the feature GradientNorms failed in lower\(\): .*'Norms-0'"),
        ('name=f"norms-{stage}"', r"failed in lower\(\): .*0G uses the queue gradnorms-0, which is not there"),
    ],
)
def test_queues_that_cannot_be_used_are_named_before_the_run(workspace: Workspace, wrong: str, told: str) -> None:
    sets = plan(workspace, "memory://")
    file = workspace.folder / "norms.py"
    file.write_text(file.read_text().replace('name=f"gradnorms-{stage}"', wrong))
    with pytest.raises(FeatureFailed, match=told):
        prepare(read_plan(workspace.folder, sets=sets))


def check(found: list[list[float]]) -> None:
    assert [len(each) for each in found] == [3, 3, 3]
    assert all(first > 0 and last > 0 for first, *_, last in found)
