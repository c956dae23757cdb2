"""Origin of a run in another layout, by its folder's note and by its id."""

from pathlib import Path

from stageline.broker.ledger.recovery import EarlierRun
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.runs.records import NOTE, RecutNote, earlier_run, read_note, recut_id
from support.small_plans import plan


def test_the_id_follows_from_run_step_and_plan_and_does_not_grow() -> None:
    three, gpipe = plan(model__cut=[3]).resolved(2), plan(schedule__name="gpipe").resolved(2)
    first = recut_id("small-1", 40, three)
    assert first.startswith("small-1-at40-")
    assert len({first, recut_id("small-1", 60, three), recut_id("small-1", 40, gpipe)}) == 3
    assert recut_id("small-1", 40, three) == first
    second = recut_id(first, 60, gpipe)
    assert second.startswith("small-1-at60-")
    assert second != recut_id("small-1", 60, gpipe)


def test_a_broker_knows_the_step_also_where_no_snapshot_was_made(tmp_path: Path) -> None:
    here = plan(run__dir=str(tmp_path)).resolved(2)
    run = recut_id("small-1", 40, here)
    folder = tmp_path / run
    assert earlier_run(here, "small-1") is None
    assert earlier_run(here, run) == EarlierRun(40, "", str(folder))
    folder.mkdir()
    write_json(folder / NOTE, RecutNote("small-1", 40))
    assert read_note(folder) == RecutNote("small-1", 40)
    assert earlier_run(here, run) == EarlierRun(40, str(tmp_path / "small-1"), str(folder))


def test_a_run_that_repeats_another_from_step_0_goes_on_from_no_checkpoint(tmp_path: Path) -> None:
    """It was told to write what is missing with `checkpoint split --step 0`, which there is not."""
    here = plan(run__dir=str(tmp_path)).resolved(2)
    run = recut_id("small-1", 0, here)
    assert earlier_run(here, run) is None
    (tmp_path / run).mkdir()
    write_json(tmp_path / run / NOTE, RecutNote("small-1", 0))
    assert earlier_run(here, run) is None
