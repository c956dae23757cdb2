"""A feature of the user's adds an operation and a retained queue: each step's gradient norms go to stage 0."""

import json
from pathlib import Path

from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support.fork_server import ForkServer
from support.workspace import Workspace

FEATURE = """
import json
import pathlib

from stageline import Feature
from stageline.pipeline.program import Per, Queue
from stageline.pipeline.schedule import Action

FILE = pathlib.Path("FOLDER") / "norms.json"


class GradientNorms(Feature):
    # Each stage sends the norms of its gradients, and of those after it, to the stage before it.

    def lower(self, program):
        owner, last = program.schedule.owner, program.last

        def added(stages):
            for stage in sorted(stages, reverse=True):
                takes = [f"gradnorms-{stage}"] if stage < last else []
                gives = [f"gradnorms-{stage - 1}"] if stage else []
                yield program.made(Action("G", stage), takes, gives)

        queues = [
            Queue(
                name=f"gradnorms-{stage}",
                producer=owner(stage + 1),
                consumer=owner(stage),
                source=stage + 1,
                target=stage,
                per=Per.STEP,
                window=16,
            )
            for stage in range(last)
        ]
        return program.before_updates(added).with_queues(queues)

    def handlers(self, stage):
        def norms(operation, received):
            squares = [parameter.grad.square().sum().item() for parameter in stage.trainable().values()]
            found = [sum(squares) ** 0.5, *(received[0] if received else ())]
            if stage.index == 0:
                with FILE.open("a") as file:
                    print(json.dumps(found), file=file)
            return found

        return {"G": norms}
"""


def plan(workspace: Workspace, url: str) -> list[str]:
    workspace.write("norms.py", FEATURE.replace("FOLDER", str(workspace.folder)))
    return ['features=["norms.py:GradientNorms"]', "model.cut=[1,2]", f"queues.url={url}", "run.steps=3"]


def norms(workspace: Workspace) -> list[list[float]]:
    return [json.loads(line) for line in (workspace.folder / "norms.json").read_text().splitlines()]


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


def check(found: list[list[float]]) -> None:
    assert [len(each) for each in found] == [3, 3, 3]
    assert all(first > 0 and last > 0 for first, *_, last in found)
