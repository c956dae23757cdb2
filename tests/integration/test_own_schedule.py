"""A schedule that a function in one file lists: what it trains, how the plan keeps it, and what is refused."""

import json
import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import Line, ModelRefused, PlanRefused
from stageline.pipeline.model import own_schedule
from stageline.pipeline.model.own_schedule import read_plan
from stageline.pipeline.plan import Plan, from_mapping
from stageline.pipeline.schedule import Action
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer
from support.pages import named_files
from support.paths import DOCS, TESTS
from support.plain_loop import differing
from support.small_models import SMALL_MODELS
from support.workspace import Workspace, free_port

MINE = named_files(DOCS / "reference/schedules.md")["mine.py"]
MICROBATCHES = 6
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def mine(workspace: Workspace) -> Workspace:
    workspace.write("mine.py", MINE)
    return workspace


def sets(url: str = "memory://") -> list[str]:
    return [
        "schedule.name=mine.py:reverse",
        f"schedule.microbatches={MICROBATCHES}",
        "data.batch_size=32",
        "model.cut=[1, 2]",
        "run.seed=3",
        f"queues.url={url}",
    ]


def read(workspace: Workspace, *further: str) -> Plan:
    return read_plan(workspace.folder / "stageline.toml", sets=[*sets(), *further], environment={})


def test_a_function_that_does_not_return_is_refused_and_named(mine, monkeypatch) -> None:
    mine.write(
        "mine.py", "from threading import Event\n\n\ndef reverse(placement, microbatches):\n    Event().wait()\n"
    )
    monkeypatch.setattr(own_schedule, "LONGEST", 0.01)
    with pytest.raises(ModelRefused, match=r'"mine.py:reverse": called for .* has not returned for 0.01 s'):
        read(mine)


def expected(workspace: Workspace, *, descending: bool) -> str:
    recipe = reference.recipe(workspace.folder, batch_size=32, microbatches=MICROBATCHES, changes={"run.seed": 3})
    return reference.train(replace(recipe, descending=descending)).weights_sha256


