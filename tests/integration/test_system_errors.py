"""Refusals of the system, and user code that takes over: a sentence and an exit code, no traceback."""

import json
import os
import signal
import subprocess
import sys

import pytest

from stageline.workers.cli.app import run
from support.workspace import WAITS_FOR_EVER, until

MEMORY = ("--set", "queues.url=memory://")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("run.dir=/dev/null/x", "Not a directory"),
        ("run.dir=/proc/x", "No such file"),
        (f"run.name={'a' * 250}", "File name too long"),
    ],
)
def test_a_run_folder_that_cannot_be_made_is_the_plans_fault(setting, reason, workspace, capsys):
    assert workspace.here("train", ".", *MEMORY, "--set", setting) == 78
    said = capsys.readouterr().err
    assert "the folder of the run" in said
    assert reason in said
    assert "Traceback" not in said


def test_a_folder_for_temporary_files_that_is_too_deep_for_sockets_is_refused_before_anything_starts(workspace):
    deep = workspace.temporary / ("a" * 120)
    deep.mkdir()
    ended = workspace.command("train", ".", TMPDIR=str(deep))
    assert ended.returncode == 1
    assert f"{deep}, is too long for sockets" in ended.stderr
    assert "Set TMPDIR to a shorter folder" in ended.stderr
    assert workspace.runs() == []


def test_a_picture_that_cannot_be_written_is_named(capsys):
    assert run(["schedule", "show", "1f1b", "--stages", "2", "--microbatches", "2", "--svg", "/nope/x.svg"]) == 1
    assert capsys.readouterr().err == "stageline: cannot use /nope/x.svg: No such file or directory\n"


def test_output_that_takes_nothing_more_is_reported_without_a_traceback():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "stageline", "schedule", "list"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "stageline: cannot write to stdout, or to the run's folder: No space left on device\n"


def test_a_broker_address_that_zeromq_cannot_use_is_named(capsys):
    url = f"ipc:///tmp/{'a' * 150}"
    assert run(["status", "--broker", url]) == 3
    assert f"cannot use {url}: File name too long" in capsys.readouterr().err


def test_what_user_code_prints_does_not_come_before_the_result(workspace, capsys):
    workspace.write(
        "model.py", (workspace.folder / "model.py").read_text().replace("    return", "    print('hello')\n    return")
    )
    for command in (["train", ".", *MEMORY, "--json"], ["plan", ".", "--json"], ["doctor", ".", "--json"]):
        assert workspace.here(*command) == 0
        captured = capsys.readouterr()
        assert "hello" in captured.err
        assert "schema" in json.loads(captured.out)


def test_user_code_that_exits_does_not_end_the_command_silently(workspace, capsys):
    text = (workspace.folder / "model.py").read_text()
    workspace.write("model.py", text.replace("    return (outputs", "    exit(0)\n    return (outputs"))
    assert workspace.here("train", ".", *MEMORY) == 78
    assert "SystemExit" in capsys.readouterr().err


def test_an_interrupted_doctor_leaves_nothing_behind(workspace):
    os.mkfifo(workspace.folder / "gate")
    workspace.write("data.py", WAITS_FOR_EVER.format(name="batches"))
    doctor = workspace.start("doctor", ".")
    until(doctor.stderr, "waits now")
    doctor.send_signal(signal.SIGINT)
    assert doctor.wait() == 130
    assert list(workspace.temporary.iterdir()) == []


def test_a_worker_without_patience_asks_once(workspace):
    ended = workspace.command("worker", ".", "--broker", f"ipc://{workspace.temporary}/no-broker", "--patience", "0")
    assert ended.returncode == 3
    assert "no broker answered" in ended.stderr
