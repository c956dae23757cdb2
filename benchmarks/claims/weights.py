"""How much memory a worker takes for its stage's weights: read from a file, or as part of the whole model.

`python -m benchmarks.claims.weights` makes a model of 1 GB on disk, four stages of equal size, and for each worker a
process that prepares its job and reads its weights, as `stageline worker` does before it makes optimizers. What is
reported is the most memory that the process ever had (VmHWM), files that it maps included.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.machine import machine

LAYERS, WIDTH, STAGES = 64, 2048, 4
MB = 10**6
ABOUT = f"""\
A model of {LAYERS} layers of {WIDTH} x {WIDTH} float32 in one safetensors file, in {STAGES} stages. For each worker, a
process that loads the plan and its own weights; MB of memory at most (VmHWM), without an optimizer. Built whole, the
factory makes the model and loads the file into it. The bare process imports torch."""

MODEL = f"""
import torch
from pathlib import Path
from safetensors.torch import load_file
from torch import nn

FILE = Path(__file__).parent / "model.safetensors"

def build(layers={LAYERS}, width={WIDTH}):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

def whole():
    model = build()
    model.load_state_dict(load_file(FILE))
    return model

def batches(batch_size, seed):
    from stageline import Rows
    x = torch.zeros(8, {WIDTH})
    return Rows(x, x, batch_size, seed)
"""
PLAN = f"""
[run]
steps = 1
[model]
factory = "model.py:build"
stages = {STAGES}
loss = "torch.nn.functional.mse_loss"
[data]
source = "model.py:batches"
batch_size = 4
[optimizer]
factory = "torch.optim.SGD"
lr = 0.1
"""
STORED, WHOLE, BARE = "model.weights=model.safetensors", "model.factory=model.py:whole", ""


def measure(_: int) -> BenchmarkResult:
    """In one round: memory does not vary as time does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder)
        taken = {setting: [_memory(folder, setting, worker) for worker in range(STAGES)] for setting in (STORED, WHOLE)}
        bare = _memory(folder, BARE, 0)
    own = LAYERS // STAGES * (WIDTH + 1) * WIDTH * 4
    rows = [
        (f"worker {worker}", _megabytes(own), _megabytes(stored), f"{(stored - bare) / own:.2f}", _megabytes(whole))
        for worker, (stored, whole) in enumerate(zip(taken[STORED], taken[WHOLE], strict=True))
    ]
    columns = ("", "its stage", "with `weights`", "less bare, in stages", "built whole")
    table = Table(f"MB; the bare process has {_megabytes(bare)}", columns, tuple(rows))
    return BenchmarkResult("Weights of a stage", ABOUT, (table,), {"bare": bare, "own": own, "taken": taken})


def _megabytes(size: int) -> str:
    return f"{size / MB:.0f}"


def _write(folder: Path) -> None:
    """In a process of its own, whose memory is given back."""
    (folder / "model.py").write_text(MODEL)
    (folder / "stageline.toml").write_text(PLAN)
    code = "import model; from safetensors.torch import save_file; save_file(model.build().state_dict(), model.FILE)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


def _memory(folder: Path, setting: str, worker: int) -> int:
    """The most bytes that a worker's process had."""
    command = [sys.executable, "-m", "benchmarks.claims.weights", "--worker", str(worker), "--setting", setting, "--at"]
    done = subprocess.run([*command, str(folder)], check=True, capture_output=True, text=True, env=dict(os.environ))
    return int(done.stdout.split()[-1])


def _work(folder: Path, setting: str, worker: int) -> int:
    import torch

    torch.set_num_threads(1)
    if setting:
        from stageline import read_plan
        from stageline.workers.process import worker_process  # what a worker imports
        from stageline.workers.runtime.job import prepare

        assert worker_process
        prepare(read_plan(folder, sets=[setting]), worker=worker).segments[worker].load()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


@click.command()
@click.option("--worker", default=0, hidden=True)
@click.option("--setting", default="", hidden=True)
@click.option("--at", default=None, type=click.Path(path_type=Path), hidden=True)
def main(worker: int, setting: str, at: Path | None) -> None:
    """Measure, and print the table."""
    click.echo(f"{measure(1)}\n\n{machine()}" if at is None else _work(at, setting, worker))


if __name__ == "__main__":
    main()
