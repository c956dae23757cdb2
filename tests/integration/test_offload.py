"""State in files changes no bit of a run, though its workers are killed, and leaves no files behind."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from stageline.pipeline.features import offload
from stageline.pipeline.plan import PlanRefused, read_plan
from support.fine_tuning import FOLDER
from support.fork_server import ForkServer, Kill
from support.paths import EXAMPLES, ROOT
from support.whole_run import WholeRun, expected, plan_in
from support.workspace import Workspace

BENCHMARK = ROOT / "benchmarks" / "stageline.toml"
EVERYTHING = 'memory.offload=["activations", "weights", "optimizer"]'
ALONE = {each: (f'memory.offload=["{each}"]',) for each in ("activations", "weights", "optimizer")}
TOGETHER = (EVERYTHING, 'memory.recompute="stage"')
SETS = ("run.steps=3", "recovery.restarts=3", "recovery.snapshot_every=1")
PLANS = {
    "digits": EXAMPLES / "digits" / "stageline.toml",
    "chargpt": EXAMPLES / "chargpt" / "stageline.toml",
    "gpt2": FOLDER / "gpt2.toml",
}
SMALL = {
    "digits": (),
    "chargpt": (
        "model.options={ width = 32, heads = 4, blocks = 6, context = 16, dropout = 0.1 }",
        "data.options={ context = 16, keep_back_one_in = 100 }",
        "data.batch_size=8",
    ),
    "gpt2": (),
}
KILLED_AFTER = {"digits": 24, "chargpt": 24, "gpt2": 8}  # actions of worker 1: in its second step
EACH_TENSOR = """
from stageline.pipeline.features import offload
from stageline.pipeline.stage.layers import file_memory

