"""Cutting a model changes no bit: one digest for the plain loop, every schedule, transport and number of workers.

                    memory                    ipc, tcp, Redis (real processes)
    schedules       all of them               all of them on ipc, some on tcp and Redis
    workers         1, 2, 3, 4                1, 2, 3, 4
    microbatches    1, fewer than stages, one that does not divide the batch, the plan's own

`make test` runs a part in which each pair of choices meets; `make test-all` the rest. The oracle is `reference.py`:
plain torch, none of our code. What a schedule refuses is left out here, and tested in `test_catalogue.py`.
"""

import itertools
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from stageline.pipeline.plan import Plan, PlanRefused, read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.paths import EXAMPLES
from support.redis_server import RedisServer

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "window", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")
PLACEMENTS = {  # by name: the stages of each worker
    "1": [[0]],
    "1 with 2 stages": [[0, 1]],
    "2": [[0], [1]],
    "3": [[0], [1], [2]],
    "4": [[0], [1], [2], [3]],
    "2 looped": [[0, 2], [1, 3]],
    "2 folded": [[0, 3], [1, 2]],
}
CUTS = {  # where each example is cut into 1, 2, 3, 4 stages
    "digits": {1: [], 2: [5], 3: [4, 9], 4: [2, 5, 8]},  # in-place layers, group norms and pooling next to cuts
    "mlp": {1: [], 2: [2], 3: [1, 3], 4: [1, 2, 3]},  # stages without parameters
    "chargpt": {1: [], 2: [4], 3: [3, 5], 4: [2, 4, 6]},
}
SIZES = {  # digits: past the end of an epoch, whose last batch is smaller
    "digits": {"run.steps": 6, "data.batch_size": 300, "model.options.width": 8},
    "mlp": {"run.steps": 12},
    "chargpt": {"run.steps": 2, "data.batch_size": 8, "data.options.keep_back_one_in": 3000},
}
MICROBATCHES = {"digits": (8, 5, 3, 1), "mlp": (1, 3), "chargpt": (4, 3)}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@cache
def expected(example: str, microbatches: int) -> str:
    folder = EXAMPLES / example
    return reference.reference_digest(folder, microbatches=microbatches, changes=SIZES[example])


def changes(example: str, schedule: str, placement: str, microbatches: int) -> list[str]:
    """Settings on top of the example's plan file."""
    workers = PLACEMENTS[placement]
    stages = sum(map(len, workers))
    sets = {
        **SIZES[example],
        **({"model.cut": CUTS[example][stages]} if stages > 1 else {"model.stages": 1}),
        "schedule.name": f'"{schedule}"',
        "schedule.microbatches": microbatches,
        **{f"workers.{index}.stages": owned for index, owned in enumerate(workers)},
    }
    if schedule == "window":
        sets["schedule.window"] = [2 * (stages - stage) for stage in range(stages)]
    return [f"{key}={value}" for key, value in sets.items()]


def config(example: str, tmp_path: Path) -> Path:
    """The example's plan without its workers, so that each test can place the stages as it likes."""
    folder = EXAMPLES / example
    text = (folder / "stageline.toml").read_text().partition("[workers.0]")[0]
    for name in ("model.py", "data.py"):
        text = text.replace(f'"{name}:', f'"{folder / name}:')
    path = tmp_path / "stageline.toml"
    path.write_text(text)
    return path


def accepted(path: Path, sets: list[str]) -> Plan | None:
    """The plan, or None if its schedule refuses its shape."""
    try:
        return read_plan(path, sets=sets, environment={})
    except PlanRefused as refusal:
        if not all("schedule" in error.key for error in refusal.errors):
            raise
        return None


def shapes(example: str, schedule: str, *, pairwise: bool) -> list[tuple[str, int]]:
    """Placements with numbers of microbatches: the pairwise part, or all others."""
    return [
        (placement, microbatches)
        for turn, placement in enumerate(PLACEMENTS, SCHEDULES.index(schedule))
        for choice, microbatches in enumerate(MICROBATCHES[example])
        if is_in_pairwise_part(example, turn, choice) == pairwise
    ]


