"""All stages leave a bad microbatch out as if it had never been, however often it comes, whichever worker is killed."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stageline.pipeline.digest import tensor_digests, weights_sha256
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.recording.replay import ReplayTarget, replay
from stageline.workers.extras.recording.skipping import IN_A_ROW
from stageline.workers.runtime.job import prepare
from support.fork_server import ForkServer, Kill
from support.workspace import DATA, Workspace

MODEL = """
from pathlib import Path

import torch
from torch import nn

def check(x, once):
    # Refuses the outlier, or, if `once` is a folder, refuses it once wherever it comes along.
    if not torch.is_grad_enabled() or x.abs().max() < 1e6:
        return
    seen = Path(once) / str(x.sum().item())
    if once and seen.exists():
        return
    if once:
        seen.touch()
    raise ValueError("what a number")

class Picky(nn.Module):
    def __init__(self, once):
        super().__init__()
        self.once = once

    def forward(self, x):
        check(x, self.once)
        return x

class PickyNorm(nn.BatchNorm1d):
    def forward(self, x):
        y = super().forward(x)  # its statistics are off by now
        check(x, self.once)
        return y

def build(picky=-1, once=""):
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]
    if picky == 0:
        layers[1], layers[3] = Picky(once), nn.BatchNorm1d(8)
    if picky == 1:
        layers[3] = PickyNorm(8)
        layers[3].once = once
    if picky == 2:
        layers.append(Picky(once))
    return nn.Sequential(*layers)

def loss(outputs, targets):
    value = nn.functional.cross_entropy(outputs, targets)
    return value * float("nan") if outputs.abs().max() > 1e6 else value
"""
OUTLIER = "    x[7] = 1e9\n    return"
STEPS, MICROBATCHES = 12, 4
BASE = ("run.steps=12", "run.log_every=1", "data.batch_size=8", "model.metrics=[]", "model.cut=[2, 4]")
SYNC, ASYNC = ("schedule.microbatches=4",), ("schedule.microbatches=1", "schedule.mode=async")
# Of the kills, those that `make test` tries: each mode, worker and stage once.
KILLED_EACH_TIME = ((SYNC, 0, 1),)
SKIP = ("recovery.on_bad_microbatch=skip", "recovery.restarts=5", "recovery.snapshot_every=3", "recovery.record=all")
WHERE = {  # the stage that finds out, and how
    0: ("model.options.picky=0",),
    1: ("model.options.picky=1",),
    2: ("model.options.picky=2",),
}
REST = [(0, "zb-h1"), (1, "1f1b"), (2, "zb-h1")]


@pytest.fixture
def workspace(workspace: Workspace) -> Workspace:
    """One whose model may refuse what its data hold."""
    workspace.write("model.py", MODEL)
    workspace.write("data.py", DATA.replace("    return", OUTLIER))
    return workspace


def plain_loop(folder: Path, *sets: str) -> str:
    """The digest of a plain loop's weights, in which the microbatches with the outlier are passed over."""
    torch.set_num_threads(1)  # as the plan has it: BatchNorm adds in another order with more
    job = prepare(read_plan(folder, sets=sets))
    model = nn.Sequential(*[layer for segment in job.segments for layer in segment.layers])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for microbatch in job.feed.of_step(step):
            if microbatch.inputs.max() < 1e6:
                loss = nn.functional.cross_entropy(model(microbatch.inputs), microbatch.targets) * microbatch.share
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_sha256(tensor_digests(model.state_dict()))


def trained(
    fork_server: ForkServer, workspace: Workspace, *sets: str, kills: list[Kill] | None = None
) -> tuple[str, Path]:
    folder = workspace.folder / "runs" / "run"
    outcome = fork_server.train(
        workspace.folder / "stageline.toml",
        *BASE,
        *SKIP,
        *sets,
        f"run.dir={folder.parent}",
        folder=folder,
        kills=kills or (),
    )
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    return outcome["facts"]["weights_sha256"], folder


def skipped(folder: Path) -> dict[str, list[str]]:
    """By stage, the microbatches that were left out."""
    return {home.name: sorted(path.name for path in home.iterdir()) for home in (folder / "skipped").iterdir()}


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [(0, "1f1b"), (1, "zb-h1"), (2, "1f1b"), *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_what_is_left_out_leaves_no_trace(fork_server, workspace, stage, schedule):
    sha256, folder = trained(fork_server, workspace, *SYNC, *WHERE[stage], f"schedule.name={schedule}")
    assert sha256 == plain_loop(workspace.folder, *BASE, *SYNC, *WHERE[stage])
    (found,) = skipped(folder).items()
    assert found[0] == f"stage-{stage}"
    assert len(found[1]) == STEPS * 8 // 32  # once in an epoch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "worker", "stage"),
    [
        pytest.param(mode, worker, stage, marks=() if (mode, worker, stage) in KILLED_EACH_TIME else pytest.mark.slow)
        for mode in (SYNC, ASYNC)
        for worker in (0, 1, 2)
        for stage in (1, 2)
    ],
)
def test_the_same_microbatch_is_left_out_although_a_worker_is_killed(
    fork_server, workspace, tmp_path, mode, worker, stage
):
    """The exception comes once for a microbatch, never again: a replacement that ran it would disagree."""
    once, other = tmp_path / "once", tmp_path / "other"
    once.mkdir(), other.mkdir()
    undisturbed, folder = trained(fork_server, workspace, *mode, *WHERE[stage], f"model.options.once={once}")
    before = skipped(folder)
    (folder / "broker.sqlite").unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    kills = [(f"worker-{worker}", 70 if mode is SYNC else 26)]
    again, folder = trained(fork_server, workspace, *mode, *WHERE[stage], f"model.options.once={other}", kills=kills)
    assert again == undisturbed
    assert skipped(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("loss", [False, True], ids=["raised", "not finite"])
def test_over_memory_it_is_left_out_as_over_sockets(fork_server, workspace, capsys, loss):
    where = ("model.loss=model.py:loss",) if loss else WHERE[1]
    sets = (*BASE, *SYNC, *where, "recovery.on_bad_microbatch=skip", "queues.url=memory://")
    assert workspace.here("train", ".", *(word for each in sets for word in ("--set", each))) == 0
    said = capsys.readouterr()
    (over_memory,) = workspace.runs()
    sha256, folder = trained(fork_server, workspace, *SYNC, *where)
    assert sha256 in said.out
    assert f"3 microbatches were left out: {over_memory.relative_to(workspace.folder)}" in said.err
    (place,) = skipped(folder)
    number = {"stage-1": 1, "stage-2": 2}[place]
    step, microbatch = max(tuple(map(int, name.split("-"))) for name in skipped(folder)[place])
    replayed = replay(folder, ReplayTarget(number, step, microbatch))
    assert replayed.reason is not None
    assert str(replayed.error) == replayed.reason.reason
    assert replayed.reproduced
    for stage in range(3):
        others = [m for m in range(MICROBATCHES) if m != microbatch or stage != number]
        assert all(replay(folder, ReplayTarget(stage, step, other)).reproduced for other in others)


def test_a_model_that_fails_at_everything_is_not_skipped(workspace, capsys):
    workspace.write("data.py", DATA.replace("    return", "    x[8:] = 1e9\n    return"))
    sets = (*BASE, *SYNC, *WHERE[1], "recovery.on_bad_microbatch=skip", "queues.url=memory://", "run.seed=3")
    assert workspace.here("train", ".", *(word for each in sets for word in ("--set", each))) in (1, 78)
    said = capsys.readouterr().err
    assert f"{IN_A_ROW} microbatches in a row are bad" in said or "a dry run" in said
