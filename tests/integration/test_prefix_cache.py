"""Output of frozen first stages is kept in the first epoch and used in later ones: to the bit as in a plain loop.

embed first | act norm pair | join later drop head       |: a cut; trained is what follows the second
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stageline import Line, PlanRefused
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.recording.replay import ReplayTarget, replay
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer, Kill
from support.prefix.data import EPOCH, batches
from support.prefix.model import build, loss, wrong
from support.prefix_loop import train_cached
from support.whole_run import WholeRun

FOLDER = Path(reference.__file__).parent / "prefix"
CONFIG = FOLDER / "stageline.toml"
TRAINED = ("join.*", "later.*", "head.*")
LOOPED = ("workers.0.stages=[0, 2]", "workers.1.stages=[1, 3]")

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def plain(microbatches: int = 4) -> reference.ReferenceResult:
    recipe = reference.recipe(FOLDER, microbatches=microbatches)
    return train_cached(recipe, 5, batches(8, recipe.seed).samples, EPOCH, TRAINED)


def agrees(facts: dict[str, Any], wanted: reference.ReferenceResult) -> bool:
    losses = [facts["losses"][str(step)] for step in range(len(wanted.losses))]
    return (facts["weights_sha256"], losses) == (wanted.weights_sha256, wanted.losses)


def _run(folder: Path, *sets: str) -> dict[str, Any]:
    sets = (f"run.dir={folder.parent}", *sets)
    outcome = run_memory(prepare(read_plan(CONFIG, sets=sets, environment={})), folder.name, folder)
    assert outcome.code == 0, outcome.reason
    return outcome.facts


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("schedule.name=gpipe",),
        ("schedule.name=eager-1f1b",),
        ("model.cut=[5]",),
        ("model.cut=[2, 5, 7]",),
        ("model.cut=[2, 5, 7]", "schedule.name=interleaved-1f1b", *LOOPED),
        ("model.cut=[2, 5, 7]", *LOOPED),
        ("model.cut=[2, 5, 7]", "workers.0.stages=[0, 3]", "workers.1.stages=[1, 2]"),
        ("model.cut=[2, 5, 7]", "workers.0.stages=[0, 1]", "workers.1.stages=[2, 3]"),
        ("workers.0.stages=[0, 1, 2]",),
    ],
    ids=lambda sets: " ".join(sets),
)
def test_a_run_equals_the_plain_loop_that_indexes_the_rows_it_kept(sets: Sequence[str], tmp_path: Path) -> None:
    assert agrees(_run(tmp_path / "run", *sets), plain())


def _evaluate(found: list[dict[str, Any]], every: int, steps: int, model: nn.Module) -> None:
    """Runs the whole model over the rows held out, which are one batch; the modules are then in their modes again."""
    if steps % every and steps != 3 * EPOCH:
        return
    inputs, targets = batches(8, 0).held_out()
    modes, sums = {module: module.training for module in model.modules()}, [0.0, 0.0]
    model.eval()
    with torch.no_grad():
        for x, target in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
            outputs = model(x)
            sums[0] += loss(outputs, target).item() * len(x)
            sums[1] += float(wrong(outputs, target)) * len(x)
    for module, mode in modes.items():
        module.training = mode
    rows = len(inputs)
    found.append({"step": steps, "rows": rows, "loss": sums[0] / rows, "metrics": {"wrong": sums[1] / rows}})


@cache
def plain_rounds(every: int) -> list[dict[str, Any]]:
    """Evaluations of a plain loop, after each `every` steps."""
    recipe, found = reference.recipe(FOLDER, microbatches=4), list[dict[str, Any]]()
    samples = batches(8, recipe.seed).samples
    trained = train_cached(recipe, 5, samples, EPOCH, TRAINED, partial(_evaluate, found, every))
    assert trained.weights_sha256 == plain().weights_sha256
    return found


@pytest.mark.parametrize(("every", "steps"), [('"epoch"', EPOCH), ("3", 3), ("1", 1)])
@pytest.mark.parametrize("sets", [(), ("model.cut=[2, 5, 7]", *LOOPED)], ids=["line", "looped"])
def test_rounds_of_evaluation_between_the_steps_of_all_epochs_run_the_whole_model(
    every: str, steps: int, sets: Sequence[str], tmp_path: Path
) -> None:
    facts = _run(tmp_path / "run", f"evaluation.every={every}", *sets)
    assert agrees(facts, plain())
    assert facts["evaluations"] == plain_rounds(steps)


def test_a_run_with_kept_rows_ends_early_where_one_without_them_does(tmp_path: Path) -> None:
    """By a metric that three rounds do not make better, of which the last is in a later epoch."""
    sets = ("evaluation.every=2", "evaluation.patience=3", "evaluation.metric=wrong", "evaluation.better=higher")
    facts = _run(tmp_path / "run", *sets)
    rounds = plain_rounds(2)
    found = [each["metrics"]["wrong"] for each in rounds]
    end = next(end for end in range(4, 7) if max(found[end - 3 : end]) <= max(found[: end - 3]))
    assert facts["evaluations"] == rounds[:end]
    assert len(facts["losses"]) == rounds[end - 1]["step"]
    assert EPOCH < len(facts["losses"]) < 3 * EPOCH


@pytest.mark.slow
def test_workers_killed_in_and_after_rounds_find_the_same_with_kept_rows(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    kills = (("worker-2", 30), ("worker-0", 24), ("worker-2", 75), ("worker-1", 50))
    sets = ("evaluation.every=3", "evaluation.patience=50", f"run.dir={tmp_path}")
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert agrees(outcome["facts"], plain())
    assert outcome["facts"]["evaluations"] == plain_rounds(3)


SUFFIX, SUFFIX_LATER, PREFIX_LATER = ("worker-2", 20), ("worker-2", 55), ("worker-0", 23)


@pytest.mark.parametrize(
    ("kills", "sets"),
    [
        pytest.param(*((SUFFIX,), ()), marks=pytest.mark.slow),
        pytest.param(*((SUFFIX_LATER, PREFIX_LATER), ()), marks=pytest.mark.slow),
        pytest.param(*((SUFFIX, ("worker-2", 60), ("worker-1", 24), ("broker", 40)), ()), marks=pytest.mark.slow),
        pytest.param(*((SUFFIX_LATER, PREFIX_LATER), ("queues.url=tcp://127.0.0.1:0",)), marks=pytest.mark.slow),
        pytest.param(*((("worker-1", 30), ("worker-0", 22)), ("model.cut=[5, 7]",)), marks=pytest.mark.slow),
    ],
    ids=["in the first epoch", "in the second", "several", "tcp", "one frozen stage"],
)
def test_workers_are_killed_before_and_after_the_cache_is_whole(
    kills: Sequence[Kill], sets: Sequence[str], fork_server: ForkServer, tmp_path: Path
) -> None:
    outcome = fork_server.train(CONFIG, *sets, f"run.dir={tmp_path}", folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert agrees(outcome["facts"], plain())


SLOW = ("        x, more = parts\n", "        x, more = parts\n        __import__('time').sleep(0.02)\n")


def _plan_in(home: Path) -> Path:
    """A copy of the plan, of which each step takes a while."""
    plan = Path(shutil.copytree(FOLDER, home / "plan")) / "stageline.toml"
    model = plan.parent / "model.py"
    model.write_text(model.read_text().replace(*SLOW))
    return plan


def _stopped_at(step: int, fork_server: ForkServer, plan: Path, *sets: str) -> WholeRun:
    """A run that was stopped after the checkpoint of `step`."""
    going = WholeRun(fork_server, plan, *sets)
    going.until_checkpoint(step)
    going.stop()
    assert going.end()["code"] == 75
    return going


def _flip(file: Path) -> None:
    """Something in each part of it."""
    file.write_bytes(bytes(byte ^ (place % 50 == 0) for place, byte in enumerate(file.read_bytes())))


def _shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _of_other_data(file: Path) -> None:
    """As if the folder had been copied from a run on another dataset."""
    from hashlib import sha256

    header = json.loads(file.read_bytes())["header"]
    header["parts"]["data.options.shift"] = 7
    data = json.dumps(header, separators=(",", ":"))
    file.write_text(f'{{"header":{data},"sha256":"{sha256(data.encode()).hexdigest()}"}}')


@pytest.mark.parametrize(
    ("step", "file", "damage", "reason"),
    [
        pytest.param(*(6, "", shutil.rmtree, "cache.json is missing"), marks=pytest.mark.slow),
        pytest.param(
            *(2, "leaf-0.rows", _flip, "samples are damaged: their CRC-32 does not match"), marks=pytest.mark.slow
        ),
        pytest.param(*(6, "leaf-1.rows", _shorten, "leaf-1.rows has 134 bytes, made were 135"), marks=pytest.mark.slow),
        pytest.param(*(6, "marks.rows", Path.unlink, "marks.rows is missing"), marks=pytest.mark.slow),
        pytest.param(*(6, "cache.json", _flip, "cache.json is damaged"), marks=pytest.mark.slow),
        pytest.param(
            6,
            "cache.json",
            _of_other_data,
            "it is of another model or dataset: data.options.shift is 7 there, None here",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["deleted", "flipped in the first epoch", "shortened", "no marks", "header", "another dataset"],
)
def test_a_cache_that_is_lost_damaged_or_foreign_is_computed_again_when_the_run_is_resumed(
    step: int, file: str, damage: Callable[[Path], object], reason: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = _plan_in(tmp_path)
    stopped = _stopped_at(step, fork_server, plan)
    damage(stopped.folder / "prefix-cache" / file)
    resumed = WholeRun(fork_server, plan, resume=True)
    assert agrees(resumed.end()["facts"], plain())
    assert "the prefix cache is computed again" in resumed.log("worker-2")
    assert reason in resumed.log("worker-2")


@pytest.mark.slow
def test_with_codecs_rows_are_kept_decoded_and_computed_again_through_the_same_cuts(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    codec = "queues.codec={ forward = 'int8', backward = 'bf16' }"
    plan = _plan_in(tmp_path)
    undisturbed = _run(tmp_path / "memory" / "prefix", codec)
    assert undisturbed["weights_sha256"] != plain().weights_sha256
    stopped = _stopped_at(6, fork_server, plan, codec)
    shutil.rmtree(stopped.folder / "prefix-cache")
    resumed = WholeRun(fork_server, plan, codec, resume=True)
    assert resumed.digest() == undisturbed["weights_sha256"]
    assert "the prefix cache is computed again" in resumed.log("worker-2")


@pytest.mark.slow
def test_a_whole_cache_is_used_by_a_run_that_is_resumed(fork_server: ForkServer, tmp_path: Path) -> None:
    plan = _plan_in(tmp_path)
    _stopped_at(6, fork_server, plan)
    resumed = WholeRun(fork_server, plan, resume=True)
    assert agrees(resumed.end()["facts"], plain())
    assert "computed again" not in resumed.log("worker-2")


FULL = """

