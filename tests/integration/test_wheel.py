"""The wheel: what it contains, and that it runs where there is no checkout, beside the user's files of any name.

It is built from a copy of the sources, so that the build leaves nothing in the checkout and finds nothing stale there.
It is installed by pip into an environment of its own, whose only other packages are those of this environment: a line
in a .pth file adds their folder, without the .pth files in it, so that an editable stageline there is out of reach.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT
from support.workspace import PLAN, Workspace

PARTS = ("pipeline", "broker", "workers")
DECOY = "raise ImportError('stageline has imported a file of the user by its name')\n"
SCRIPT = """
from functools import partial

import torch
from torch import nn

from stageline import Line

assert "site-packages" in __import__("stageline").__file__
model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
with Line(model, cut=[2], loss=nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1)) as line:
    print(line.step(torch.ones(4, 2), torch.ones(4, 1)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for part in ("src", *PARTS):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / part, sources / part, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    pip("wheel", *options, "--wheel-dir", str(built), str(sources))
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder of programs: `python` and `stageline`."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)  # without pip
    programs = environment / "bin"
    pip("--python", str(programs / "python"), "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


@pytest.fixture
def folder(workspace: Workspace) -> Iterator[Workspace]:
    """The small plan, with files beside it that bear the names of the project's folders."""
    for part in PARTS:
        workspace.write(f"{part}.py", DECOY)
    return workspace


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=without_checkout())


def without_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run_in(folder: Path, *command: str | Path) -> str:
    """Text that the command writes to stdout; it must end well."""
    ended = subprocess.run(command, cwd=folder, env=without_checkout(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_no_other_package(wheel):
    package = ROOT / "src" / "stageline"
    own = {path.relative_to(package).as_posix() for path in package.glob("*.py")}
    sources = {path.relative_to(ROOT).as_posix() for part in PARTS for path in (ROOT / part).rglob("*.py")}
    expected = {f"stageline/{name}" for name in sources | own}
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        others = {"stageline/py.typed", "stageline/workers/cli/templates/stageline.toml"}
        assets = (ROOT / "workers/extras/report/assets").iterdir()
        assert files == expected | others | {f"stageline/{path.relative_to(ROOT)}" for path in assets}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert "Private ::" not in archive.read(metadata).decode()


@pytest.mark.slow
def test_a_script_beside_files_of_those_names_imports_the_installed_package(installed, folder):
    folder.write("script.py", SCRIPT)
    assert float(run_in(folder.folder, installed / "python", "script.py")) > 0


@pytest.mark.slow
def test_train_runs_a_plan_beside_files_of_those_names(installed, folder):
    result = json.loads(run_in(folder.folder, installed / "stageline", "train", ".", "--json"))
    assert (result["schema"], result["steps"]) == ("train/1", 6)


@pytest.mark.slow
def test_files_of_those_names_may_hold_the_users_own_model_and_data(workspace, capsys):
    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://") == 0
    expected = json.loads(capsys.readouterr().out)["weights_sha256"]
    workspace.write("workers.py", (workspace.folder / "model.py").read_text() + "\nfrom broker import NOTHING\n")
    workspace.write("pipeline.py", (workspace.folder / "data.py").read_text())
    workspace.write("broker.py", "NOTHING = None\n")
    workspace.write("stageline.toml", PLAN.replace("model.py:", "workers.py:").replace("data.py:", "pipeline.py:"))
    trained = workspace.command("train", ".", "--json", cold=True)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["weights_sha256"] == expected
