"""A user's feature adds an operation and a retained queue: gradient norms go to stage 0.

docs/project/adding.md shows it.
"""

import json
from pathlib import Path

import pytest

from stageline.pipeline.feature import FeatureFailed, FeatureRefused
from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import Job, prepare
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


NAMES, UPDATES = "gradnorms-", "program.before_updates(operations).with_queues(queues)"
END = "gradnorms-0, which has {}; expected {}"


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (NAMES, "Norms-", r"'Norms-0'"),
        (NAMES, "forward-", "'forward-0', and stageline has queues called forward"),
        (NAMES, "norms-", r"'norms-0', and stageline has queues called norms"),
        ('name=f"gradnorms', 'name=f"sizes', r"0G uses the queue gradnorms-0, which is not there"),
        ("per=Per.STEP", "per=Per.CALL", r"gradnorms-0 has per='call'.*Per\.STEP"),
        ("window=16", "window=-3", r"gradnorms-0 has window=-3; expected at least 1"),
        ("window=16", 'window=16, codec="zip"', r"gradnorms-0 has codec='zip'; expected one of lossless, bf16, int8"),
        ("window=16", 'window=16, codec="bf16"', r"gradnorms-0 has codec='bf16', and one message a step travels"),
        ("window=16", "window=0", r"gradnorms-0 has window=0; expected at least 1"),
        ("producer=owner(stage + 1)", "producer=9", END.format("producer=9 and source=1", "producer=1 and source=1")),
        ("source=stage + 1", "source=stage", END.format("producer=1 and source=0", "producer=1 and source=1")),
        ("consumer=owner(stage)", "consumer=2", END.format("consumer=2 and target=0", "consumer=0 and target=0")),
        ("target=stage,", "target=7,", END.format("consumer=0 and target=7", "consumer=0 and target=0")),
        ("takes, gives)", "takes)", r"a step puts into the queue gradnorms-0 0 times; expected 1"),
        ("takes, gives)", "(), gives)", r"a step takes from the queue gradnorms-0 0 times; expected 1"),
        ('"G"', '"g"', r"0g has the kind 'g'; expected one capital letter .*\bU\b"),
        ('"G"', '"GN"', r"0GN has the kind 'GN'; expected one capital letter"),
        ('Action("G"', 'Action("U"', "0U has the kind 'U'"),
        ('{"G": norms}', "{}", r"0G.*kind G.*handlers\(stage\)"),
        ('{"G": norms}', '{"G": None}', r"returned None from handlers\(\) for the kind G; expected a function"),
        ("def handlers", "def handler", r"method handler,.* did you mean handlers\?"),
        ("def lower", "def lowr", r"method lowr,.* did you mean lower\?"),
        (UPDATES, f"{UPDATES}.with_lists(lambda worker, ops: ops[1:])", r"0F0 of worker 0 is gone"),
        (
            UPDATES,
            f"{UPDATES}.with_lists(lambda worker, ops: ops[::-1])",
            r"with it, schedule 1f1b: worker 0 has 0U of step 0 before 0F2",
        ),
        (
            UPDATES,
            f"{UPDATES}.with_lists(lambda worker, ops: ops if worker else (ops[-2], *ops[:-2], ops[-1]))",
            r"with it, schedule 1f1b deadlocks: .*worker 0 waits at 0G of step 0.*gradnorms-0.*without it",
        ),
    ],
)
def test_additions_that_cannot_be_used_are_named_with_their_feature_before_the_run(
    workspace: Workspace, right: str, wrong: str, told: str
) -> None:
    with pytest.raises((FeatureRefused, FeatureFailed), match=f"the feature GradientNorms .*{told}"):
        changed(workspace, right, wrong).executor([0])


def test_a_handler_that_returns_what_cannot_travel_is_named_with_its_queue(
    workspace: Workspace, tmp_path: Path
) -> None:
    outcome = run_memory(changed(workspace, "return found", "return set(found)"), "alone", tmp_path / "alone")
    assert outcome.code == 1
    assert "the feature GradientNorms failed in 2G of step 0" in outcome.reason
    assert "for gradnorms-1, the payload is a builtins.set" in outcome.reason


def test_a_step_of_a_feature_that_failed_is_not_recorded_as_a_microbatch(workspace: Workspace, tmp_path: Path) -> None:
    outcome = run_memory(changed(workspace, "return found", "return found[9]"), "alone", tmp_path / "alone")
    assert "the feature GradientNorms failed in 2G of step 0: IndexError" in outcome.reason
    assert "replay" not in outcome.reason


def changed(workspace: Workspace, right: str, wrong: str) -> Job:
    sets = plan(workspace, "memory://")
    file = workspace.folder / "norms.py"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    return prepare(read_plan(workspace.folder, sets=sets))


def check(found: list[list[float]]) -> None:
    assert [len(each) for each in found] == [3, 3, 3]
    assert all(first > 0 and last > 0 for first, *_, last in found)