import errno, os

def _take(file, start, size, plain=os.posix_fallocate, left=[3]):
    left[0] -= 1
    if left[0] >= 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    plain(file, start, size)

os.posix_fallocate = _take
"""


@pytest.mark.slow
def test_a_disk_that_is_full_while_rows_are_kept_is_waited_for(fork_server: ForkServer, tmp_path: Path) -> None:
    plan = _plan_in(tmp_path)
    model = plan.parent / "model.py"
    model.write_text(model.read_text() + FULL)
    going = WholeRun(fork_server, plan)
    going.wait_for(lambda: going.folder.exists() and "cannot take 3375 bytes for 27 samples in" in going.ask("why"))
    assert agrees(going.end()["facts"], plain())


OWN_SOURCE = """


class Turned:
    \"\"\"A source with an order of its own, which nothing but its code tells.\"\"\"

    def __init__(self, plain):
        self._plain, self.steps_per_epoch = plain, plain.steps_per_epoch

    def held_out(self):
        return self._plain.held_out()

    def samples(self, step):
        return self._plain.samples(step).flip(0)

    def batch(self, step):
        return tuple(part.flip(0) for part in self._plain.batch(step))


def turned(batch_size, seed):
    return Turned(batches(batch_size, seed))
"""


@pytest.mark.slow
def test_a_worker_without_data_learns_the_order_of_a_source_of_the_users_own_from_its_code(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The first stage that trains is neither the first nor the last. Its worker is killed in the second epoch."""
    plan = Path(shutil.copytree(FOLDER, tmp_path / "plan")) / "stageline.toml"
    data = plan.parent / "data.py"
    data.write_text(data.read_text() + OWN_SOURCE)
    sets = ("data.source=data.py:turned", "model.cut=[5, 7]", f"run.dir={tmp_path}")
    outcome = fork_server.train(plan, *sets, folder=tmp_path / "run", kills=(("worker-1", 60),))
    recipe = reference.recipe(FOLDER, microbatches=4)

    def turned(step: int) -> Any:
        return tuple(part.flip(0) for part in recipe.batch(step))

    wanted = train_cached(
        replace(recipe, batch=turned), 5, lambda step: batches(8, 0).samples(step).flip(0), EPOCH, TRAINED
    )
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert agrees(outcome["facts"], wanted)
    assert not agrees(outcome["facts"], plain())


