"""Stages with replicas train as a plain loop does that adds gradients in the same groups, to the bit."""

import json
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from stageline import train
from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.control.client import Client
from stageline.workers.extras.exchange.stored_weights import weights_in
from stageline.workers.extras.recording.replay import NoSuchMicrobatch, ReplayTarget, replay
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference, replica_loop
from support.fork_server import ForkServer
from support.redis_server import RedisServer
from support.workspace import Command, Workspace, free_port, until, wait_for

FOLDER = Path(reference.__file__).parent / "replicated"
CONFIG = FOLDER / "stageline.toml"
ALL = ((0, 1, 2, 3, 4, 5, 6),)
TWO = ((0, 2, 4, 6), (1, 3, 5))
THREE = ((0, 3, 6), (1, 4), (2, 5))
UNLIKE = ((0, 2, 3, 5, 6), (1, 4))  # share = [2, 1]
SHAPES = {
    "first": (("stage.0.replicas=2",), (TWO, ALL, ALL)),
    "middle": (("stage.1.replicas=3",), (ALL, THREE, ALL)),
    "last": (("stage.2.replicas=2",), (ALL, ALL, TWO)),
    "neighbours": (("stage.1.replicas=2", "stage.2.replicas=3"), (ALL, TWO, THREE)),
    "all": (("stage.0.replicas=3", "stage.1.replicas=2", "stage.2.replicas=2"), (THREE, TWO, TWO)),
    "unlike": (("stage.1.replicas=2", "stage.1.share=[2, 1]"), (ALL, UNLIKE, ALL)),
}
MIDDLE_KILLED = [("worker-1", 25), ("worker-3", 40), ("worker-4", 20)]

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def plain(shape: str) -> reference.ReferenceResult:
    return replica_loop.train(reference.recipe(FOLDER), (2, 5), SHAPES[shape][1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_with_replicas_is_the_plain_loop_in_groups(shape: str, tmp_path: Path) -> None:
    plan = read_plan(CONFIG, sets=SHAPES[shape][0], environment={})
    outcome = run_memory(prepare(plan), "replicas", tmp_path / "run")
    assert outcome.code == 0, outcome.reason
    assert outcome.facts["weights_sha256"] == plain(shape).weights_sha256
    assert [outcome.facts["losses"][str(step)] for step in range(5)] == plain(shape).losses


@pytest.mark.parametrize(
    ("shape", "workers"), [("middle", ([2, 1, 0], [1], [1])), ("all", ([0, 1, 2], [2, 0, 1], [0]))]
)
def test_so_is_one_whose_workers_have_replicas_of_several_stages(
    shape: str, workers: tuple[list[int], ...], tmp_path: Path
) -> None:
    # The sums of the one stage had taken the place of the losses of the last.
    owned = [f"workers.{number}.stages={stages}" for number, stages in enumerate(workers)]
    outcome = run_memory(
        prepare(read_plan(CONFIG, sets=[*SHAPES[shape][0], *owned], environment={})), "replicas", tmp_path / "run"
    )
    assert (outcome.code, outcome.facts["weights_sha256"]) == (0, plain(shape).weights_sha256)
    assert [outcome.facts["losses"][str(step)] for step in range(5)] == plain(shape).losses


def test_the_groups_are_part_of_the_result() -> None:
    assert len({plain(shape).weights_sha256 for shape in SHAPES}) == len(SHAPES)


def test_a_model_in_one_stage_with_replicas_is_data_parallel(tmp_path: Path) -> None:
    sets = ["model.stages=1", "stage.0.replicas=3"]
    outcome = run_memory(prepare(read_plan(CONFIG, sets=sets, environment={})), "replicas", tmp_path / "run")
    whole = replica_loop.train(reference.recipe(FOLDER), (), (THREE,))
    assert (outcome.code, outcome.facts["weights_sha256"]) == (0, whole.weights_sha256)


@pytest.mark.slow
def test_a_finished_run_without_snapshots_has_the_weights_of_its_stages_once(tmp_path: Path) -> None:
    # A file was demanded for each further replica, and none is written.
    sets = [
        *SHAPES["middle"][0],
        "recovery.snapshot_every=0",
        "recovery.restarts=0",
        "queues.url=memory://",
        f"run.dir={tmp_path}",
    ]
    run = train(str(CONFIG), *sets).folder
    assert [each.name for each in weights_in(run, None).files] == [f"stage-{stage}.safetensors" for stage in range(3)]


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (("schedule.name=interleaved-1f1b",), "stage.1.replicas"),
        (("optimizer.clip_norm=1.0",), "stage.1.replicas"),
        (("stage.1.share=[1, 2, 3]",), "stage.1.share"),
        (("stage.1.share=[0, 2]",), "stage.1.share"),
        (("schedule.microbatches=1",), "stage.1.replicas"),
        (("stage.7.replicas=2",), "stage.7"),
        (("recovery.on_bad_microbatch=skip",), "stage.1.replicas"),
        (("workers.0.stages=[0, 1, 1]", "workers.1.stages=[2]"), "workers.0.stages"),
        (("workers.0.stages=[0, 1]", "workers.1.stages=[2]"), "workers"),
        (("stage.one.replicas=2",), "stage.one"),
        (("stage.0.elastic=true",), "stage.0.elastic"),
        (("stage.1.elastic=true", "recovery.restarts=0"), "stage.1.elastic"),
    ],
)
def test_what_replicas_cannot_have_is_refused_by_its_key(sets: tuple[str, ...], key: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        read_plan(CONFIG, sets=["stage.1.replicas=2", *sets], environment={})
    assert key in {error.key for error in refused.value.errors}


def test_each_replica_that_is_killed_is_replaced_with_equal_bits(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = [f"run.dir={tmp_path}", "queues.url=ipc://", *SHAPES["middle"][0]]
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run", kills=MIDDLE_KILLED)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == plain("middle").weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "url"),
    [("neighbours", "shm://"), ("all", "ipc://"), ("all", "tcp://0.0.0.0:0"), ("all", "redis://127.1:{port}/0")],
)
def test_replicas_of_several_stages_may_be_killed(
    shape: str, url: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """The last two have the keys of places."""
    kills = [("worker-0", 20), ("worker-2", 20), ("worker-3", 20)]
    with RedisServer() as server:
        sets = [f"run.dir={tmp_path}", f"queues.url={url.format(port=server.port)}", *SHAPES[shape][0]]
        outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == plain(shape).weights_sha256


@cache
def plain_of(stage: int, replicas: int) -> str:
    dealt = {1: ALL, 2: TWO, 3: THREE}
    groups = tuple(dealt[replicas] if each == stage else ALL for each in range(3))
    return replica_loop.train(reference.recipe(FOLDER), (2, 5), groups).weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("transport", ["zeromq", "redis"])
def test_each_replica_of_a_stage_is_killed_in_turn(
    transport: str, stage: int, replicas: int, fork_server: ForkServer, tmp_path: Path
) -> None:
    workers = [stage, *range(3, 2 + replicas)]
    kills = [(f"worker-{worker}", 8 + 6 * turn) for turn, worker in enumerate(workers)]
    with ExitStack() as stack:
        url = stack.enter_context(RedisServer()).url if transport == "redis" else "ipc://"
        sets = [f"run.dir={tmp_path}", f"queues.url={url}", f"stage.{stage}.replicas={replicas}"]
        outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["restarts"] == replicas
    assert outcome["facts"]["weights_sha256"] == plain_of(stage, replicas)


COUNTING = """
from torch import nn

class Counting(nn.Module):
    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        self.seen += 1
        return x

def counting():
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), Counting(), nn.Linear(8, 3))

def counting_unsaved():
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), Counting(persistent=False), nn.Linear(8, 3))

def nan_in_some(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets)
    return loss * float("nan") if targets.tolist() == NAMED else loss
"""


def own_model(folder: Path, targets: list[int]) -> str:
    (folder / "own.py").write_text(f"import torch\nNAMED = {targets}\n{COUNTING}")
    return f"{folder / 'own.py'}"


@pytest.mark.parametrize(
    ("trained", "factory"),  # all of stage 1, or nothing of it
    [("*", "counting"), ("3.*", "counting"), ("[03].*", "counting"), ("*", "counting_unsaved")],
)
def test_a_layer_that_counts_what_it_sees_is_found_out(trained: str, factory: str, tmp_path: Path) -> None:
    """State that is in no state dict was not compared."""
    sets = [f"model.factory={own_model(tmp_path, [])}:{factory}", "model.cut=[1, 3]", "stage.1.replicas=2"]
    sets.append(f'model.trainable=["{trained}"]')
    outcome = run_memory(prepare(read_plan(CONFIG, sets=sets, environment={})), "replicas", tmp_path / "run")
    assert outcome.code == 1
    assert "stage 1 has changed 2.seen while it computed step 0" in outcome.reason


@pytest.mark.slow
def test_with_every_microbatch_recorded_replicas_have_the_same_bits_and_each_has_its_own_again(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = (*SHAPES["neighbours"][0], "recovery.record=all", f"run.dir={tmp_path}")
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run")
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == plain("neighbours").weights_sha256
    for copy, group in ((0, ALL[0]), (1, TWO[0]), (3, TWO[1]), (2, THREE[0]), (4, THREE[1]), (5, THREE[2])):
        for microbatch in group:
            assert replay(tmp_path / "run", ReplayTarget(copy, 4, microbatch)).reproduced


@pytest.mark.slow
def test_a_bad_microbatch_is_recorded_at_the_replica_that_has_it(fork_server: ForkServer, tmp_path: Path) -> None:
    job = prepare(read_plan(CONFIG, sets=[], environment={}))
    target = job.feed.microbatch(3, 1).targets.tolist()  # of the second replica
    sets = [f"run.dir={tmp_path}", f"model.loss={own_model(tmp_path, target)}:nan_in_some", "stage.2.replicas=2"]
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run")
    assert f"stageline replay {tmp_path / 'run'} --stage 3 --step 3 --microbatch 1" in outcome["reason"]
    found = replay(tmp_path / "run", ReplayTarget(3, 3, 1))
    assert found.reproduced
    with pytest.raises(NoSuchMicrobatch, match=r"stage 2\.1 has no microbatch 2: replica 2\.0 has it; use --stage 2"):
        replay(tmp_path / "run", ReplayTarget(3, 3, 2))


@pytest.mark.slow
def test_a_run_that_ended_goes_on_with_the_same_replicas(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = [f"run.dir={tmp_path}", *SHAPES["neighbours"][0]]
    broken = (*sets, "recovery.restarts=1")
    ended = fork_server.train(CONFIG, *broken, folder=tmp_path / "run", kills=[("worker-3", 30), ("worker-3", 2)])
    assert ended["code"] == 1, ended["reason"]
    assert "worker 3 (stage 1.1)" in ended["reason"]
    resumed = fork_server.train(CONFIG, *sets, folder=tmp_path / "run", resume=True)
    assert resumed["code"] == 0, resumed["reason"]
    assert resumed["facts"]["weights_sha256"] == plain("neighbours").weights_sha256


class ByHand:
    """A broker and four workers that are started by hand, each worker with a folder of its own; what is killed is not
    started again. Worker 1 and worker 3 have the replicas of stage 1."""

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self.url = f"tcp://127.0.0.1:{free_port()}"
        keys = ["queues.url=tcp://127.0.0.1:0", "stage.1.replicas=2", "stage.1.elastic=true", "run.steps=400"]
        keys += ["recovery.lease=1", "recovery.snapshot_every=20"]
        self.workspace = workspace
        self._plan = (str(CONFIG), *(word for key in keys for word in ("--set", key)))
        self._broker = workspace.start("broker", *self._plan, "--bind", self.url, "--run", "by-hand")
        until(self._broker.stderr, "broker at")
        self.folders = [folder / f"machine-{index}" for index in range(4)]
        self.workers = [self.start(index) for index in range(4)]
        self.killed: list[Command] = []

    def start(self, index: int) -> Command:
        place = ("--index", str(index), "--set", f"run.dir={self.folders[index]}")
        return self.workspace.start("worker", *self._plan, "--broker", self.url, *place)

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        self.workers[index].send_signal(number)
        self.killed.append(self.workers[index])

    def wait_for_snapshots(self, worker: int) -> None:
        """Until the first is gone, since a newer checkpoint is complete: no other machine has a snapshot of that."""
        snapshots = self.folders[worker] / "by-hand" / "checkpoints" / f"stage-{worker}"
        wait_for(lambda: any(snapshots.glob("step-*")) and not (snapshots / f"step-{20:010d}").exists())

    def end(self) -> tuple[str, str]:
        """The digest of the weights once all that were not killed have ended, and what all have said."""
        errors = [process.communicate()[1] for process in {*self.killed, *self.workers}]
        self._broker.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
        errors.append(self._broker.communicate()[1])
        left = [process for process in (self._broker, *self.workers) if process not in self.killed]
        assert [process.returncode for process in left] == [0] * len(left), errors
        result = json.loads((self.workspace.folder / "runs" / "by-hand" / "result.json").read_text())
        return result["weights_sha256"], "".join(errors)


def plain_by_hand() -> str:
    return replica_loop.train(reference.recipe(FOLDER, steps=400), (2, 5), (ALL, TWO, ALL)).weights_sha256


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_lost_replica_goes_to_the_machine_of_another(workspace: Workspace, tmp_path: Path) -> None:
    run, lost, other = ByHand(workspace, tmp_path), 3, 1
    run.wait_for_snapshots(lost)
    run.kill(lost)
    digest, said = run.end()
    assert f"taking the place of a lost replica: worker {lost}" in said
    assert any((run.folders[other] / "by-hand" / "checkpoints").glob(f"stage-{lost}/step-*"))
    assert digest == plain_by_hand()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_machine_that_has_taken_the_place_of_a_replica_may_be_lost_and_return(
    number: int, workspace: Workspace, tmp_path: Path
) -> None:
    """The worker that it had started for the other place ended the run, since its starter was gone."""
    run, lost, other = ByHand(workspace, tmp_path), 3, 1
    run.wait_for_snapshots(lost)
    run.kill(lost)
    with Client(run.url) as client:
        wait_for(lambda: _computes(client.ask("status", timeout=10)["workers"][lost], f"worker-{lost}-at-{other}"))
    run.kill(other, number)
    run.workers[other] = run.start(other)
    digest, said = run.end()
    assert said.count(f"taking the place of a lost replica: worker {lost}") == 2
    assert digest == plain_by_hand()


def _computes(row: Mapping[str, object], name: str) -> bool:
    """True if a place, as the status shows it, belongs to the process `name`, which has computed something there."""
    return row.get("name") == name and bool(row["actions"])