@pytest.mark.parametrize("url", ["memory://", "ipc://"])
def test_gradients_are_added_in_the_order_that_the_function_lists(
    url: str, mine: Workspace, fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    if url == "memory://":
        outcome = run_memory(prepare(read(mine)), "run", folder)
        facts, code = outcome.facts, outcome.code
    else:
        told = fork_server.train(mine.folder, *sets(url), f"run.dir={tmp_path}", folder=folder)
        facts, code = told["facts"], told["code"]
    assert code == 0
    assert facts["weights_sha256"] == expected(mine, descending=True)
    assert facts["weights_sha256"] != expected(mine, descending=False)


def namespace() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(MINE, found)  # noqa: S102  # the example of the docs
    return found


@pytest.mark.parametrize(
    ("schedule", "workers"),
    [
        (namespace()["reverse"], "inline"),
        ("mine.py:reverse", "inline"),
        pytest.param(namespace()["reverse"], "processes", marks=pytest.mark.slow),
    ],
)
def test_a_script_gives_the_function_or_its_name(schedule: Any, workers: Any, mine: Workspace) -> None:
    small = SMALL_MODELS["transformer"]
    recipe = reference.Recipe(
        build=small.build,
        batch=lambda step: small.batch(step, 17),
        loss=small.loss,
        optimizer=SGD,
        lr_scheduler=None,
        seed=0,
        steps=4,
        microbatches=MICROBATCHES,
        descending=True,
    )
    with (
        chdir(mine.folder),
        Line(
            small.build,
            cut=small.cut,
            loss=small.loss,
            optimizer=SGD,
            schedule=schedule,
            microbatches=MICROBATCHES,
            workers=workers,
            folder=mine.folder,
        ) as line,
    ):
        for step in range(recipe.steps):
            line.step(*small.batch(step, 17))
        found = line.state_dict()
    assert not differing(found, reference.train(recipe).state)
    assert differing(found, reference.train(replace(recipe, descending=False)).state)


def test_the_rows_are_part_of_the_plan_which_needs_no_code_then(mine: Workspace) -> None:
    plan = read(mine)
    assert plan.origins["schedule.rows"] == "--set"
    assert list(plan.schedule.rows or ())[1].startswith("1F0,1F1,1F2,1F3,1F4,1F5,1B5,1B4,")
    (mine.folder / "mine.py").unlink()
    again = from_mapping(plan.as_mapping())
    assert again.digest() == plan.digest()
    assert again.make_schedule().workers == plan.make_schedule().workers
    assert again.make_schedule().descends
    tables: dict[str, Any] = plan.as_mapping()
    del tables["schedule"]["rows"]
    with pytest.raises(PlanRefused, match="it is called only where a plan file is read; pass its rows"):
        from_mapping(tables)


def test_another_order_of_the_same_function_is_another_plan(mine: Workspace) -> None:
    mine.write("other.py", MINE.replace("reversed(range(microbatches))", "range(microbatches)"))
    tables: dict[str, Any] = read(mine, "schedule.name=other.py:reverse").as_mapping()
    tables["schedule"]["name"] = "mine.py:reverse"
    assert from_mapping(tables).digest() != read(mine).digest()


def test_actions_may_be_objects(mine: Workspace) -> None:
    mine.write(
        "objects.py",
        "from stageline.pipeline.schedule import Action, Kind\n"
        "def listed(placement, microbatches):\n"
        "    kinds = Kind.FORWARD, Kind.BACKWARD\n"
        "    return [[Action(kind, stage, each) for kind in kinds for each in range(microbatches)]\n"
        "            for (stage,) in placement]\n",
    )
    assert read(mine, "schedule.name=objects.py:listed").make_schedule().workers[2][1] == Action("F", 2, 1)


WRONG = """
def fails(placement, microbatches):
    raise ValueError(f"not for {microbatches}")

def nothing(placement, microbatches):
    pass

def too_few(placement, microbatches):
    return [["0F0", "0B0"]]

def a_row_of_text(placement, microbatches):
    return [["0F0"], "1F0,1B0", ["2F0"]]

def a_number(placement, microbatches):
    return [["0F0"], ["1F0", 7], ["2F0"]]

def no_action(placement, microbatches):
    return [["0F0"], ["1F0", "1X0"], ["2F0"]]

def incomplete(placement, microbatches):
    return [[f"{stage}{kind}{each}" for kind in "FB" for each in range(microbatches - stage)] for (stage,) in placement]

def stuck(placement, microbatches):
    return [[f"{stage}{kind}{each}" for each in range(microbatches) for kind in "FB"] for (stage,) in placement[:2]] + [
        [f"2{kind}{each}" for kind in "FB" for each in range(microbatches)]]

number = 7
"""
ERRORS = [
    ("absent", "wrong.py has no 'absent'. It has: a_number, a_row_of_text, fails"),
    ("number", "it is of type int, which cannot be called"),
    ("fails", "called for ((0,), (1,), (2,)) and 6: ValueError: not for 6 ("),
    ("nothing", "it returned an object of type NoneType; expected a list with one list of actions for each worker"),
    ("too_few", "it returned 1 lists for 3 workers; expected a list with one list"),
    ("a_row_of_text", "for worker 1 it returned an object of type str; expected a list with one list"),
    ("a_number", 'action 1 of worker 1 is 7, of type int; expected text such as "1F0", or an Action'),
    ("no_action", 'in the rows that it returned, line 2, cell 2: "1X0" is no action; write the stage'),
    ("incomplete", "in the rows that it returned, line 2: 1F5, 1B5 are missing; a step has microbatches 0 to 5"),
    ("stuck", "in the rows that it returned, line 2, cell 2: 1B0 waits for 2B0"),
]


@pytest.mark.parametrize(("name", "reason"), ERRORS)
def test_what_is_wrong_is_told_with_the_function_and_the_way_out(name: str, reason: str, mine: Workspace) -> None:
    mine.write("wrong.py", WRONG)
    with pytest.raises((ModelRefused, PlanRefused)) as refused:
        read(mine, f"schedule.name=wrong.py:{name}")
    assert f'schedule.name = "wrong.py:{name}": ' in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("further", "reason"),
    [
        (["schedule.file=mine.csv"], 'name = "mine.py:reverse" does not use it'),
        (["stage.1.replicas=2"], 'schedule.name = "mine.py:reverse" does not support replicas'),
        (["schedule.microbatches=0"], "expected a whole number"),
    ],
)
def test_what_does_not_go_with_it_is_refused(further: Sequence[str], reason: str, mine: Workspace) -> None:
    mine.write("mine.csv", "0F0")
    with pytest.raises(PlanRefused) as refused:
        read(mine, *further)
    assert reason in str(refused.value)


