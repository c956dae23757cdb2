"""Only the processes that need the data open it: those of the first stage, of the last, and of the trial."""

import json
import os
import shutil
import signal

from support.workspace import DATA, MODEL, Workspace, free_port, until

THREE = ("--set", "model.cut=[1,2]")  # stage 1, in the middle, has the activation function
NOTED = "import os\nopen({name!r}, 'a').write(f'{{os.getpid()}}\\n')\n"


def noted(workspace: Workspace, name: str) -> set[int]:
    return {int(pid) for pid in (workspace.folder / name).read_text().split()}


def test_the_process_of_a_middle_stage_never_opens_the_data(workspace: Workspace) -> None:
    """Every worker loaded all of it."""
    workspace.write("model.py", NOTED.format(name="built") + MODEL)
    workspace.write("data.py", NOTED.format(name="opened") + DATA)
    ended = workspace.command("train", ".", "--json", *THREE)
    assert ended.returncode == 0, ended.stderr
    assert len(noted(workspace, "built") - noted(workspace, "opened")) == 1
    assert noted(workspace, "opened") <= noted(workspace, "built")
    found = json.loads(ended.stdout)
    workspace.write("model.py", MODEL)
    workspace.write("data.py", DATA)
    alone = json.loads(workspace.command("train", ".", "--json", *THREE, "--set", "queues.url=memory://").stdout)
    assert found == {**found, **{name: alone[name] for name in ("weights_sha256", "metrics", "losses", "steps")}}


def test_a_worker_on_a_machine_without_the_data_waits_until_it_knows_how_long_the_run_is(workspace: Workspace) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    elsewhere = workspace.folder / "elsewhere"
    shutil.copytree(workspace.folder, elsewhere)
    os.remove(elsewhere / "data.py")
    sets = (*THREE, "--set", "queues.url=tcp://127.0.0.1:0", "--set", f"run.dir={workspace.folder}/runs")
    broker = workspace.start("broker", ".", "--bind", url, *sets)
    until(broker.stderr, "broker at")
    worker = ("--broker", url, *sets, "--index")
    middle = workspace.start("worker", "elsewhere", *worker, "1")
    until(middle.stderr, "no worker that has the data has come yet")
    others = [workspace.start("worker", ".", *worker, index) for index in ("0", "2")]
    ended = [(process.communicate()[1], process.returncode) for process in (middle, *others)]
    broker.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
    assert [code for _, code in ended] == [0, 0, 0], ended
    assert json.loads(next(workspace.folder.glob("runs/*/result.json")).read_text())["steps"] == 6
    assert broker.wait() == 0