def is_in_pairwise_part(example: str, turn: int, choice: int) -> bool:
    """With each schedule, digits takes every second placement, chargpt the others, and mlp, which is quick, all; with
    each of them one number of microbatches, and another one with the next."""
    if example == "mlp":
        return turn % len(MICROBATCHES[example]) == choice
    taken = turn % 2 == (example == "chargpt")
    return taken and turn // 2 % len(MICROBATCHES[example]) == choice


def is_quick(example: str, schedule: str) -> bool:
    """Convolutions and transformers take long: each time with schedules that mix the stages of a worker."""
    return (example, schedule) in (
        ("mlp", "1f1b"),
        ("mlp", "zb-h1"),
        ("digits", "zb-v"),
    ) or schedule == "interleaved-1f1b"


@pytest.mark.parametrize("pairwise", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["pairwise", "the rest"])
@pytest.mark.parametrize(
    ("example", "schedule"),
    [
        pytest.param(example, schedule, marks=() if is_quick(example, schedule) else pytest.mark.slow)
        for example in CUTS
        for schedule in SCHEDULES
    ],
)
def test_in_one_process_every_placement_and_schedule_gives_the_plain_loops_weights(
    example, schedule, pairwise, tmp_path
):
    path, ran = config(example, tmp_path), 0
    for placement, microbatches in shapes(example, schedule, pairwise=pairwise):
        plan = accepted(path, changes(example, schedule, placement, microbatches))
        if plan is not None:
            outcome = run_memory(prepare(plan), "parity", tmp_path / "run")
            assert outcome.code == 0, outcome.reason
            assert outcome.facts["weights_sha256"] == expected(example, microbatches), (placement, microbatches)
            ran += 1
    assert ran >= 1 or schedule == "dualpipe-v"  # interleaving refuses most shapes, and this one those of a whole part


REAL = [  # each transport with several schedules and placements
    ("digits", "ipc://", "window", "4", 8),
    ("digits", "ipc://", "1f1b", "2 folded", 8),
    ("mlp", "ipc://", "eager-1f1b", "3", 3),
    ("mlp", "redis", "1f1b", "2", 1),
    ("digits", "ipc://", "zb-v", "2 folded", 8),
    ("digits", "tcp://127.0.0.1:0", "gpipe", "4", 5),
    ("mlp", "tcp://127.0.0.1:0", "1f1b", "3", 1),
    ("chargpt", "tcp://127.0.0.1:0", "interleaved-1f1b", "2 looped", 4),
]
REST = [
    ("digits", "redis", "interleaved-1f1b", "2 looped", 8),
    ("digits", "ipc://", "zb-h1", "4", 8),
    ("chargpt", "tcp://127.0.0.1:0", "dualpipe-v", "2 folded", 4),
    ("digits", "ipc://", "gpipe", "2", 8),
    ("digits", "ipc://", "1f1b", "1 with 2 stages", 5),
    ("digits", "ipc://", "1f1b", "4", 1),
    ("chargpt", "ipc://", "1f1b", "4", 3),
    ("digits", "redis", "gpipe", "4", 3),
    ("digits", "ipc://", "1f1b", "1", 8),
    ("digits", "ipc://", "1f1b", "2", 8),
    ("digits", "ipc://", "1f1b", "3", 5),
    ("digits", "ipc://", "1f1b", "4", 3),
    ("digits", "ipc://", "eager-1f1b", "3", 8),
    ("digits", "ipc://", "window", "2", 5),
    ("digits", "ipc://", "interleaved-1f1b", "2 looped", 8),
    ("digits", "ipc://", "looped-bfs", "2 looped", 5),
    ("digits", "redis", "looped-bfs", "2 looped", 8),
    ("digits", "tcp://127.0.0.1:0", "zb-h1", "3", 5),
    ("chargpt", "ipc://", "zb-h1", "4", 4),
    ("mlp", "ipc://", "1f1b", "2", 1),
    ("mlp", "ipc://", "eager-1f1b", "4", 3),
    ("chargpt", "ipc://", "interleaved-1f1b", "2 looped", 4),
    ("digits", "redis", "1f1b", "2", 8),
    ("chargpt", "redis", "interleaved-1f1b", "2 looped", 4),
    ("digits", "tcp://127.0.0.1:0", "1f1b", "2", 8),
    ("digits", "tcp://127.0.0.1:0", "interleaved-1f1b", "2 looped", 8),
]


