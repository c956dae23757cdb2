"""Faults of processes that need others, and signals at any moment: a clear sentence, the right exit code, and
nothing left running. What can be wrong with what a user gives is in `tests/misuse`.
"""

import hashlib
import os
import signal
import socket
from functools import partial

import pytest
import zmq

from stageline.broker.control.messages import CONTROL_VERSION, Assigned, Hello, Refused
from stageline.broker.control.protocol import decode_from_broker, encode
from stageline.broker.queues.requests import SEAL_BYTES, RetentionReply, pack
from stageline.pipeline.plan import read_plan
from stageline.workers.cli.app import run
from stageline.workers.control.client import Client
from stageline.workers.runs.folder import read_control_secret
from support.workspace import WAITS_FOR_EVER, free_port, until, wait_for


def test_a_port_in_use_is_named_with_who_has_it(workspace):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = workspace.command("broker", ".", "--bind", f"tcp://127.0.0.1:{port}")
    assert ended.returncode == 1
    assert f"cannot listen at tcp://127.0.0.1:{port}: it is in use by pid {os.getpid()}" in ended.stderr


@pytest.mark.slow
def test_an_address_without_a_broker_gives_exit_code_3(workspace, capsys):
    url = f"tcp://127.0.0.1:{free_port()}"
    assert run(["status", "--broker", url]) == 3
    assert f"no broker answered at {url}" in capsys.readouterr().err
    ended = workspace.command("worker", ".", "--broker", url, "--patience", "0.3")
    assert ended.returncode == 3
    assert f"no broker answered at {url}" in ended.stderr


def test_a_second_worker_that_claims_a_stage_is_turned_away_and_the_first_is_not_disturbed(workspace):
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}")
    url = address_of(broker)
    first = workspace.start("worker", ".", "--broker", url, "--index", "0", "--name", "first")
    until(first.stderr, "assigned")
    second = workspace.command("worker", ".", "--broker", url, "--index", "0", "--name", "second")
    assert second.returncode == 1
    assert "stage 0 is claimed by worker first" in second.stderr
    other = workspace.command("worker", ".", "--broker", url, "--index", "1")
    assert other.returncode == 0, other.stderr
    assert first.wait() == 0
    with Client(url, partial(read_control_secret, workspace.runs()[-1])) as client:
        client.dismiss()
    assert broker.wait() == 0


def test_a_worker_of_another_plan_is_refused_with_the_difference(workspace):
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}")
    url = address_of(broker)
    ended = workspace.command("worker", ".", "--broker", url, "--set", "run.seed=5")
    assert ended.returncode == 78
    assert "run.seed: 5 here, 0 there" in ended.stderr
    interrupted(broker)


def test_a_worker_of_another_version_is_refused(workspace):
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}")
    with zmq.Context() as context, context.socket(zmq.DEALER) as worker:
        worker.connect(address_of(broker))
        worker.send(encode(Hello(CONTROL_VERSION + 1, read_plan(workspace.folder).digest(), "new", "host", 1, "")))
        refused = decode_from_broker(worker.recv()).message
    assert isinstance(refused, Refused)
    assert refused.code == 1
    assert "install the same stageline" in refused.reason
    interrupted(broker)


@pytest.mark.slow
@pytest.mark.parametrize("foreign", ["another run", pytest.param("another wire version", marks=pytest.mark.slow)])
def test_a_message_of_another_run_or_wire_version_ends_the_worker_that_gets_it(foreign, workspace):
    """The test is worker 0, and answers worker 1's requests for activations with what is not of this run."""
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}")
    url = address_of(broker)
    worker = workspace.start("worker", ".", "--broker", url, "--index", "1", "--set", "queues.url=ipc://")
    until(worker.stderr, "assigned")  # the impostor makes no progress: its lease must not run out before
    with zmq.Context() as context, context.socket(zmq.ROUTER) as queues, context.socket(zmq.DEALER) as control:
        control.set(zmq.LINGER, 0)
        queues.set(zmq.LINGER, 0)
        queues.bind("tcp://127.0.0.1:*")
        control.connect(url)
        assigned = join_as_worker_0(control, read_plan(workspace.folder).digest(), queues.get_string(zmq.LAST_ENDPOINT))
        assert queues.poll(30_000), "worker 1 has asked for nothing"
        peer, *_ = queues.recv_multipart()
        queues.send_multipart([peer, b"", answer(foreign, assigned.run)])
        _, errors = worker.communicate()
        with Client(url, partial(read_control_secret, workspace.runs()[-1])) as client:
            wait_for(lambda: client.ask("status")["phase"] == "failed")
            client.dismiss()
        broker.communicate()
    assert worker.returncode == 1
    assert ("another-run" if foreign == "another run" else "version") in errors
    assert broker.returncode == 1


def join_as_worker_0(control, plan, endpoint):
    """Says hello until it is assigned, and then where its queues are, as a worker does."""
    control.send(encode(Hello(CONTROL_VERSION, plan, "impostor", socket.gethostname(), 1, endpoint, 0)))
    while not isinstance(said := decode_from_broker(control.recv()).message, Assigned):
        continue
    hello = Hello(CONTROL_VERSION, plan, "impostor", socket.gethostname(), 1, endpoint, 0, said.incarnation)
    control.send(encode(hello, said.secret, serial=1))
    return said