def test_the_number_of_stages_must_be_known(mine: Workspace) -> None:
    file = mine.folder / "stageline.toml"
    file.write_text(file.read_text().replace("cut = [2]\n", ""))
    with pytest.raises(PlanRefused, match="the number of stages is not known then; set "):
        read_plan(file, sets=["schedule.name=mine.py:reverse"])
    assert read_plan(file, sets=["schedule.name=mine.py:reverse", "model.stages=2"]).make_schedule().descends


def test_a_script_is_told_of_its_argument(workspace: Workspace) -> None:
    def mine(placement: object, microbatches: int) -> list[list[str]]:
        return [[f"{stage}F0"] for stage in range(2)]

    def broken(placement: object, microbatches: int) -> object:
        raise ValueError("not yet")

    small = SMALL_MODELS["transformer"]
    line = partial(Line, small.build, cut=small.cut[:1], loss=small.loss, optimizer=SGD, folder=workspace.folder)
    with pytest.raises(PlanRefused, match='schedule = "script:mine": in the rows that it returned, line 1: 0B0'):
        line(schedule=mine)
    with pytest.raises(ModelRefused, match=r'schedule = "script:broken": called for .* and 4: ValueError: not yet'):
        line(schedule=broken)


def test_it_is_drawn_from_the_plan(mine: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    text = (mine.folder / "stageline.toml").read_text().replace("[schedule]", '[schedule]\nname = "mine.py:reverse"')
    mine.write("mine.toml", text)
    assert mine.here("schedule", "show", "mine.toml") == 0
    drawn = capfd.readouterr().out
    assert "mine.py:reverse, 2 stages on 2 workers, 3 microbatches" in drawn
    assert "in flight at most 3 on stage 0, 3 on stage 1" in drawn
    assert mine.here("schedule", "show", "mine.toml", "--stages", "2") == 2
    assert "mine.toml says --stages itself" in capfd.readouterr().err


REMOTE = f"""{MINE}

if __name__ == "__main__":
    import sys
    from functools import partial

    import torch

    import net
    from stageline import Line

    terms = {{"workers": "inline"}} if sys.argv[1] == "inline" else {{"broker": sys.argv[1]}}
    with Line(
        net.build,
        cut=[2],
        loss=torch.nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        schedule=reverse,
        microbatches=6,
        **terms,
    ) as line:
        for step in range(3):
            x = torch.randn(17, 6, generator=torch.Generator().manual_seed(step))
            line.step(x, x[:, :3].argmax(1))
        print(sum(weight.double().sum().item() for weight in line.state_dict().values()))
"""


@pytest.mark.slow
def test_workers_that_join_a_script_need_not_have_the_function(
    workspace: Workspace, tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "there").mkdir()
    address, said = f"tcp://127.0.0.1:{free_port()}", []
    with Workspace(tmp_path / "there", fork_server) as there:
        for machine in (workspace, there):
            shutil.copy(TESTS / "support" / "script" / "net.py", machine.folder)
        workspace.write("script.py", REMOTE)
        workers = [there.start("worker", "--join", address) for _ in range(2)]
        for terms in ("inline", address):
            script = workspace.start("script", str(workspace.folder / "script.py"), terms)
            printed, errors = script.communicate()
            assert script.returncode == 0, errors
            said.append(printed.splitlines()[-1])
        assert [worker.wait() for worker in workers] == [0, 0]
    assert said[0] == said[1]


def test_what_the_function_prints_is_not_part_of_a_result(mine: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    mine.write("mine.py", f'print("loaded")\n{MINE}')
    assert mine.here("plan", ".", "--json", *(each for text in sets() for each in ("--set", text))) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)
    assert "loaded" in err
