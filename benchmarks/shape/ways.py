"""Which files have a line executed on the way of a microbatch through one worker, and of a heartbeat to the store.

A small plan runs as `stageline train` does, with three workers, queues at the default address, and recovery on.
`sitecustomize.py` installs the traces in each process:

    microbatch   in the worker of stage 1, main thread: from the turn that takes the activation of one microbatch (1F)
                 to the end of the turn that puts its gradient (1B)
    heartbeat    in that worker, control thread: from a report to the broker's acknowledgement of it; and in
                 the broker, main thread: from the receiving of messages to the point where all have been handled
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PLAN = """
[run]
steps = {steps}
[model]
factory = "model.py:build"
cut = [2, 4]
loss = "torch.nn.functional.cross_entropy"
[data]
source = "data.py:batches"
batch_size = 32
[schedule]
microbatches = 4
[optimizer]
factory = "torch.optim.SGD"
lr = 0.1
[recovery]
snapshot_every = 50
"""

STEPS = 4000
NOW_AND_THEN = (  # on a heartbeat's way only if the stage computes at that moment: these say in which layer
    "pipeline/stage/layers/passage.py",
    "pipeline/stage/stage.py",
    "workers/process/worker.py",
)

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
"""

DATA = """
import torch
from stageline import Rows

def batches(batch_size, seed):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return Rows(x, (x.sum(1) > 0).long(), batch_size, seed)
"""


def ways(root: Path) -> dict[str, list[str]]:
    """Return the files of the checkout at `root` on each way, in the order in which one real run executes them.

    Raises `RuntimeError` if the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="stageline-shape-") as name:
        folder = Path(name)
        (folder / "stageline.toml").write_text(PLAN.format(steps=STEPS))
        (folder / "model.py").write_text(MODEL)
        (folder / "data.py").write_text(DATA)
        _run(root, folder)
        found = {kind: _files(root, folder, kind) for kind in ("microbatch", "heartbeat-worker", "heartbeat-broker")}
    heartbeat = dict.fromkeys([*found["heartbeat-worker"], *found["heartbeat-broker"]])
    return {"microbatch": found["microbatch"], "heartbeat": [name for name in heartbeat if name not in NOW_AND_THEN]}


def _run(root: Path, folder: Path) -> None:
    own = root / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [python, "-P", "-m", "stageline", "train", "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "SHAPE_ROOT": str(root), "SHAPE_OUT": str(folder)},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(f"the traced run has failed: {ended.stderr[-2000:]}")


def _files(root: Path, folder: Path, kind: str) -> list[str]:
    path = folder / f"{kind}.txt"
    if not path.exists():
        raise RuntimeError(f"the traced run has not passed the points of the way {kind!r}: see sitecustomize.py")
    return path.read_text().split()
