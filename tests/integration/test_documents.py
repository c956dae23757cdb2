"""The example of a document model: each of two machines has its part of the weights, and the desk alone the pages."""

import os
import shutil
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.paths import EXAMPLES
from support.workspace import Workspace, free_port

EXAMPLE = EXAMPLES / "documents"
PARTS = "part-0.safetensors", "part-1.safetensors"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_machines_train_a_document_model_of_which_each_has_its_own_part(
    workspace: Workspace, tmp_path: Path, fork_server: ForkServer
) -> None:
    assert workspace.command("script", str(EXAMPLE / "split.py")).returncode == 0
    address = f"tcp://127.0.0.1:{free_port()}"
    machines = []
    for part in PARTS:
        folder = tmp_path / part.removesuffix(".safetensors")
        folder.mkdir()
        (workspace.folder / part).rename(folder / part)
        machines.append(Workspace(folder, fork_server))
        shutil.copy(EXAMPLE / "model.py", folder)
    with machines[0], machines[1]:
        workers = [
            machine.start("worker", "--join", address, "--index", str(n), "--set", f"model.weights={part}")
            for n, (machine, part) in enumerate(zip(machines, PARTS, strict=True))
        ]
        run = workspace.command("script", str(EXAMPLE / "train.py"), address, "2")
        assert run.returncode == 0, run.stderr
        assert [worker.wait() for worker in workers] == [0, 0]
    first, second = [float(line.rpartition(" ")[2]) for line in run.stdout.splitlines() if "loss " in line]
    assert second < first < 1.0
    assert sorted(os.listdir(workspace.folder / "documents")) == ["config.json", "model.safetensors"]
