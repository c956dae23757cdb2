"""A stage that a group of processes computes: split layers within rounding, shards to the bit, also after kills."""

import shutil
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.plan import PlanRefused, from_mapping, read_plan
from stageline.workers.runtime.job import prepare, prepare_model
from support import reference
from support.fork_server import ForkServer
from support.workspace import Workspace, until, wait_for

FOLDER = Path(reference.__file__).parent / "grouped"
CONFIG = FOLDER / "stageline.toml"
STYLES = 'stage.1.styles={"*.linear1"="colwise", "*.linear2"="rowwise"}'
TENSOR, SHARD = ("stage.1.tensor=2", STYLES), ("stage.1.shard=2",)
V_SHAPED = ("model.cut=[1, 2, 3]", "workers.0.stages=[0, 3]", "workers.1.stages=[1, 2]")
BESIDE = 14  # a forward of stage 1 in step 3: the checkpoint of step 2 is there, and microbatches are in flight

SHARED = """

def shared():
    *layers, head = build()
    again = nn.Linear(16, 3)
    again.weight = head.weight
    return nn.Sequential(*layers, head, nn.Linear(3, 16), again)
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def plain(dropout: float = 0.0, file: str = "stageline.toml") -> reference.ReferenceResult:
    return reference.train(reference.recipe(FOLDER, file=file, changes={"model.options.dropout": dropout}))


def run(fork_server: ForkServer, home: Path, *sets: str, kills: Sequence[Any] = ()) -> dict[str, Any]:
    """The broker's last status of a run to its end, of which nothing is left."""
    every = [f"run.dir={home}", *sets]
    outcome = fork_server.train(CONFIG, *every, folder=home / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert not outcome.get("not killed")
    assert (outcome["orphans"], outcome["left"]) == ([], [])
    facts: dict[str, Any] = outcome["facts"]
    return facts


def losses(facts: dict[str, Any]) -> list[float]:
    return [facts["losses"][str(step)] for step in range(6)]


@pytest.mark.slow
def test_a_sharded_stage_whose_leader_is_killed_has_the_bits_of_the_unsplit_run(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    facts = run(fork_server, tmp_path, *SHARD, "model.options.dropout=0.1", kills=[("worker-1", 20)])
    assert facts["weights_sha256"] == plain(0.1).weights_sha256
    assert losses(facts) == plain(0.1).losses


@pytest.mark.slow
def test_a_fork_that_comes_back_from_a_forward_is_no_process_of_the_group(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    options = (f"model.options.note={tmp_path / 'note'}", f"model.options.at={BESIDE}")
    facts = run(fork_server, tmp_path, *SHARD, *options)
    assert facts["restarts"] == 0
    assert facts["weights_sha256"] == plain().weights_sha256
    assert "was forked from pid" in (tmp_path / "run" / "worker-1.log").read_text()


@pytest.mark.slow
def test_all_stages_may_be_sharded(fork_server: ForkServer, tmp_path: Path) -> None:
    shards = [f"stage.{stage}.shard={size}" for stage, size in enumerate((2, 4, 2))]
    assert run(fork_server, tmp_path, *shards)["weights_sha256"] == plain().weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_split_stage_is_the_unsplit_one_within_rounding_and_a_new_group_has_the_same_bits(
    number: signal.Signals, fork_server: ForkServer, tmp_path: Path
) -> None:
    undisturbed = run(fork_server, tmp_path / "undisturbed", *TENSOR)
    assert losses(undisturbed) == pytest.approx(plain().losses, rel=1e-5)
    assert undisturbed["weights_sha256"] != plain().weights_sha256  # it was split
    note = tmp_path / "note"
    ended = [f'model.options.note="{note}"', f"model.options.at={BESIDE}", f"model.options.number={int(number)}"]
    disturbed = run(fork_server, tmp_path / "disturbed", *TENSOR, *ended, "recovery.action=3")
    assert note.exists()
    assert disturbed["restarts"] == 1
    assert disturbed["weights_sha256"] == undisturbed["weights_sha256"]
    killed = run(fork_server, tmp_path / "killed", *TENSOR, kills=[("worker-1", 30)])
    assert killed["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_norms_of_split_and_whole_gradients_are_clipped_together(fork_server: ForkServer, tmp_path: Path) -> None:
    split = run(fork_server, tmp_path / "split", *TENSOR, "optimizer.clip_norm=0.5")
    single = run(fork_server, tmp_path / "single", "optimizer.clip_norm=0.5")
    assert losses(split) == pytest.approx(losses(single), rel=1e-5)
    assert split["gradient_norm"]["norm"] == pytest.approx(single["gradient_norm"]["norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(TENSOR, ()), (SHARD, TENSOR)])
def test_a_run_goes_on_with_another_number_of_processes(
    before: tuple[str, ...], after: tuple[str, ...], workspace: Workspace
) -> None:
    for file in FOLDER.glob("*.*"):
        shutil.copy(file, workspace.folder)
    long = ("--set", "run.steps=80", "--set", "recovery.snapshot_every=10")
    train = workspace.start("train", ".", "--json", *long, *_sets(before))
    until(train.stderr, "logs in")
    folder = workspace.runs()[0]
    wait_for(lambda: len(list(folder.glob("checkpoints/stage-1/step-*"))) > 1)
    train.send_signal(signal.SIGTERM)
    _, printed = train.communicate()
    assert train.returncode == 75, printed
    ended = workspace.command("train", ".", "--json", *long, *_sets(after), "--resume", folder.name)
    assert ended.returncode == 0, ended.stderr
    last = reference.train(reference.recipe(FOLDER, steps=80)).losses[-1]
    assert float(ended.stdout.partition('"loss":')[2].partition(",")[0]) == pytest.approx(last, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_dropout_between_split_layers_is_refused_by_plan(workspace: Workspace) -> None:
    for file in FOLDER.glob("*.*"):
        shutil.copy(file, workspace.folder)
    refused = workspace.command("plan", ".", *_sets((*TENSOR, "model.options.dropout=0.1")))
    assert refused.returncode == 78
    assert "random numbers were drawn for what 1.0.linear1 returns" in refused.stderr


@pytest.mark.parametrize(
    ("sets", "key", "reason"),
    [
        (("stage.1.tensor=2",), "stage.1.tensor", "set which layers are split"),
        ((STYLES,), "stage.1.styles", "they require several processes"),
        (("stage.1.tensor=2", 'stage.1.styles={"*.linear1"="col"}'), "stage.1.styles", "'col' is not a style"),
        ((*TENSOR, *SHARD), "stage.1.shard", "keep one of the two"),
        ((*SHARD, "queues.url=memory://"), "stage.1.shard", "one process computes all stages"),
        ((*SHARD, "schedule.mode=async", "schedule.microbatches=1"), "stage.1.shard", "one version"),
        (
            (*SHARD, "optimizer.ema_decay=0.9"),
            "stage.1.shard",
            "ema_decay = 0.9 does not support split weights",
        ),
        (
            (*SHARD, "recovery.on_bad_microbatch=skip"),
            "stage.1.shard",
            'on_bad_microbatch = "skip" does not support several',
        ),
        ((*SHARD, "recovery.record=all"), "stage.1.shard", 'recovery.record = "all" does not support several'),
        ((*SHARD, "memory.recompute=stage"), "stage.1.shard", "recompute does not support split layers"),
        ((*SHARD, 'memory.offload=["activations"]'), "stage.1.shard", "offload does not support several processes"),
        (
            (*SHARD, "schedule.name=auto", "schedule.memory=1GiB"),
            "stage.1.shard",
            '"auto" does not support several processes',
        ),
        ((*SHARD, "schedule.name=zb-h1"), "stage.1.shard", "splits backwards in two"),
        ((*SHARD, *V_SHAPED, "schedule.name=zb-v"), "stage.1.shard", "splits backwards in two"),
        ((*SHARD, *V_SHAPED, "schedule.name=dualpipe-v"), "stage.1.shard", "splits backwards in two"),
        ((*SHARD, "stage.1.replicas=2"), "stage.1.shard", "a stage with replicas cannot have several processes"),
        ((*SHARD, "stage.0.shard=2", "workers.0.stages=[0, 1]", "workers.1.stages=[2]"), "workers.0.stages", "own"),
        (("stage.x.shard=2",), "stage.x", "numbered from 0"),
    ],
)
def test_what_a_group_cannot_have_is_refused_by_its_key(sets: tuple[str, ...], key: str, reason: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        read_plan(CONFIG, sets=sets, environment={})
    assert any(error.key == key and reason in error.reason for error in refused.value.errors)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (('stage.1.styles={"*.linear9"="colwise"}',), 'no linear or embedding layer of the stage matches "*.linear9"'),
        (('stage.1.styles={"*.out_proj"="colwise"}',), 'matches "*.out_proj"'),
        (('stage.1.styles={"*.linear1"="colwise", "*linear*"="rowwise"}',), "1.0.linear1 is matched by patterns of"),
    ],
)
def test_styles_that_do_not_fit_the_model_are_refused(sets: tuple[str, ...], reason: str) -> None:
    plan = read_plan(CONFIG, sets=["stage.1.tensor=2", *sets], environment={})
    with pytest.raises(PlanRefused) as refused:
        prepare_model(plan)
    assert [(error.key, reason in error.reason) for error in refused.value.errors] == [("stage.1.styles", True)]


def test_an_optimizer_that_computes_of_whole_parameters_is_refused() -> None:
    tables = read_plan(CONFIG, sets=SHARD, environment={}).as_mapping()
    tables["optimizer"] = {"factory": "torch.optim.Rprop", "lr": 0.01}
    job = prepare(from_mapping(tables, file=CONFIG))
    with pytest.raises(PlanRefused, match=r"stage.1.shard = 2: the optimizer Rprop is not known to compute of parts"):
        job.stage(1)


def test_layers_that_share_a_parameter_are_not_sharded(tmp_path: Path) -> None:
    for file in FOLDER.glob("*.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "model.py").write_text((tmp_path / "model.py").read_text() + SHARED)
    sets = ["model.factory=model.py:shared", "stage.2.shard=2"]
    with pytest.raises(PlanRefused, match="layer 3 shares a parameter with another layer"):
        prepare_model(read_plan(tmp_path / "stageline.toml", sets=sets, environment={}))


def test_one_process_is_what_a_stage_without_the_table_has() -> None:
    single = read_plan(CONFIG, environment={})
    assert read_plan(CONFIG, sets=["stage.1.shard=1"], environment={}).digest() == single.digest()
    assert read_plan(CONFIG, sets=SHARD, environment={}).digest() != single.digest()


def _sets(sets: Sequence[str]) -> list[str]:
    return [part for each in sets for part in ("--set", each)]