ELSEWHERE = """

import inspect

def batches(batch_size, seed, plain=batches):
    if any(frame.function == "compute_again" for frame in inspect.stack()):  # only this worker has none
        raise OSError("the data are elsewhere")
    return plain(batch_size, seed)
"""


@pytest.mark.slow
def test_a_lost_cache_that_cannot_be_computed_again_is_named_with_the_way_out(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The worker in the middle cannot read the data, and did not need them before."""
    plan = _plan_in(tmp_path)
    stopped = _stopped_at(6, fork_server, plan, "model.cut=[5, 7]")
    shutil.rmtree(stopped.folder / "prefix-cache")
    data = plan.parent / "data.py"
    data.write_text(data.read_text() + ELSEWHERE)
    outcome = WholeRun(fork_server, plan, "model.cut=[5, 7]", resume=True).end()
    assert outcome["code"] != 0
    assert (
        "the prefix cache cannot be used: cache.json is missing. It cannot be computed again here" in outcome["reason"]
    )
    assert "or resume where worker 1 can read the data" in outcome["reason"]


@pytest.mark.slow
def test_microbatches_of_later_epochs_can_be_run_again_from_their_records(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = ("recovery.record=all", "model.cut=[5, 7]", f"run.dir={tmp_path}")
    outcome = fork_server.train(CONFIG, *sets, folder=tmp_path / "run")
    assert outcome["code"] == 0, outcome["reason"]
    for stage in (1, 2):
        replayed = replay(tmp_path / "run", ReplayTarget(stage, 11, 1))
        assert replayed.reproduced
        assert replayed.outcomes[0].same


@pytest.mark.slow
def test_a_run_without_recovery_keeps_its_prefix_too(fork_server: ForkServer, tmp_path: Path) -> None:
    sets = ("recovery.restarts=0", "recovery.snapshot_every=0", f"run.dir={tmp_path}")
    assert agrees(fork_server.train(CONFIG, *sets, folder=tmp_path / "run")["facts"], plain())


@pytest.mark.parametrize("sets", [(), LOOPED, ("workers.0.stages=[0, 3]", "workers.1.stages=[1, 2]")], ids=str)
def test_in_asynchronous_mode_what_is_kept_is_what_would_be_computed(sets: Sequence[str], tmp_path: Path) -> None:
    """The frozen stage picks rows of a table, which have the same bits in microbatches of any size."""
    frozen = ("model.cut=[1, 5, 7]", 'model.trainable=["first.*", "join.*", "later.*", "head.*"]')
    sets = ("schedule.mode=async", "schedule.microbatches=1", *frozen, *sets)
    cached = _run(tmp_path / "cached", *sets)
    assert cached["weights_sha256"] == _run(tmp_path / "plain", *sets, "model.prefix_cache=false")["weights_sha256"]


def test_a_script_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanRefused, match="a script's batches do not say which samples they have"):
        Line(
            build,
            cut=[5],
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            microbatches=2,
            settings={"model.prefix_cache": True},
        )
