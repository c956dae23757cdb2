"""Machines join a plan's broker by the line that it prints, and keep the secret of the line out of what others see."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from stageline.broker.keys.pairs import encoded
from stageline.pipeline.errors import ExitCode
from support.fork_server import ForkServer
from support.machines import GATED, broker_at, present
from support.workspace import Workspace, wait_for

SETS = (
    "--set",
    "recovery.lease=2",
    "--set",
    "recovery.action=600",
    "--set",
    "recovery.snapshot_every=1",
    "--set",
    "queues.url=tcp://0.0.0.0:0",
)


@contextmanager
def machine(folder: Path, fork_server: ForkServer) -> Iterator[Workspace]:
    """A folder with the plan, and a key of its own."""
    folder.mkdir()
    with Workspace(folder, fork_server) as workspace:
        workspace.write("model.py", GATED)
        yield workspace


@pytest.fixture
def machines(tmp_path: Path, fork_server: ForkServer, stack: ExitStack) -> tuple[Workspace, Workspace]:
    desk, lab = (stack.enter_context(machine(tmp_path / name, fork_server)) for name in ("desk", "lab"))
    return desk, lab


@pytest.mark.slow
def test_a_machine_that_was_set_up_again_joins_by_the_same_line_and_takes_the_place_of_the_lost_one(
    machines: tuple[Workspace, Workspace],
) -> None:
    desk, lab = machines
    plain = desk.command("train", "--json", *SETS[:-2], "--set", "run.dir=plain")
    wanted = json.loads(plain.stdout)["weights_sha256"]
    os.mkfifo(desk.folder / "gate")
    broker, line = broker_at(desk, "tcp://0.0.0.0:0", *SETS[:-2])
    stays = desk.start("worker", ".", "--join", line.text, "--index", "0", *SETS)
    lost = lab.start("worker", ".", "--index", "1", "--name", "lost", *SETS, "--join", STAGELINE_JOIN=line.text)
    wait_for(lambda: "lost" in present(desk))
    lost.kill()
    lost.wait()
    lab.key.unlink()
    lab.write("line.txt", f"{line.text}\n")
    again = lab.start("worker", ".", "--index", "1", "--name", "again", "--join", "@line.txt", *SETS)
    wait_for(lambda: "again" in present(desk))
    (desk.folder / "gate").write_text("")
    assert [stays.wait(), again.wait()] == [0, 0]
    broker.send_signal(signal.SIGTERM)
    broker.wait()
    (folder,) = desk.runs()
    assert json.loads((folder / "result.json").read_text())["weights_sha256"] == wanted
    enrolled = [json.loads(each)["key"] for each in (folder / "keys.log").read_text().splitlines()]
    assert len(set(enrolled)) == 2  # the lab's two; the desk's worker has the broker's own key


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "environment"])
def test_a_line_that_is_not_on_the_command_line_is_on_none_and_in_no_childs_environment(
    machines: tuple[Workspace, Workspace], way: str
) -> None:
    desk, lab = machines
    lab.write(
        "model.py",
        GATED.replace("import os\n", "import os, subprocess\n").replace(
            "def build():\n", "def build():\n    subprocess.Popen(['sleep', '600'])\n"
        ),
    )
    broker, line = broker_at(desk, "tcp://0.0.0.0:0", *SETS[:-2])
    lab.write("line.txt", line.text)
    arguments = ("worker", ".", *SETS, *(("--join", "@line.txt") if way == "file" else ()))
    worker = lab.start(*arguments, cold=True, **({} if way == "file" else {"STAGELINE_JOIN": line.text}))
    wait_for(lambda: len(present(desk)) == 1)
    secret = encoded(line.secret)
    children = psutil.Process(worker.pid).children(recursive=True)
    assert children
    for process in (psutil.Process(worker.pid), *children):
        assert secret not in " ".join(process.cmdline())
    for process in children:
        assert secret not in str(process.environ())
    for process in (*children, psutil.Process(broker.pid), psutil.Process(worker.pid)):
        process.kill()
    worker.wait()


def test_what_is_wrong_with_a_line_is_told_before_anything_is_loaded(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write("model.py", "raise AssertionError('loaded')")
    cut = "tcp://desk:7000#k1.2n8Fh0XQb5q9Zr1jv7d3mS6tYcAeKpWuLxGiOoNnHfM"[:30]
    workspace.write("cut.txt", cut)
    for given, said, code in [
        (("--join", cut), "is cut off", ExitCode.NOT_ADMITTED),
        (("--broker", cut), "is cut off", ExitCode.NOT_ADMITTED),
        (("--join", "@cut.txt"), "is cut off", ExitCode.NOT_ADMITTED),
        (("--join", "tcp://desk:7000"), "has no key", ExitCode.NOT_ADMITTED),
        (("--broker", "tcp://desk:7000"), "has no key", ExitCode.NOT_ADMITTED),
        (("--set", "broker.url='tcp://desk:7000'"), "has no key", ExitCode.NOT_ADMITTED),
        (("--join", "@none.txt"), "@none.txt: No such file", ExitCode.USAGE),
        (("--join",), "STAGELINE_JOIN", ExitCode.USAGE),
    ]:
        assert workspace.here("worker", ".", *given) == code
        assert said in capsys.readouterr().err
