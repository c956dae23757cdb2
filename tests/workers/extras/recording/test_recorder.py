"""Records are written behind the compute loop's back; a disk that fails ends the recording, not the run."""

import resource
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from stageline.broker.codec.message import Message
from stageline.pipeline.plan import Plan, read_plan
from stageline.pipeline.retry import ResourceFault
from stageline.workers.extras.recording.recorder import RecordWriter
from stageline.workers.extras.recording.records import Direction, RecordDirectory, read_entries


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return read_plan("examples/mlp", sets=[f"run.dir={tmp_path}", "recovery.snapshot_every=10"], environment={})


def message(step: int) -> Message:
    return Message("run-1", "forward-1", step, 3, torch.full((2,), float(step)))


def test_what_was_recorded_is_there_once_the_writer_is_closed(plan):
    writer = RecordWriter(plan, "run-1", (1,), 3, 4)
    for step in (4, 9, 10):
        writer.record(1, Direction.TAKEN, message(step))
    writer.record(1, Direction.GIVEN, message(11))
    writer.close()
    records = RecordDirectory(plan.run.dir / "run-1", 1)
    assert records.about().run == "run-1"
    assert [(begin, path.name) for begin, path in records.segments()] == [
        (4, "step-0000000004.3"),
        (10, "step-0000000010.3"),
    ]
    recorded = {(place[0], place[2]): entry for place, entry in records.messages().items()}
    assert recorded.keys() == {(Direction.TAKEN, 4), (Direction.TAKEN, 9), (Direction.TAKEN, 10), (Direction.GIVEN, 11)}
    assert torch.equal(recorded[Direction.TAKEN, 9].load().payload, message(9).payload)


def test_records_from_before_a_step_are_deleted_a_file_at_a_time(plan):
    writer = RecordWriter(plan, "run-1", (1,), 3, 0)
    for step in (0, 9, 10, 20):
        writer.record(1, Direction.TAKEN, message(step))
    writer.delete_before(15)
    writer.close()
    assert [begin for begin, _ in RecordDirectory(plan.run.dir / "run-1", 1).segments()] == [10, 20]


def test_a_disk_that_fails_ends_the_recording_and_the_reason_is_logged(plan):
    (plan.run.dir / "run-1").write_text("a file is in the way")
    with capture_logs() as logs:
        writer = RecordWriter(plan, "run-1", (1,), 3, 0)
        for step in range(3):
            writer.record(1, Direction.TAKEN, message(step))
        writer.close()
    assert [entry["event"] for entry in logs] == ["recording ends"]
    assert "Not a directory" in logs[0]["reason"]


def test_what_a_full_disk_cut_off_is_written_again_whole(plan):
    """Once the disk has room: the entry that was cut off does not stay in the file."""

    def make_room(fault: ResourceFault | None) -> None:
        notes.append(fault)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    notes: list[ResourceFault | None] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = RecordWriter(plan, "run-1", (1,), 3, 0, make_room)
    for step in range(3):
        writer.record(1, Direction.TAKEN, message(step))
    file = RecordDirectory(plan.run.dir / "run-1", 1).segment(0, 3)
    until_it_holds(file, 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 50, before[1]))
    for step in range(3, 6):
        writer.record(1, Direction.TAKEN, message(step))
    writer.close()
    assert notes[0] is not None
    assert (
        notes[0].told(notes[0].since).startswith(f"cannot record messages in {plan.run.dir / 'run-1'}: File too large")
    )
    assert notes[-1] is None
    assert [entry.header.number for entry in read_entries(file)] == list(range(6))


def until_it_holds(file: Path, entries: int) -> None:
    while not file.exists() or len(list(read_entries(file))) < entries:
        continue
