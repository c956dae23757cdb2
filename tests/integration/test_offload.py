"""What lies in files changes no bit of a run, though its workers are killed, and leaves no files behind."""

import json
from pathlib import Path

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.pipeline.stage import offload
from support.fork_server import ForkServer
from support.paths import EXAMPLES
from support.workspace import Workspace

ROOT = Path(__file__).parent.parent.parent
PLAN = ROOT / "benchmarks" / "stageline.toml"
SETS = (
    "run.steps=4",
    "model.options={ width = 64, layers = 1 }",
    "data.options={ width = 64, sequence = 64 }",
    "schedule.microbatches=4",
    "recovery.restarts=3",
    "recovery.snapshot_every=1",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        ('memory.offload=["activations"]',),
        ('memory.offload=["activations"]', 'memory.recompute="stage"'),
        ('memory.offload=["activations", "weights", "optimizer"]',),
    ],
    ids=["activations", "with recompute", "all"],
)
def test_a_run_whose_tensors_lie_in_files_ends_with_the_same_weights(
    other: tuple[str, ...], fork_server: ForkServer, tmp_path: Path
) -> None:
    rows, sequence, width = 8, 64, 64
    assert rows * sequence * width * 4 >= offload.LEAST
    kills = [("worker-0", 12), ("worker-1", 20)]
    found = set()
    for name, sets in {"plain": (), "other": other}.items():
        folder = tmp_path / name
        outcome = fork_server.train(
            PLAN, f"run.dir={folder}", *SETS, *sets, folder=folder, kills=kills if name == "other" else ()
        )
        assert outcome["code"] == 0, outcome["reason"]
        assert outcome["not killed"] == []
        assert outcome["left"] == []
        found.add(outcome["facts"]["weights_sha256"])
    assert len(found) == 1
    scratch = list((tmp_path / "other").rglob("offload"))
    assert scratch
    assert not list(scratch[0].iterdir())


MODEL = """
import resource
import sys
import threading
from pathlib import Path

from torch import nn

def build(room=None):
    if room is not None and sys.argv[1:2] == ["worker"]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        threading.stack_size(1 << 18)  # private memory, too
        limit = (int(status["VmData"].split()[0]) << 10) + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    wide = (nn.Linear(1024, 1024, bias=False) for _ in range(24))
    return nn.Sequential(nn.Linear(4, 1024), *wide, nn.Linear(1024, 2))
"""
STATE = 4 * 23 * 1024 * 1024 * 4  # bytes of weights, gradients, and two tensors of AdamW for each; of stage 1


@pytest.mark.slow
def test_a_model_of_three_times_what_its_worker_may_have_trains_to_the_same_weights(workspace: Workspace) -> None:
    """The limit is of the worker's private memory, beyond what its program takes before the model is made."""
    workspace.write("model.py", MODEL)
    options = (
        *("model.metrics=[]", "run.steps=3", "schedule.microbatches=2"),
        *("optimizer.factory=torch.optim.AdamW", "optimizer.lr=0.001", "recovery.snapshot_every=2"),
    )
    sets = [word for option in options for word in ("--set", option)]
    limited = ("--set", f"model.options={{ room = {STATE // 3} }}")
    digests = []
    for more in ((), (*limited, "--set", 'memory.offload=["activations", "weights", "optimizer"]')):
        ended = workspace.command("train", ".", "--json", *sets, *more)
        assert ended.returncode == 0, ended.stderr
        digests.append(json.loads(ended.stdout)["weights_sha256"])
    assert digests[0] == digests[1]
    without = workspace.command("train", ".", "--json", *sets, *limited)
    assert without.returncode != 0


def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    wanted = 'memory.offload=["activations"]'
    with pytest.raises(PlanRefused, match=r'memory.offload = \["activations"\]: worker 1 computes on cuda:0'):
        read_plan(EXAMPLES / "mlp", sets=[wanted, "model.stages=2", *_workers("cpu", "cuda:0")])
    with pytest.raises(PlanRefused, match=r'memory.offload = .*over queues.url = "memory://" nothing is offloaded'):
        read_plan(EXAMPLES / "mlp", sets=[wanted, "queues.url=memory://"])
    with pytest.raises(PlanRefused, match=r'memory.offload = \["gradients"\]: a list of "activations", "weights"'):
        read_plan(EXAMPLES / "mlp", sets=['memory.offload=["gradients"]'])


def _workers(*devices: str) -> list[str]:
    stages = [f"workers.{index}.stages=[{index}]" for index in range(len(devices))]
    return [*stages, *(f"workers.{index}.device={device}" for index, device in enumerate(devices))]