@pytest.mark.parametrize(
    ("example", "url", "schedule", "placement", "microbatches"),
    [*REAL, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_real_processes_over_sockets_give_the_plain_loops_weights(
    example, url, schedule, placement, microbatches, fork_server, redis, tmp_path
):
    url = redis.url if url == "redis" else url
    sets = [*changes(example, schedule, placement, microbatches), f"queues.url={url}", f"run.dir={tmp_path}"]
    outcome = fork_server.train(config(example, tmp_path), *sets, folder=tmp_path / tmp_path.name)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == expected(example, microbatches)
    assert outcome["facts"]["oddities"] == {}


QUICK_ASYNC = {("digits", 2), ("mlp", 3), ("chargpt", 4)}


@pytest.mark.parametrize(
    ("example", "stages"),
    [
        pytest.param(*case, marks=() if case in QUICK_ASYNC else pytest.mark.slow)
        for case in itertools.product(CUTS, [2, 3, 4])
    ],
)
def test_asynchronous_training_equals_pipedream_in_plain_torch(example, stages, tmp_path):
    cut = CUTS[example][stages]
    recipe = reference.recipe(EXAMPLES / example, changes=SIZES[example])
    sets = [
        *changes(example, "1f1b", "1 with 2 stages" if stages == 2 else str(stages), 1),
        'schedule.mode="async"',
    ]
    outcome = run_memory(
        prepare(read_plan(config(example, tmp_path), sets=sets, environment={})), "async", tmp_path / "run"
    )
    assert outcome.code == 0, outcome.reason
    assert outcome.facts["weights_sha256"] == reference.train_pipedream(recipe, cut).weights_sha256


DELAYED = [  # with as many microbatches as stages, and more
    ("digits", "3", 3),
    ("mlp", "4", 5),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("digits", "1", 1),
            ("digits", "2", 5),
            ("digits", "4", 4),
            ("mlp", "1 with 2 stages", 3),
            ("mlp", "2 looped", 4),
            ("mlp", "2 folded", 5),
            ("chargpt", "2", 2),
            ("chargpt", "2 folded", 4),
        )
    ),
]


@pytest.mark.parametrize(("example", "placement", "microbatches"), DELAYED)
def test_with_two_versions_of_the_weights_every_stage_is_one_update_behind(example, placement, microbatches, tmp_path):
    recipe = reference.recipe(EXAMPLES / example, microbatches=microbatches, changes=SIZES[example])
    wanted = reference.train_delayed(recipe)
    sets = [*changes(example, "2bw", placement, microbatches), 'schedule.mode="async"']
    plan = read_plan(config(example, tmp_path), sets=sets, environment={})
    outcome = run_memory(prepare(plan), "2bw", tmp_path / "run")
    assert outcome.code == 0, outcome.reason
    assert outcome.facts["weights_sha256"] == wanted.weights_sha256
    assert wanted.weights_sha256 != expected(example, microbatches)  # the delay shows


def test_the_digest_can_tell_runs_apart():
    # A test of the tests: neither the number of microbatches nor that of steps may leave the digest as it is.
    assert len({expected("digits", microbatches) for microbatches in MICROBATCHES["digits"]}) > 1
    assert torch.get_num_threads() >= 1
    assert os.environ.get("STAGELINE_RUN__SEED") is None
