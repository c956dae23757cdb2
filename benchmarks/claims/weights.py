"""How much memory a worker takes for its stage's weights: read from a file, or as part of the whole model.

`python -m benchmarks.claims.weights` makes a model of 1 GB on disk, and lets a script call four processes of
`stageline worker --join`, each with a stage of equal size. What is reported is the most memory that a worker's process
ever had (VmHWM), files that it maps included, when it waits for the script's first call.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.machine import machine

LAYERS, WIDTH, STAGES = 64, 2048, 4
MB = 10**6
LONGEST = 120.0  # seconds that a worker may take to begin, and to end
ABOUT = f"""\
A model of {LAYERS} layers of {WIDTH} x {WIDTH} float32 in one safetensors file, in {STAGES} stages, on processes of
`stageline worker --join` that wait for a script's first call; MB of memory at most (VmHWM). Built whole, the factory
makes the model and loads the file into it. The bare process imports torch and makes an optimizer:
the first one of a process loads code of torch's own."""

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
"""
SCRIPT = f"""
import sys
from functools import partial
import torch
from torch import nn
import model
from stageline import Line

address, factory, weights = sys.argv[1:]
with Line(
    getattr(model, factory),
    cut={[LAYERS // STAGES * stage for stage in range(1, STAGES)]},
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    microbatches=1,
    weights=weights or None,
    broker=address,
    progress=False,
) as line:
    print(line.folder, flush=True)
    sys.stdin.readline()
"""
BARE = """
import torch
{more}
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
OPTIMIZER = "torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)"


def measure(_: int) -> BenchmarkResult:
    """In one round: memory does not vary as time does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder)
        stored = _taken(folder, "build", folder / "model.safetensors")
        whole = _taken(folder, "whole", None)
        torch, bare = _bare(folder, ""), _bare(folder, OPTIMIZER)
    own = LAYERS // STAGES * (WIDTH + 1) * WIDTH * 4
    rows = [
        (f"worker {worker}", _megabytes(own), _megabytes(least), f"{(least - bare) / own:.2f}", _megabytes(most))
        for worker, (least, most) in enumerate(zip(stored, whole, strict=True))
    ]
    columns = ("", "its stage", "with `weights`", "less bare, in stages", "built whole")
    title = f"MB; the bare process has {_megabytes(bare)}, without an optimizer {_megabytes(torch)}"
    found = {"torch": torch, "bare": bare, "own": own, "stored": stored, "whole": whole}
    return BenchmarkResult("Weights of a stage", ABOUT, (Table(title, columns, tuple(rows)),), found)


def _megabytes(size: int) -> str:
    return f"{size / MB:.0f}"


def _write(folder: Path) -> None:
    """In a process of its own, whose memory is given back."""
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(SCRIPT)
    code = "import model; from safetensors.torch import save_file; save_file(model.build().state_dict(), model.FILE)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


def _taken(folder: Path, factory: str, weights: Path | None) -> list[int]:
    """The most bytes that each worker's process had, one for each stage."""
    address = f"tcp://127.0.0.1:{_free_port()}"
    own = [] if weights is None else ["--set", f"model.weights={weights}"]
    with ExitStack() as stack:
        join = [sys.executable, "-m", "stageline", "worker", "--join", address, *own]
        workers = [stack.enter_context(_running(join, folder)) for _ in range(STAGES)]
        script = stack.enter_context(
            _running([sys.executable, "train.py", address, factory, str(weights or "")], folder)
        )
        assert script.stdout is not None
        assert script.stdin is not None
        if not (run := script.stdout.readline().strip()):
            raise click.ClickException(f"the script ended: exit status {script.wait()}")
        _until_loaded(Path(run), folder)
        taken = [_most(Path(f"/proc/{worker.pid}/status").read_text()) for worker in workers]
        script.stdin.write("\n")
        script.stdin.flush()
        codes = [process.wait(LONGEST) for process in (script, *workers)]
        if any(codes):
            raise click.ClickException(f"the script and its workers ended with exit statuses {codes}")
    return taken


def _until_loaded(run: Path, folder: Path) -> None:
    """Until all workers wait for the script's first call: their stages are made then."""
    status = [sys.executable, "-m", "stageline", "status", str(run), "--json"]
    for _ in range(round(LONGEST)):
        workers = json.loads(subprocess.run(status, check=True, cwd=folder, capture_output=True).stdout)["workers"]
        if all(str(worker.get("now")).startswith("waits for call") for worker in workers):
            return
        time.sleep(1)
    raise click.ClickException(f"the workers have not come so far in {LONGEST:g} s: {workers}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def _most(status: str) -> int:
    """VmHWM of /proc/PID/status, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _bare(folder: Path, more: str) -> int:
    """The most bytes that a process had which imports torch, and runs the line `more`."""
    command = [sys.executable, "-c", BARE.format(more=more)]
    return int(subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True).stdout) * 1024


@click.command()
def main() -> None:
    """Measure, and print the table."""
    click.echo(f"{measure(1)}\n\n{machine()}")


if __name__ == "__main__":
    main()
