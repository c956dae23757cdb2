"""Layers are tapped in real runs: the files have what the layers returned, in spite of kills, and change nothing."""

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import Line, PlanRefused, read_plan, read_taps
from stageline.pipeline.stage.layers.passage import layer_seed
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import frozen, planted
from support.fork_server import ForkServer, Kill
from support.frozen.data import batches
from support.frozen.model import build
from support.planted.model import PLANTED
from support.whole_run import expected, plan_in
from support.workspace import MODEL, Command, Workspace, wait_for

CONFIG = Path(frozen.__path__[0]) / "stageline.toml"
TAPS = ('taps.layers=["*"]', "taps.every=1", "taps.evaluation=true")
LAYERS = ("embed", "first", "drop", "act", "norm", "middle", "later", "tail", "end", "head")

pytestmark = pytest.mark.usefixtures("one_thread")


def files(run: Path) -> dict[str, bytes]:
    """Tapped files of a run, byte for byte; drafts too."""
    return {str(path.relative_to(run)): path.read_bytes() for path in (run / "taps").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run in which all layers are tapped, and what the broker says of it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = fork_server.train(CONFIG, *TAPS, f"run.dir={folder}", folder=folder / "run")
    assert outcome["code"] == 0, outcome["reason"]
    return folder / "run", outcome["facts"]


@pytest.mark.slow
def test_tapping_changes_no_bit_of_what_is_trained(
    undisturbed: tuple[Path, dict[str, Any]], fork_server: ForkServer, tmp_path: Path
) -> None:
    tapped, plain = undisturbed[1], fork_server.train(CONFIG, f"run.dir={tmp_path}", folder=tmp_path / "run")["facts"]
    assert not (tmp_path / "run" / "taps").exists()
    for key in ("weights_sha256", "losses", "metrics"):
        assert tapped[key] == plain[key]


def test_what_is_stored_is_what_the_layers_of_the_uncut_model_return(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    """Step 0, whose weights are those of the factory; `act` writes to what `drop` returns."""
    taps = read_taps(undisturbed[0])
    assert taps.layers == LAYERS
    torch.manual_seed(0)
    model, data = build(), batches(8, 0)
    inputs, targets = (each.tensor_split(4) for each in data.batch(0))
    for microbatch in range(4):
        x: Tensor = inputs[microbatch]
        for place, (name, layer) in enumerate(model.named_children()):
            torch.manual_seed(layer_seed(0, 0, microbatch, place))
            x = layer(x.clone())
            stored = list(taps.microbatches(name))[microbatch]
            assert (stored.step, stored.microbatch, stored.evaluation) == (0, microbatch, False)
            assert isinstance(stored.activations, Tensor)
            assert torch.equal(stored.activations, x), name
            assert torch.equal(stored.targets, targets[microbatch])
            assert torch.equal(stored.samples, data.samples(0).tensor_split(4)[microbatch])


def test_rows_are_read_with_the_numbers_of_their_samples(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    """A frozen embedding returns of a row what it returns of that sample, in whichever step."""
    taps, data = read_taps(undisturbed[0]), batches(8, 0)
    torch.manual_seed(0)
    embed = build().embed
    read = taps.read("embed")
    assert read.samples is not None
    assert torch.equal(read.activations, embed(data._inputs[read.samples]))
    assert torch.equal(read.targets, data._targets[read.samples])
    assert read.steps.tolist() == [step for step in range(8) for _ in range(8)]
    evaluated, (inputs, targets) = taps.read("embed", evaluation=True), data.held_out()
    assert torch.equal(evaluated.activations, embed(inputs))
    assert torch.equal(evaluated.targets, targets)
    assert evaluated.samples.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("kills", "sets"),
    [
        pytest.param((("worker-0", 23), ("worker-2", 35), ("worker-4", 30)), (), marks=pytest.mark.slow),
        pytest.param((("worker-1", 41), ("worker-2", 70), ("broker", 60)), (), marks=pytest.mark.slow),
        pytest.param((("worker-4", 77), ("worker-0", 39)), ("recovery.snapshot_every=1",), marks=pytest.mark.slow),
        pytest.param((("worker-4", 50),), ("recovery.snapshot_every=7",), marks=pytest.mark.slow),
    ],
    ids=["training", "later", "evaluation", "much to do again"],
)
def test_after_kills_the_same_files_are_there(
    kills: Sequence[Kill],
    sets: Sequence[str],
    undisturbed: tuple[Path, dict[str, Any]],
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    outcome = fork_server.train(CONFIG, *TAPS, *sets, f"run.dir={tmp_path}", folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert files(tmp_path / "run") == files(undisturbed[0])


def test_in_one_process_and_with_other_cuts_the_same_is_stored(
    undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    sets = (*TAPS, "queues.url=memory://", "recovery.restarts=0", "model.cut=[3]", f"run.dir={tmp_path}")
    assert run_memory(prepare(read_plan(CONFIG, sets=sets, environment={})), "run", tmp_path / "run").code == 0
    (tmp_path / "run" / "result.json").touch()  # which `train` writes
    here, there = read_taps(tmp_path / "run"), read_taps(undisturbed[0])
    for layer in LAYERS:
        for evaluation in (False, True):
            found, wanted = here.read(layer, evaluation=evaluation), there.read(layer, evaluation=evaluation)
            assert torch.equal(found.activations, wanted.activations)
            assert torch.equal(found.samples, wanted.samples)


@pytest.mark.slow
def test_in_asynchronous_mode_killed_workers_leave_the_same_files(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = (*TAPS, "schedule.mode=async", "schedule.microbatches=1")
    for name, kills in (("whole", ()), ("killed", (("worker-0", 9), ("worker-3", 13)))):
        folder = tmp_path / name
        outcome = fork_server.train(CONFIG, *sets, f"run.dir={folder}", folder=folder / "run", kills=kills)
        assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
    assert len(files(tmp_path / "whole" / "run")) == 1 + 6 * (8 + 1)
    assert files(tmp_path / "killed" / "run") == files(tmp_path / "whole" / "run")


@pytest.mark.slow
def test_without_recovery_all_is_on_the_disk_at_the_end(
    undisturbed: tuple[Path, dict[str, Any]], fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = (*TAPS, "recovery.restarts=0")
    outcome = fork_server.train(CONFIG, *sets, f"run.dir={tmp_path}", folder=tmp_path / "run")
    assert outcome["code"] == 0, outcome["reason"]
    assert files(tmp_path / "run") == files(undisturbed[0])


@pytest.mark.slow
def test_a_bad_microbatch_that_is_left_out_is_left_out_of_what_is_read(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = (*TAPS, "model.loss=model.py:picky", "recovery.on_bad_microbatch=skip", f"run.dir={tmp_path}")
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run", kills=(("worker-4", 30),))
    assert outcome["code"] == 0, outcome["reason"]
    (tmp_path / "run" / "result.json").touch()
    left_out = {path.name for path in (tmp_path / "run" / "skipped" / "stage-4").iterdir()}
    for layer in ("embed", "head"):
        read = [f"{each.step}-{each.microbatch}" for each in read_taps(tmp_path / "run").microbatches(layer)]
        assert {*read}.isdisjoint(left_out)
        assert len(read) + len(left_out) == 8 * 4


@pytest.mark.slow
def test_the_layer_that_holds_the_label_is_the_one_whose_probe_tells_it(workspace: Workspace) -> None:
    """Eighty layers, frozen, in four stages of two workers: a real run, and the command."""
    for path in Path(planted.__path__[0]).glob("*.*"):
        workspace.write(path.name, path.read_text())
    trained = workspace.command("train", ".", "--json")
    assert trained.returncode == 0, trained.stderr
    run = str(workspace.runs()[0])
    probed = workspace.command("probe", run, "--json")
    assert probed.returncode == 0, probed.stderr
    report = json.loads(probed.stdout)
    scores = {each["layer"]: each["score"] for each in report["layers"]}
    assert list(scores) == [f"layer{place}" for place in range(80)]
    assert scores.pop(f"layer{PLANTED}") > 0.95
    assert max(scores.values()) < 0.8
    assert (report["samples"], report["classes"], report["train_rows"] + report["test_rows"]) == (320, 2, 640)


def test_a_pattern_that_matches_no_layer_is_refused_by_plan_and_by_a_script(workspace: Workspace) -> None:
    refused = workspace.command("plan", "--set", 'taps.layers=["0", "3", "layer9"]')
    assert refused.returncode == 78
    assert 'no layer of the model matches "3"; layers have names such as 0, 1, 2; no layer' in refused.stderr
    assert 'taps.layers = ["0", "3", "layer9"]' in refused.stderr
    with pytest.raises(PlanRefused, match=r'taps = \["9"\]: no layer of the model matches "9"'):
        Line(_model(), **_options(workspace), taps=["9"])


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _options(workspace: Workspace) -> dict[str, Any]:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return {"cut": [2], "loss": nn.functional.cross_entropy, "optimizer": sgd, "folder": workspace.folder / "runs"}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, 0, 1])
def test_a_script_taps_what_it_trains_and_evaluates(killed: int | None, workspace: Workspace) -> None:
    settings = {"taps.every": 2, "taps.evaluation": True, "recovery.snapshot_every": 2}
    loader = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(6)]
    model = _model()
    first = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    first.load_state_dict({name: each.clone() for name, each in list(model.state_dict().items())[:2]})
    with contextlib.chdir(workspace.folder):
        line = Line(model, **_options(workspace), microbatches=2, taps=["1"], settings=settings, progress=False)
        with line:
            line.evaluate(loader[:2])
            for step, (x, y) in enumerate(loader):
                line.step(x, y).item()
                if step == 3 and killed is not None:
                    os.kill(workspace.worker(killed), signal.SIGKILL)
        taps = read_taps(line.folder)
    read = taps.read("1")
    assert sorted({*read.steps.tolist()}) == [0, 2, 4]
    assert read.samples is None
    assert torch.equal(read.targets, torch.cat([loader[step][1] for step in (0, 2, 4)]))
    evaluated = taps.read("1", evaluation=True)
    microbatches = [rows for x, _ in loader[:2] for rows in x.chunk(2)]  # of more rows, some processors' bits differ
    assert torch.equal(evaluated.activations, torch.cat(list(map(first, microbatches))).detach())


def _begun(workspace: Workspace, *sets: str) -> Command:
    """A run that has a checkpoint, and goes on."""
    train = workspace.start("train", ".", *(word for each in sets for word in ("--set", each)))
    wait_for(lambda: bool([*workspace.folder.glob("runs/*/checkpoints/stage-1/step-*4")]))
    return train


@pytest.mark.slow
def test_a_run_that_was_killed_as_a_whole_and_is_resumed_leaves_the_files_of_one_that_was_not(
    workspace: Workspace,
) -> None:
    sets = ("run.steps=60", "recovery.snapshot_every=2", *TAPS)
    resumed = [word for each in sets for word in ("--set", each)]
    _begun(workspace, *sets)
    workspace.kill()
    [killed] = workspace.runs()
    assert workspace.command("train", ".", "--resume", killed.name, *resumed).returncode == 0
    assert workspace.command("train", ".", *resumed).returncode == 0
    whole = max(workspace.runs())
    assert files(killed) == files(whole) != {}
    assert read_taps(killed).read("2").steps.max() == 59


SLOW_STEPS = """
import time
from pathlib import Path

class SlowReLU(nn.ReLU):
    def forward(self, x):
        time.sleep(0.01 if Path(__file__).with_name("slow").exists() else 0)
        return super().forward(x)
"""


@pytest.mark.slow
def test_a_run_is_resumed_with_other_taps_as_a_run_of_its_own(workspace: Workspace) -> None:
    workspace.write("model.py", MODEL.replace("nn.ReLU()", "SlowReLU()") + SLOW_STEPS)
    workspace.write("slow", "")  # so that the run is not over before it is stopped
    train = _begun(workspace, "run.steps=400", "recovery.snapshot_every=2")
    train.send_signal(signal.SIGTERM)
    assert train.wait() == 75
    (workspace.folder / "slow").unlink()
    [first] = workspace.runs()
    sets = ("run.steps=400", "recovery.snapshot_every=2", 'taps.layers=["1"]', "taps.every=1")
    again = workspace.command("train", ".", "--resume", first.name, *(w for each in sets for w in ("--set", each)))
    assert again.returncode == 0, again.stderr
    [second] = [run for run in workspace.runs() if run != first]
    steps = read_taps(second).read("1").steps.unique().tolist()
    assert steps == [*range(steps[0], 400)]
    assert steps[0] > 0
    assert not (first / "taps").exists()


SLOW_DISK = """
from stageline.workers.extras.recording import taps

def _slowly(path, tensors, plain=taps.publish_tensors):
    sleep(0.05)
    plain(path, tensors)

taps.publish_tensors = _slowly
"""


@pytest.mark.slow
def test_a_checkpoint_is_not_complete_before_what_was_tapped_before_it_is_on_the_disk(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """A worker is killed while much waits to be written: its replacement begins where nothing of that is lost."""
    plan = plan_in(tmp_path)
    model = plan.parent / "model.py"
    model.write_text(model.read_text() + SLOW_DISK)
    sets = ('taps.layers=["1"]', "taps.every=1", "recovery.snapshot_every=1", f"run.dir={tmp_path}")
    outcome = fork_server.train(plan, *sets, folder=tmp_path / "run", kills=[("worker-0", 22)])
    assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == expected(6)
    names = {path.name for path in (tmp_path / "run" / "taps" / "stage-0").iterdir()}
    assert names == {f"step-{step}-{microbatch}.safetensors" for step in range(6) for microbatch in range(2)}