offload.LEAST = file_memory.LEAST = 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_run_whose_tensors_lie_in_files_ends_with_the_same_weights(
    name: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """However small they are; with dropout. In a run in which all do, a worker is killed."""
    plan = copied(name, tmp_path)
    digests = {"nothing": digest_of(fork_server, plan, tmp_path / "nothing", *SMALL[name])}
    for number, (case, sets) in enumerate({**ALONE, "all, and recompute": TOGETHER}.items()):
        folder, kills = tmp_path / str(number), [] if case in ALONE else [("worker-1", KILLED_AFTER[name])]
        digests[case] = digest_of(fork_server, plan, folder, *SMALL[name], *sets, kills=kills)
        (scratch,) = folder.rglob("offload")
        assert not list(scratch.iterdir())
    assert len({*digests.values()}) == 1, digests


@pytest.mark.slow
def test_both_versions_of_the_weights_and_activations_in_files_change_no_bit(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = (
        "run.steps=4",
        "model.options={ width = 64, layers = 1 }",
        "data.options={ width = 64, sequence = 64 }",
        "schedule.microbatches=4",
        "recovery.restarts=3",
        "recovery.snapshot_every=1",
    )
    assert offload.LEAST <= 8 * 64 * 64 * 4  # bytes of an activation: rows, sequence, width
    found = set()
    for name, more in {"1f1b": (), "2bw": ("schedule.name=2bw", "schedule.mode=async")}.items():
        plain, other = tmp_path / f"{name}-plain", tmp_path / name
        in_files = ('memory.offload=["activations"]', 'memory.recompute="stage"')
        first = digest_of(fork_server, BENCHMARK, plain, *sets, *more)
        kills = [("worker-0", 12), ("worker-1", 20)]
        assert digest_of(fork_server, BENCHMARK, other, *sets, *more, *in_files, kills=kills) == first
        (scratch,) = other.rglob("offload")
        assert not list(scratch.iterdir())
        found.add(first)
    assert len(found) == 2


FORKS = """
import os
from pathlib import Path

import torch

class Forks(torch.optim.AdamW):
    def step(self, *arguments, **options):
        fork = Path(__file__).parent / "fork"
        if fork.exists():
            fork.unlink(missing_ok=True)
            os.fork()
        return super().step(*arguments, **options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sets", [(), (EVERYTHING,)])
def test_a_fork_that_goes_on_with_an_optimizers_step_changes_no_weights(
    sets: tuple[str, ...], fork_server: ForkServer, tmp_path: Path
) -> None:
    """Both processes wrote to the same files: weights and moments were updated twice."""
    plan = plan_in(tmp_path)
    with (plan.parent / "model.py").open("a") as file:
        file.write(EACH_TENSOR + FORKS)
    going = WholeRun(fork_server, plan, "run.steps=60", "optimizer.factory=model.py:Forks", *sets)
    going.until_checkpoint(2)
    (plan.parent / "fork").touch()
    assert going.digest() == expected(60)
    assert not (plan.parent / "fork").exists()
    assert going.end()["facts"]["restarts"] == 0


def copied(name: str, folder: Path) -> Path:
    """The plan, in a folder of its own; its model's file sends the smallest tensor to a file, too."""
    shutil.copytree(PLANS[name].parent, folder / "plan")
    plan = folder / "plan" / PLANS[name].name
    (factory,) = re.findall(r'factory = "(\w+\.py):build"', plan.read_text())
    model = plan.parent / factory
    model.write_text(model.read_text() + EACH_TENSOR)
    return plan


def digest_of(fork_server: ForkServer, plan: Path, folder: Path, *sets: str, kills: Sequence[Kill] = ()) -> str:
    outcome = fork_server.train(plan, f"run.dir={folder}", *SETS, *sets, folder=folder, kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["left"] == []
    assert outcome["facts"].get("restarts", 0) >= len(kills)
    return str(outcome["facts"]["weights_sha256"])


MODEL = """
import ctypes
import resource
import sys
import threading
from pathlib import Path

from torch import nn

def build(room=None):
    if room is not None and sys.argv[1:2] == ["worker"]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        threading.stack_size(1 << 18)  # private memory, too
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed counts no longer
        limit = (int(status["VmData"].split()[0]) << 10) + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    wide = (nn.Linear(1024, 1024, bias=False) for _ in range(24))
    return nn.Sequential(nn.Linear(4, 1024), *wide, nn.Linear(1024, 2))
"""
STATE = 4 * 23 * 1024 * 1024 * 4  # bytes of weights, gradients, and two tensors of AdamW for each; of stage 1


@pytest.mark.slow
def test_a_model_of_three_times_what_its_worker_may_have_trains_to_the_same_weights(workspace: Workspace) -> None:
    """The limit is of the worker's private memory, beyond what its program takes before the model is made. It counts
    snapshots that are read back as private, too, since they are mapped so: there are none."""
    workspace.write("model.py", MODEL)
    options = (
        *("model.metrics=[]", "run.steps=3", "schedule.microbatches=2"),
        *("optimizer.factory=torch.optim.AdamW", "optimizer.lr=0.001", "recovery.restarts=0"),
    )
    sets = [word for option in options for word in ("--set", option)]
    limited = ("--set", f"model.options={{ room = {STATE // 3} }}")
    digests = []
    for more in ((), (*limited, "--set", EVERYTHING)):
        ended = workspace.command("train", ".", "--json", *sets, *more)
        assert ended.returncode == 0, ended.stderr
        digests.append(json.loads(ended.stdout)["weights_sha256"])
    assert digests[0] == digests[1]
    without = workspace.command("train", ".", "--json", *sets, *limited)
    assert without.returncode == 1
    assert "allocate memory" in (workspace.runs()[-1] / "worker-1.log").read_text()


def test_a_stage_may_offload_something_else_than_all() -> None:
    found = read_plan(EXAMPLES / "mlp", sets=['memory.offload=["weights"]', "stage.1.offload=[]"])
    assert (found.offloaded_of(0), found.offloaded_of(1)) == (("weights",), ())
    assert found.digest() == read_plan(EXAMPLES / "mlp").digest()


def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    wanted = 'memory.offload=["activations"]'
    with pytest.raises(PlanRefused, match=r'memory.offload = \["activations"\]: workers.1.device = "cuda:0"'):
        read_plan(EXAMPLES / "mlp", sets=[wanted, "model.stages=2", *_workers("cpu", "cuda:0")])
    with pytest.raises(PlanRefused, match=r'memory.offload = .*queues.url = "memory://" does not support it'):
        read_plan(EXAMPLES / "mlp", sets=[wanted, "queues.url=memory://"])
    with pytest.raises(PlanRefused, match=r'stage.1.offload = \["optimizer"\]: workers.1.device = "cuda:0"'):
        read_plan(
            EXAMPLES / "mlp", sets=['stage.1.offload=["optimizer"]', "model.stages=2", *_workers("cpu", "cuda:0")]
        )
    with pytest.raises(
        PlanRefused, match=r'memory.offload = \["gradients"\]: expected a list of "activations", "weights"'
    ):
        read_plan(EXAMPLES / "mlp", sets=['memory.offload=["gradients"]'])
    delayed = ['memory.offload=["weights"]', "schedule.name=2bw", "schedule.mode=async"]
    with pytest.raises(PlanRefused, match=r'memory.offload = .*"2bw" keeps both versions of the weights in memory'):
        read_plan(EXAMPLES / "mlp", sets=delayed)


def _workers(*devices: str) -> list[str]:
    stages = [f"workers.{index}.stages=[{index}]" for index in range(len(devices))]
    return [*stages, *(f"workers.{index}.device={device}" for index, device in enumerate(devices))]
