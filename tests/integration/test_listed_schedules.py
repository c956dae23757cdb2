"""Runs by schedules from files: the digest is that of the plain loop, whatever the order, killed or resumed."""

from functools import cache
from pathlib import Path

import pytest

from stageline.pipeline.plan import Plan, read_plan
from stageline.pipeline.schedule import make_schedule
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer
from support.paths import EXAMPLES
from support.torch_schedules import TORCHS, dumped

FOLDER = EXAMPLES / "mlp"
MICROBATCHES = 4
SIZES = {"run.steps": 12}
V_SHAPED, LOOPED = ("[0, 3]", "[1, 2]"), ("[0, 2]", "[1, 3]")


@cache
def expected() -> str:
    return reference.reference_digest(FOLDER, microbatches=MICROBATCHES, changes=SIZES)


def config(folder: Path) -> Path:
    """The example's plan, in the folder of the schedule's file, without its workers."""
    text = (FOLDER / "stageline.toml").read_text().partition("[workers.0]")[0]
    for name in ("model.py", "data.py"):
        text = text.replace(f'"{name}:', f'"{FOLDER / name}:')
    (folder / "stageline.toml").write_text(text)
    return folder / "stageline.toml"


def sets(file: str, placement: tuple[str, ...], url: str = "memory://") -> list[str]:
    return [
        *(f"{key}={value}" for key, value in SIZES.items()),
        "schedule.name=csv",
        f"schedule.file={file}",
        f"schedule.microbatches={MICROBATCHES}",
        f"queues.url={url}",
        "model.cut=[1, 2, 3]",
        *(f"workers.{worker}.stages={stages}" for worker, stages in enumerate(placement)),
    ]


def digest(plan: Plan, folder: Path) -> object:
    outcome = run_memory(prepare(plan), "run", folder / "run")
    assert outcome.code == 0, outcome.reason
    return outcome.facts["weights_sha256"]


@pytest.mark.parametrize("theirs", [*TORCHS, "ScheduleInterleavedZeroBubble"])
@pytest.mark.usefixtures("one_thread")
def test_files_that_torch_writes_give_the_digest_of_the_plain_loop(theirs: str, tmp_path: Path) -> None:
    dumped(theirs, 2, MICROBATCHES, tmp_path / "theirs.csv")
    placement = LOOPED if "Interleaved" in theirs else V_SHAPED
    assert digest(read_plan(config(tmp_path), sets=sets("theirs.csv", placement)), tmp_path) == expected()


@pytest.mark.usefixtures("one_thread")
def test_an_order_that_the_catalogue_does_not_have_gives_it_too(tmp_path: Path) -> None:
    lists = [
        "0F0,0F1,3F0,0F2,3F1,3I0,3W0,3B1,,0F3,3F2,3B2,0B0,3F3,3B3,0I1,0W1,0B2,0B3",
        "1F0,2F0,1F1,2F1,2I0,1F2,2F2,2W0,1B0,2B1,1F3,2F3,2B2,1B1,2B3,1B2,1B3",
    ]
    (tmp_path / "mine.csv").write_text("\n".join(lists))
    assert digest(read_plan(config(tmp_path), sets=sets("mine.csv", V_SHAPED)), tmp_path) == expected()


@pytest.mark.parametrize("url", ["memory://", "ipc://"])
def test_backwards_in_descending_order_add_gradients_in_that_order(
    url: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Of two microbatches, the sum is the same in either order: so is the digest."""
    rows = ["0F0,0F1,,,,,,,0B1,0B0", ",1F0,1F1,,,,,1B1,1B0", ",,2F0,2F1,,,2B1,2B0", ",,,3F0,3F1,3B1,3B0"]
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    changes = [*sets("mine.csv", ("[0]", "[1]", "[2]", "[3]"), url), "schedule.microbatches=2"]
    expected = reference.reference_digest(FOLDER, microbatches=2, changes=SIZES)
    if url == "memory://":
        assert digest(read_plan(config(tmp_path), sets=changes), tmp_path) == expected
    else:
        outcome = fork_server.train(config(tmp_path), *changes, f"run.dir={tmp_path}", folder=tmp_path / "run")
        assert outcome["facts"]["weights_sha256"] == expected


@pytest.mark.slow
def test_a_worker_is_killed_in_a_run_by_torchs_zb_v(fork_server: ForkServer, tmp_path: Path) -> None:
    dumped("ScheduleZBVZeroBubble", 2, MICROBATCHES, tmp_path / "theirs.csv")
    of_step = len(make_schedule("zb-v", ((0, 3), (1, 2)), MICROBATCHES).workers[1])
    outcome = fork_server.train(
        config(tmp_path),
        *sets("theirs.csv", V_SHAPED, "ipc://"),
        f"run.dir={tmp_path}",
        "recovery.snapshot_every=3",
        "recovery.restarts=3",
        folder=tmp_path / "run",
        kills=[("worker-1", 4 * of_step + 5)],
    )
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == expected()
    (tmp_path / "theirs.csv").unlink()  # what was run is in the run's folder
    assert '"rows":["0F0,' in (tmp_path / "run" / "plan.json").read_text().replace(" ", "").replace("\n", "")
