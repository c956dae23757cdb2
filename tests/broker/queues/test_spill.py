"""Messages on the disk are read back as they were written, and disk space is freed as messages are forgotten."""

import errno
import os
import random
import resource
from collections import deque
from pathlib import Path

import pytest

from stageline.broker.errors import QueueFull
from stageline.broker.queues import spill as spill_module
from stageline.broker.queues.spill import Slot, Spill


def test_nothing_is_written_beyond_the_disk_limit(tmp_path: Path) -> None:
    spill = Spill(100, str(tmp_path))
    slot = spill.write([b"x" * 60, b"y" * 30])
    with pytest.raises(QueueFull, match="90 of 100 bytes on the disk are used"):
        spill.write([b"z" * 11])
    assert [bytes(frame) for frame in spill.read(slot)] == [b"x" * 60, b"y" * 30]
    spill.forget(slot)
    assert spill.bytes == 0


def test_spilled_files_have_no_name(tmp_path: Path) -> None:
    spill = Spill(100, str(tmp_path))
    slot = spill.write([b"secret"])
    assert list(tmp_path.iterdir()) == []
    spill.forget(slot)


@pytest.mark.parametrize("seed", range(10))
def test_messages_are_read_as_they_were_written_in_any_order(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    spill = Spill(10**6, str(tmp_path))
    written: deque[tuple[Slot, list[bytes]]] = deque()
    for _ in range(100):
        frames = [dice.randbytes(dice.randrange(2000)) for _ in range(dice.randrange(1, 4))]
        written.append((spill.write(frames), frames))
        if len(written) > 1 and dice.random() < 0.3:
            spill.forget(written.popleft()[0])
        slot, frames = dice.choice(list(written))
        assert [bytes(frame) for frame in spill.read(slot)] == frames
    assert spill.bytes == sum(len(frame) for _, frames in written for frame in frames)
    spill.close()


def test_a_file_is_closed_when_none_of_its_messages_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "FILES", 2)  # of 50 bytes each
    none = len(os.listdir("/proc/self/fd"))
    spill = Spill(100, str(tmp_path))
    slots = [spill.write([b"x" * 25]) for _ in range(4)]
    assert len(os.listdir("/proc/self/fd")) - none == 2
    for slot in slots[:2]:
        spill.forget(slot)
    assert len(os.listdir("/proc/self/fd")) - none == 1
    spill.close()
    assert len(os.listdir("/proc/self/fd")) == none


def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spill = Spill(100, str(tmp_path))
    slot = spill.write([b"first"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(QueueFull, match=r"the disk takes no more in .*: No space left on device"):
            spill.write([b"second"])
    assert spill.bytes == 5
    assert [bytes(frame) for frame in spill.read(slot)] == [b"first"]
    spill.close()


def test_a_message_that_is_written_in_part_takes_no_room(tmp_path: Path) -> None:
    spill = Spill(10**7, str(tmp_path))
    slot = spill.write([b"x" * 60_000])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(QueueFull, match=f"the disk takes no more in {tmp_path}: File too large"):
            spill.write([b"y" * 60_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.fstat(slot.segment.file.fileno()).st_size == 60_000
    again = spill.write([b"y" * 60_000])
    assert [bytes(frame) for frame in spill.read(again)] == [b"y" * 60_000]
    spill.close()
