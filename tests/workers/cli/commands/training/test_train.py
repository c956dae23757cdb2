"""`stageline train`: what it prints, where, and what it keeps."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from stageline.pipeline.plan import from_mapping, read_plan
from support.answers import conforming
from support.whole_run import plan_in
from support.workspace import until

TRAIN_1 = [
    "schema",
    "run",
    "steps",
    "microbatches",
    "loss",
    "losses",
    "metrics",
    "weights_sha256",
    "seconds",
    "restarts",
    "gradient_norm",
    "evaluations",
    "best",
    "stopped_early",
]


def test_train_ends_with_one_line_of_json_and_keeps_it_with_the_plan_in_the_runs_folder(workspace, capsys):
    ended = workspace.command("train", ".", "--json")
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    result = conforming(line)
    assert list(result) == TRAIN_1
    assert (result["schema"], result["steps"], result["microbatches"], result["restarts"]) == ("train/1", 6, 3, 0)
    assert list(result["losses"]) == ["0", "2", "4"]
    assert 0 <= result["metrics"]["accuracy"] <= 1
    (folder,) = workspace.runs()
    assert folder.name == result["run"]
    assert json.loads((folder / "result.json").read_text()) == result
    kept = from_mapping(json.loads((folder / "plan.json").read_text()))
    assert kept.digest() == read_plan(workspace.folder).digest()
    assert not (folder / "broker.url").exists()

    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://") == 0
    in_memory = conforming(capsys.readouterr().out)
    assert in_memory["weights_sha256"] == result["weights_sha256"]
    assert in_memory["losses"] == result["losses"]


@pytest.mark.slow
def test_train_ends_with_a_summary_and_the_timetable_as_it_ran(workspace, capsys):
    code = workspace.here("train", ".")
    ended = capsys.readouterr()
    assert code == 0, ended.err
    (folder,) = workspace.runs()
    said = dict(line.split(maxsplit=1) for line in ended.out.partition("\n\n")[0].splitlines())
    result = json.loads((folder / "result.json").read_text())
    assert said["run"] == f"runs/{folder.name}"
    assert said["weights_sha256"] == result["weights_sha256"]
    assert float(said["accuracy"]) == pytest.approx(result["metrics"]["accuracy"])
    timetable = ended.out.partition("as it ran")[2]
    assert [row.split()[1] for row in timetable.splitlines() if row.startswith("worker ")] == ["0", "1"]
    assert "\x1b" not in ended.out + ended.err
    assert "stageline: finished" in ended.err


def test_a_metric_that_is_no_finite_number_is_written_as_text(workspace, capsys):
    # JSON has null for it, from which no line for people could be drawn: the run ended in a traceback.
    with (workspace.folder / "model.py").open("a") as model:
        model.write("def lost(outputs, targets):\n    return float('nan')\n")
        model.write("def endless(outputs, targets):\n    return outputs.sum() + float('inf')\n")
    metrics = "model.metrics=['model.py:lost', 'model.py:endless', 'model.py:accuracy']"
    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://", "--set", metrics) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (result["metrics"]["lost"], result["metrics"]["endless"]) == ("nan", "inf")
    assert 0 <= result["metrics"]["accuracy"] <= 1
    assert workspace.here("status") == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (said["lost"], said["endless"]) == ("nan", "inf")


def everything(terminal):
    """Text that is written to a terminal until its last process has ended."""
    found = b""
    with os.fdopen(terminal, "rb", buffering=0) as file, suppress(OSError):  # EIO is its end
        while part := file.read(2**16):
            found += part
    return found.decode()


@pytest.mark.slow
def test_on_a_terminal_train_draws_bars_and_gives_the_cursor_back(workspace):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "stageline", "train", ".", "--json"],
        cwd=workspace.folder,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    with ThreadPoolExecutor(1) as reader:  # a terminal that is not read holds 4 KiB
        read = reader.submit(everything, master)
        stdout, _ = process.communicate()
    drawn = read.result()
    assert process.returncode == 0
    assert json.loads(stdout)["schema"] == "train/1"
    assert "samples/s" in drawn
    assert "stage 1" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


@pytest.mark.slow
@pytest.mark.parametrize("takes", ["no room", "no reader"])
def test_a_run_whose_output_cannot_be_written_goes_on_and_its_result_is_in_its_folder(workspace, fork_server, takes):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") if takes == "no reader" else open("/dev/full", "w") as nowhere:
        with contextlib.chdir(workspace.folder):
            train = fork_server.spawn(["train", ".", "--json"], nowhere)
        assert train.wait() == 1  # the result could not be printed
    (folder,) = workspace.runs()
    assert json.loads((folder / "result.json").read_text())["steps"] == 6
    why = workspace.command("why", str(folder)).stdout
    assert f"run {folder.name}: finished" in why
    assert "killed" not in why


@pytest.mark.slow
def test_a_run_without_stdout_and_stderr_ends_as_one_that_has_them(workspace):
    command = [sys.executable, "-m", "stageline", "train", "."]
    ended = subprocess.run(["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command], cwd=workspace.folder)
    assert ended.returncode == 0
    (folder,) = workspace.runs()
    assert json.loads((folder / "result.json").read_text())["steps"] == 6


@pytest.mark.slow
def test_stdout_without_room_is_named_with_the_place_of_the_result(workspace):
    command = [sys.executable, "-m", "stageline", "train", "."]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, cwd=workspace.folder, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    (folder,) = workspace.runs()
    assert re.search(rf"stdout: No space left on device.*{folder.name}/result\.json", ended.stderr.splitlines()[-1])


def test_train_tells_where_it_is_at_sigusr1_and_goes_on(workspace):
    """The signal at which workers tell where they are ended `train`, without a word."""
    process = workspace.start("train", ".", "--set", "run.steps=200")
    until(process.stderr, "running")
    process.send_signal(signal.SIGUSR1)
    until(process.stderr, "most recent call first")
    _, errors = process.communicate()
    assert process.wait() == 0, errors


@pytest.mark.slow
def test_a_killed_and_a_paused_worker_are_told_with_cause_and_replacement_once_each(workspace, tmp_path):
    """Only "0 samples/s" was shown, and steps that went backwards."""
    plan = plan_in(tmp_path)
    options = ("run.steps=100000", "recovery.snapshot_every=1000", "recovery.lease=8")
    train = workspace.start("train", str(plan), *(word for each in options for word in ("--set", each)))
    until(train.stderr, "step ")
    killed = workspace.worker(1)
    os.kill(killed, signal.SIGKILL)
    told = [until(train.stderr, "SIGKILL"), until(train.stderr, "computes again")]
    assert re.search(r"worker 1 \(stage 1\) was killed by SIGKILL .* step 0, so that \d+ steps are done again", told[0])
    assert f"process {workspace.worker(1)}" in told[1]
    until(train.stderr, "step ")
    paused = workspace.worker(0)
    os.kill(paused, signal.SIGSTOP)
    waits = until(train.stderr, "no step was finished")
    assert f"process {paused}" in waits
    assert "recovery.lease is 8 s" in waits
    assert "worker 0 (stage 0) was silent for 8" in until(train.stderr, "its replacement begins")
    until(train.stderr, "computes again")
    train.send_signal(signal.SIGINT)
    _, rest = train.communicate()
    assert not re.search("was killed|silent|computes again|no step", rest)
