"""Activations in files change no bit of a run, though its workers are killed, and leave no files behind."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.pipeline.stage import offload
from support.fork_server import ForkServer
from support.paths import EXAMPLES

ROOT = Path(__file__).parent.parent.parent
PLAN = ROOT / "benchmarks" / "stageline.toml"
SETS = (
    "run.steps=4",
    "model.options={ width = 64, layers = 1 }",
    "data.options={ width = 64, sequence = 64 }",
    "schedule.microbatches=4",
    "recovery.restarts=3",
    "recovery.snapshot_every=1",
)
RECOMPUTED = ('memory.recompute="stage"',)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "more"),
    [((), ()), ((), RECOMPUTED), (("schedule.name=2bw", "schedule.mode=async"), RECOMPUTED)],
    ids=["alone", "with recompute", "with both versions of the weights"],
)
def test_a_run_whose_activations_lie_in_files_ends_with_the_same_weights(
    mode: tuple[str, ...], more: tuple[str, ...], fork_server: ForkServer, tmp_path: Path
) -> None:
    rows, sequence, width = 8, 64, 64
    assert rows * sequence * width * 4 >= offload.LEAST
    kills = [("worker-0", 12), ("worker-1", 20)]
    found = set()
    for name, sets in {"plain": (), "other": ('memory.offload=["activations"]', *more)}.items():
        folder = tmp_path / name
        outcome = fork_server.train(
            PLAN, f"run.dir={folder}", *SETS, *mode, *sets, folder=folder, kills=kills if name == "other" else ()
        )
        assert outcome["code"] == 0, outcome["reason"]
        assert outcome["not killed"] == []
        assert outcome["left"] == []
        found.add(outcome["facts"]["weights_sha256"])
    assert len(found) == 1
    scratch = list((tmp_path / "other").rglob("offload"))
    assert scratch
    assert not list(scratch[0].iterdir())


def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    wanted = 'memory.offload=["activations"]'
    with pytest.raises(PlanRefused, match=r'memory.offload = \["activations"\]: worker 1 computes on cuda:0'):
        read_plan(EXAMPLES / "mlp", sets=[wanted, "model.stages=2", *_workers("cpu", "cuda:0")])
    with pytest.raises(PlanRefused, match=r'memory.offload = .*over queues.url = "memory://" nothing is offloaded'):
        read_plan(EXAMPLES / "mlp", sets=[wanted, "queues.url=memory://"])
    with pytest.raises(PlanRefused, match=r'memory.offload = \["weights"\]: \["activations"\] is wanted'):
        read_plan(EXAMPLES / "mlp", sets=['memory.offload=["weights"]'])


def _workers(*devices: str) -> list[str]:
    stages = [f"workers.{index}.stages=[{index}]" for index in range(len(devices))]
    return [*stages, *(f"workers.{index}.device={device}" for index, device in enumerate(devices))]
