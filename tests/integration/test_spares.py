"""A spare worker takes the place of a lost one, and the weights are the undisturbed run's."""

import json
import os
import signal
import threading

import pytest
import zmq

from stageline.broker.control.messages import CONTROL_VERSION, Assigned, Hello, Refused, Report, Standby, Stop, ToBroker
from stageline.broker.control.protocol import decode_to_broker, encode
from stageline.workers.control.client import Client
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import Stopped, WorkerIdentity
from stageline.workers.runs import folder as runs
from support import reference
from support.paths import EXAMPLES
from support.workspace import until, wait_for

RECOVERY = ("--set", "recovery.restarts=3", "--set", "recovery.snapshot_every=50", "--set", "recovery.record=all")
STEPS = ("--set", "run.steps=600", "--set", "run.log_every=100")


@pytest.mark.parametrize(
    "kills",
    [
        [("worker-0", 40)],
        pytest.param([("worker-1", 3)], marks=pytest.mark.slow),
        pytest.param([("worker-0", 25), ("worker-1", 30)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_spare_takes_a_lost_workers_place(fork_server, tmp_path, kills):
    steps, microbatches = 12, 3
    sets = (
        f"run.steps={steps}",
        f"run.dir={tmp_path}",
        "run.log_every=1",
        f"schedule.microbatches={microbatches}",
        "recovery.restarts=5",
        "recovery.snapshot_every=3",
    )
    config = EXAMPLES / "digits" / "stageline.toml"
    outcome = fork_server.train(config, *sets, folder=tmp_path / "run", kills=kills, spares=1)
    expected = reference.train(reference.recipe(config.parent, steps=steps, microbatches=microbatches))
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["restarts"] == len(kills)
    assert outcome["facts"]["weights_sha256"] == expected.weights_sha256
    names = {row["index"]: row["name"] for row in outcome["facts"]["workers"]}
    lost = {int(name[-1]) for name, _ in kills}
    assert {index for index, name in names.items() if name.startswith("spare-")} == lost


@pytest.mark.parametrize("spares", [(), ("--spares", "1")], ids=["started again", "spare"])
@pytest.mark.slow
def test_train_goes_on_after_a_kill_with_the_same_bits(workspace, spares):
    undisturbed = workspace.command("train", ".", "--json", *STEPS)
    train = workspace.start("train", ".", "--json", *STEPS, *RECOVERY, *spares)
    until(train.stderr, "running")
    url = runs.read_broker_url(max(workspace.runs(), key=lambda path: path.stat().st_mtime))
    assert url is not None
    with Client(url) as client:
        pid = client.ask("status", timeout=10)["workers"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    said, errors = train.communicate()
    assert train.returncode == 0, errors
    mine, theirs = json.loads(said), json.loads(undisturbed.stdout)
    assert mine["restarts"] == 1
    assert (mine["weights_sha256"], mine["losses"]) == (theirs["weights_sha256"], theirs["losses"])


@pytest.mark.slow
def test_a_spare_that_dies_with_the_broker_which_gave_it_a_place_is_replaced_at_once(workspace):
    """The next broker waited for it for `recovery.loading`: nothing had told it of the exit."""
    train = workspace.start("train", ".", *STEPS, *RECOVERY, "--spares", "2", "--set", "recovery.loading=60")
    until(train.stderr, "running")
    (folder,) = workspace.runs()
    url = runs.read_broker_url(folder)
    assert url is not None
    with Client(url) as client:
        wait_for(lambda: len(client.ask("status", timeout=10)["spares"]) == 2)
        facts = client.ask("status", timeout=10)
        spare = facts["spares"][0]["pid"]
        os.kill(spare, signal.SIGKILL)  # the broker takes it for a spare for some seconds, and gives it the place
        os.kill(facts["workers"][1]["pid"], signal.SIGKILL)
        wait_for(lambda: client.ask("status", timeout=10)["workers"][1].get("pid") == spare)
    os.kill(workspace.process("broker"), signal.SIGKILL)
    assert train.wait() == 0
    lost = [line for line in (folder / "broker.log").read_text().splitlines() if f"(pid {spare}, host" in line]
    assert any("was killed by SIGKILL" in line for line in lost), lost


def test_a_spare_waits_longer_than_its_patience(tmp_path):
    control, broker = ControlThread(f"ipc://{tmp_path}/b", introduction()), Broker(f"ipc://{tmp_path}/b")
    answers = [Standby("the run has not begun"), Standby("no place is free"), Assigned("run", 1, 7, 20)]
    with broker.answering(answers) as hellos:
        assert control.join(1.5) == Assigned("run", 1, 7, 20)
    control.close()
    assert [hello.spare for hello in hellos] == [True, True, True]


def test_a_spare_that_is_assigned_reports_at_once_since_loading_may_take_longer_than_a_lease(tmp_path):
    control, broker = ControlThread(f"ipc://{tmp_path}/b", introduction()), Broker(f"ipc://{tmp_path}/b")
    with broker.answering([Assigned("run", 1, 7, 20)]):
        control.join(1.5)
        thanks = broker.hear()
    control.close()
    assert isinstance(thanks, Report)
    assert thanks.incarnation == 7


def test_a_spare_of_a_resumed_run_exits_if_the_others_do_not_come(tmp_path):
    control, broker = ControlThread(f"ipc://{tmp_path}/b", introduction()), Broker(f"ipc://{tmp_path}/b")
    waits = Standby("it waits for worker 1 (stage 1)", "run", 20)
    with broker.answering([waits]), pytest.raises(Stopped, match=r"stage 1.*no worker came") as left:
        control.join(1.5, workers_timeout=0.0)
    control.close()
    assert left.value.exit_code == 69


@pytest.mark.parametrize("last", [Stop("all steps are done", 0), Refused("the run is over", 1)])
def test_a_spare_exits_with_the_run(tmp_path, last):
    control, broker = ControlThread(f"ipc://{tmp_path}/b", introduction()), Broker(f"ipc://{tmp_path}/b")
    with broker.answering([Standby("no place is free"), last]), pytest.raises(Stopped) as left:
        control.join(1.5)
    control.close()
    assert left.value.exit_code == last.code


def introduction() -> WorkerIdentity:
    return WorkerIdentity(Hello(CONTROL_VERSION, "d" * 64, "spare-1", "host", 1, "", spare=True))


class Broker:
    """Answers each hello with the next of its sentences."""

    def __init__(self, url: str) -> None:
        self._url = url

    def answering(self, sentences: list) -> "Broker":
        self._sentences = sentences
        return self

    def __enter__(self) -> list[Hello]:
        self._hellos: list[Hello] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self._url)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self._hellos

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()
        self._context.term()

    def hear(self) -> ToBroker:
        """The next sentence, once all hellos are answered."""
        self._thread.join()
        _, said = self._socket.recv_multipart()
        return decode_to_broker(said).message

    def _serve(self) -> None:
        for sentence in self._sentences:
            sender, said = self._socket.recv_multipart()
            hello = decode_to_broker(said).message
            assert isinstance(hello, Hello)
            self._hellos.append(hello)
            self._socket.send_multipart([sender, encode(sentence)])
