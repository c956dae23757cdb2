"""`stageline checkpoint` on the folder of a run that was stopped, and of one that goes on from it."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from stageline.pipeline.plan import read_plan
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin
from stageline.workers.cli.schemas import schema_of
from support.answers import conforming
from support.workspace import MODEL, PLAN, Workspace

LAYOUT = ("--set", "model.cut=[1]")


@pytest.fixture
def run(workspace: Workspace) -> Path:
    """Of a run that has finished all its steps."""
    sets = ("--set", "recovery.snapshot_every=2", "--set", "data.check=false", "--set", "model.cut=[2]")
    train = workspace.command("train", ".", *sets)
    assert train.returncode == 0, train.stderr
    (folder,) = workspace.runs()
    return folder


def answer(workspace: Workspace, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    capsys.readouterr()
    assert workspace.here("checkpoint", *arguments, "--json") == 0, capsys.readouterr().err
    return conforming(capsys.readouterr().out)


def error(workspace: Workspace, capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    capsys.readouterr()
    assert workspace.here(*arguments) == code
    return capsys.readouterr().err


def test_checkpoints_are_listed_verified_split_and_converted(workspace, run, capsys):
    name = str(run)
    listed = answer(workspace, capsys, "ls", name)
    jsonschema.validate(listed, schema_of("checkpoint-ls/1"))
    assert [(row["stages"], row["complete"]) for row in listed["checkpoints"]] == [([0, 1], True)] * len(
        listed["checkpoints"]
    )
    assert listed["checkpoints"][-1]["step"] == 6
    verified = answer(workspace, capsys, "verify", name, "--step", "6")
    jsonschema.validate(verified, schema_of("checkpoint-verify/1"))
    assert len(verified["snapshots"]) == 2

    assert workspace.here("export", name, "whole.safetensors") == 0
    assert workspace.here("export", name, "parts", "--format", "stages", "--step", "6") == 0
    assert workspace.here("checkpoint", "import", "parts", "again.safetensors") == 0
    whole, again = (load_file(workspace.folder / f"{name}.safetensors") for name in ("whole", "again"))
    assert whole.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"} == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert workspace.here("checkpoint", "import", "again.safetensors", "cut", "--plan", ".", *LAYOUT) == 0
    assert load_file(workspace.folder / "cut/stage-1.safetensors").keys() == {"2.weight", "2.bias"}
    config = workspace.folder / "config.json"
    config.write_text('{"model_type": "mine"}')
    export = ("export", name, "hub", "--format", "transformers")
    assert "without a config of transformers: name a folder with its config.json by --config FOLDER" in error(
        workspace, capsys, 2, *export
    )
    assert workspace.here(*export, "--config", "config.json") == 0
    assert "is not overwritten" in error(workspace, capsys, 2, *export, "--config", "config.json")

    shown = answer(workspace, capsys, "split", name, *LAYOUT)
    assert [(row["stage"], row["old_stages"], row["absent"]) for row in shown["stages"]] == [(0, [0], []), (1, [1], [])]
    three = answer(workspace, capsys, "split", name, "--set", "model.stages=3")
    assert [row["worker"] for row in three["stages"]] == [0, 1, 2]
    elsewhere = workspace.folder / "elsewhere" / run.name
    for part in ("plan.json", "process.json", "checkpoints/stage-1"):
        source, target = run / part, elsewhere / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    half = ("split", str(elsewhere), *LAYOUT, "--step", "6")
    lacking = answer(workspace, capsys, *half)
    assert [len(row["absent"]) for row in lacking["stages"]] == [1, 0]
    assert lacking["new_run"] == shown["new_run"]
    refused = error(workspace, capsys, 2, "checkpoint", *half, "--write")
    assert "stage-0/step-0000000006 is not there, with the layers 0. Copy it from the machine" in refused
    assert answer(workspace, capsys, *half, "--worker", "1", "--write")["written"]
    made = read_plan(str(workspace.folder), sets=[*LAYOUT[1:], "recovery.snapshot_every=2"]).resolved(2)
    origin = Origin(shown["new_run"], made.digest())
    assert SnapshotDirectory(elsewhere.with_name(shown["new_run"]) / "checkpoints", origin).verify(1, 6) == []


@pytest.mark.slow
def test_what_would_change_the_bits_or_is_damaged_is_refused_before_anything_runs(workspace, run, capsys):
    (run / "result.json").unlink()
    resume = ("train", ".", "--resume", run.name, "--set", "recovery.snapshot_every=2", "--set", "data.check=false")
    for odd, named in (
        ("optimizer.factory=torch.optim.AdamW", "optimizer.factory"),
        ("schedule.microbatches=2", "schedule.microbatches: 2 here, 3 there"),
        ("data.batch_size=12", "data.batch_size"),
        ("recovery.on_bad_microbatch=skip", "recovery.on_bad_microbatch"),
    ):
        assert named in error(workspace, capsys, 78, *resume, *LAYOUT, "--set", odd)
    threads = ("--set", "workers.0.stages=[0, 1]", "--set", "workers.0.threads=2")
    assert "with threads = 2, and its layers did on cpu with threads = 1" in error(
        workspace, capsys, 78, *resume, *threads
    )
    assert '"memory://"' in error(workspace, capsys, 78, *resume, *LAYOUT, "--set", "queues.url=memory://")
    workspace.write("model.py", MODEL.replace("nn.Linear(8, 2)", "nn.Linear(8, 3)"))
    assert "2.weight is float32 [2, 8] there, the model wants float32 [3, 8]" in error(
        workspace, capsys, 78, *resume, *LAYOUT
    )
    for file in run.glob("checkpoints/stage-1/step-*/weights.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    workspace.write("model.py", MODEL)
    damaged = error(workspace, capsys, 1, *resume, *LAYOUT)
    assert "weights.safetensors" in damaged
    assert "damaged" in error(workspace, capsys, 1, "checkpoint", "verify", str(run))
    shutil.rmtree(run / "checkpoints" / "stage-1")
    assert "stage-1/step-0000000006 is not there, with the layers 2" in error(workspace, capsys, 2, *resume, *LAYOUT)
    assert workspace.runs() == [run]


@pytest.mark.slow
def test_a_run_in_another_layout_whose_snapshots_are_not_all_there_begins_only_once_they_are(workspace, run, capsys):
    """It began at step 0, and said nothing."""
    (run / "result.json").unlink()
    for newest in run.glob("checkpoints/stage-*/step-0000000006"):
        shutil.rmtree(newest)
    sets = ("--set", "recovery.snapshot_every=2", "--set", "data.check=false", *LAYOUT)
    made = answer(workspace, capsys, "split", str(run), *LAYOUT, "--worker", "0", "--write")["new_run"]
    folder = run.with_name(made)
    refused = error(workspace, capsys, 1, "train", ".", "--resume", made, *sets)
    assert f"from step 4 of {run.relative_to(workspace.folder)}, and does not begin below it." in refused
    assert "stage 1 must have" in refused
    assert "--step 4 --worker 1 --write`" in refused
    (folder / "checkpoints/stage-0/step-0000000004/weights.safetensors").write_bytes(b"damaged")
    assert workspace.here("train", ".", "--resume", run.name, *sets) == 0
    assert "every stage begins at step 4" in (folder / "broker.log").read_text()


@pytest.mark.slow
def test_split_takes_the_checkpoint_of_the_best_evaluation_along_and_says_if_it_cannot(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    keeping = "\n[evaluation]\nevery = 2\nbetter = 'higher'\nkeep_best = true\n[recovery]\nsnapshot_every = 2\n"
    workspace.write("stageline.toml", PLAN + keeping)
    train = workspace.command("train", ".", "--set", "data.check=false")
    assert train.returncode == 0, train.stderr
    (run,) = workspace.runs()
    (run / "result.json").unlink()
    best = run / "checkpoints/stage-1/step-0000000002"
    assert best.is_dir()
    found = answer(workspace, capsys, "split", str(run), *LAYOUT, "--set", "data.check=false", "--write")
    last = str(run / "checkpoints/stage-1/step-0000000006")
    row = found["stages"][1]
    assert [row[key] for key in ("snapshots", "absent", "best_snapshots", "best_absent")] == [
        [last],
        [],
        [str(best)],
        [],
    ]
    assert answer(workspace, capsys, "ls", str(run.with_name(found["new_run"])))["checkpoints"][0]["best"]
    shutil.rmtree(best)
    shutil.rmtree(run.with_name(found["new_run"]))
    row = answer(workspace, capsys, "split", str(run), *LAYOUT, "--set", "data.check=false")["stages"][1]
    assert (row["absent"], row["best_absent"]) == ([], [str(best)])
    assert workspace.here("checkpoint", "split", str(run), *LAYOUT, "--set", "data.check=false", "--write") == 0
    assert f"{best} is not there" in capsys.readouterr().err
    assert [path.name for path in run.with_name(found["new_run"]).glob("checkpoints/stage-1/*")] == ["step-0000000006"]


def test_replicas_go_by_the_names_that_other_commands_show(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot of replica 1.1 was called stage 2, and --stage 1.1 was refused."""
    run = workspace.folder / "runs" / "small-1"
    plan = read_plan(workspace.folder, sets=["stage.1.replicas=2"]).resolved(2)
    (run / "checkpoints/stage-2/step-0000000004").mkdir(parents=True)
    (run / "plan.json").write_text(json.dumps(plan.as_mapping()))
    assert workspace.here("checkpoint", "verify", str(run)) == 1
    assert capsys.readouterr().out.startswith("stage 1.1, step 4: damaged: ")
    place = ("--step", "4", "--microbatch", "1")
    assert "has recorded nothing" in error(workspace, capsys, 2, "replay", str(run), "--stage", "1.1", *place)
    assert "there is no stage 1.2" in error(workspace, capsys, 2, "replay", str(run), "--stage", "1.2", *place)
    assert "'last' is no stage" in error(workspace, capsys, 2, "why", "--stage", "last")