def test_a_killed_worker_ends_the_run_with_its_stage_its_microbatch_and_its_end(workspace):
    train = workspace.start("train", ".", "--set", "run.steps=1000000", "--set", "recovery.restarts=0")
    until(train.stderr, "running")
    with Client(broker_of(workspace)) as client:
        wait_for(lambda: client.ask("status")["finished_floor"] >= 3)
        victim = client.ask("status")["workers"][1]["pid"]
    os.kill(victim, signal.SIGKILL)
    _, errors = train.communicate()
    assert train.returncode == 1
    assert "worker 1 (stage 1)" in errors
    assert "was killed by SIGKILL" in errors
    assert " of step " in errors
    assert "The logs are in runs/small-" in errors


@pytest.mark.slow
def test_queues_that_cannot_be_opened_are_named_by_the_run(workspace):
    """That stood in the log of a worker, which was started again and again."""
    train = workspace.command("train", ".", "--set", "queues.url=tcp://192.0.2.1:0")
    assert train.returncode == 1
    assert "its queues cannot be opened: cannot listen at tcp://192.0.2.1:0" in train.stderr
    assert "this machine has no such address" in train.stderr


@pytest.mark.slow
def test_a_broker_that_waits_for_its_records_is_named_by_the_run(workspace):
    """Its workers said that there was no broker."""
    train = workspace.command("train", ".", "--set", f"broker.store=redis://127.0.0.1:{free_port()}/0")
    assert train.returncode == 1
    assert "Last log line of the broker: " in train.stderr
    assert "waits for its records: Redis at redis://127.0.0.1:" in train.stderr


def test_a_killed_supervisor_takes_all_its_processes_along(workspace):
    train = workspace.start("train", ".", "--set", "run.steps=1000000")
    until(train.stderr, "running")
    train.kill()
    train.wait()
    wait_for(lambda: not workspace.processes())  # they notice by themselves
    for path in workspace.temporary.rglob("*"):  # the supervisor, which clears its folder, was killed
        path.unlink() if not path.is_dir() else None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_middle_of_a_run_stops_it_quietly(number, workspace):
    train = workspace.start("train", ".", "--set", "run.steps=1000000", "--set", "recovery.restarts=0")
    until(train.stderr, "running")
    train.send_signal(number)
    _, errors = train.communicate()
    assert train.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_an_interrupt_while_the_workers_start_stops_them(workspace):
    os.mkfifo(workspace.folder / "gate")
    workspace.write("model.py", (workspace.folder / "model.py").read_text() + WAITS_IN_A_WORKER)
    train = workspace.start("train", ".")
    with (workspace.folder / "gate").open("w"):  # opens once a worker reads
        train.send_signal(signal.SIGINT)
        assert train.wait() == 130


WAITS_IN_A_WORKER = """
import sys

def build(plain=build):
    if sys.argv[1] == "worker":
        open("gate").read()
    return plain()
"""


@pytest.mark.parametrize("command", ["train", "worker", "plan"])
def test_an_interrupt_while_the_plan_is_prepared_ends_it_at_once_whatever_the_users_code_catches(command, workspace):
    os.mkfifo(workspace.folder / "gate")
    workspace.write("data.py", WAITS_FOR_EVER.format(name="batches"))
    process = workspace.start(command, ".")
    until(process.stderr, "waits now")
    process.send_signal(signal.SIGINT)
    stdout, errors = process.communicate()
    assert process.returncode == 130
    assert stdout + errors == ""


@pytest.mark.parametrize(
    "moment",
    [
        "stageline.workers.cli.app",
        "torch._utils",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("click.core", "torch.nn.modules.linear")),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_quiet(moment, workspace):
    process = workspace.start("doctor", cold=True, PYTHONVERBOSE="1")  # it tells of every import
    until(process.stderr, f"import '{moment}'")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_second_interrupt_ends_at_once_even_if_a_worker_hangs_in_the_users_code(workspace):
    os.mkfifo(workspace.folder / "gate")
    workspace.write("data.py", (workspace.folder / "data.py").read_text() + HANGS_AT_STEP_3)
    train = workspace.start("train", ".", "--set", 'data.source="data.py:hanging"')
    until(train.stderr, "running")
    with Client(broker_of(workspace)) as client:
        wait_for(lambda: "step 3" in str(client.ask("status")["workers"][0]["now"]))
    train.send_signal(signal.SIGINT)
    train.send_signal(signal.SIGTERM)
    assert train.wait() == 130


HANGS_AT_STEP_3 = """

class Hanging(Rows):
    def batch(self, step):
        return super().batch(step) if step < 3 else open("gate").read()

def hanging(batch_size, seed):
    rows = batches(batch_size, seed)
    rows.__class__ = Hanging
    return rows
"""


def answer(foreign, run):
    """Messages to a consumer from a producer of another run, or of another version."""
    frame = pack(RetentionReply("another-run" if foreign == "another run" else run, "forward-1", 1, 0, 0, 0))
    if foreign == "another run":
        return frame
    body = bytes([frame[SEAL_BYTES] + 1]) + frame[SEAL_BYTES + 1 :]
    return hashlib.blake2b(body, digest_size=SEAL_BYTES).digest() + body


def address_of(broker):
    return until(broker.stderr, "broker at").split("broker at ")[1].split(",")[0]


def broker_of(workspace):
    (folder,) = workspace.runs()
    return (folder / "broker.url").read_text().strip()


def interrupted(broker):
    broker.send_signal(signal.SIGINT)
    broker.communicate()
    assert broker.returncode == 130
