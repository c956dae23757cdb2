"""Bytes come back from a scratch as they were, whether they are written yet or not, and leave nothing behind."""

import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from stageline.workers.disk import memory as scratch_files
from stageline.workers.disk.background_writer import BackgroundWriter, WriteFailed
from stageline.workers.disk.memory import ScratchFiles


def has_room(writer: BackgroundWriter) -> None:
    writer.demand(writer.has_room(None, None), 0)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[ScratchFiles]:
    with ScratchFiles(tmp_path / "offload", lambda fault: None, has_room) as scratch:
        yield scratch


def data(number: int, size: int = 100_000) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_bytes_come_back_fetched_or_not(scratch: ScratchFiles, tmp_path: Path) -> None:
    parcels = [scratch.put(data(number)) for number in range(6)]
    assert scratch._writer.flush(60)
    for parcel in parcels[::2]:
        parcel.fetch()
    for number, parcel in reversed(list(enumerate(parcels))):
        assert torch.equal(parcel.bytes(), data(number))
        assert torch.equal(parcel.bytes(), data(number))  # and once more
    assert not list((tmp_path / "offload").iterdir())  # no names


def test_waits_for_bytes_that_are_read_back_are_told(tmp_path: Path) -> None:
    waits: list[float] = []
    with ScratchFiles(tmp_path / "offload", lambda fault: None, has_room, waits.append) as scratch:
        parcels = [scratch.put(data(number)) for number in range(2)]
        assert scratch._writer.flush(60)
        parcels[0].fetch()
        scratch._reader.submit(lambda: None).result()  # after it: nothing is left to wait for
        assert torch.equal(parcels[0].bytes(), data(0))
        assert not waits
        assert torch.equal(parcels[1].bytes(), data(1))
    assert len(waits) == 1
    assert waits[0] > 0


def test_a_file_is_there_as_long_as_one_of_its_parcels(scratch: ScratchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_files, "_FILE", 150_000)
    before = open_files()
    parcels = [scratch.put(data(number)) for number in range(4)]
    assert scratch._writer.flush(60)
    assert open_files() == before + 2
    del parcels[:2]
    gc.collect()
    assert open_files() == before + 1
    assert torch.equal(parcels[0].bytes(), data(2))


def test_what_waits_to_be_written_is_given_back_as_it_is(
    scratch: ScratchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = Event()
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: going_on.wait(60) and write(*given))
    given = data(0)
    parcel = scratch.put(given)
    parcel.fetch()
    assert parcel.bytes().data_ptr() == given.data_ptr()
    going_on.set()


def test_a_full_disk_is_named_and_the_writing_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[Any] = []
    write, full = os.pwrite, [True]
    told = Event()

    def note(fault: Any) -> None:
        faults.append(fault)
        told.set()

    def pwrite(*given: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with ScratchFiles(tmp_path, note, has_room) as scratch:
        parcel = scratch.put(data(0))
        assert told.wait(60)
        assert faults[0].told(faults[0].since).startswith(f"cannot write activations to {tmp_path}: No space left on")
        full[0] = False
        assert scratch._writer.flush(60)
        assert faults[-1] is None
        parcel.fetch()
        assert torch.equal(parcel.bytes(), data(0))


def _refuse(number: int) -> Callable[..., int]:
    def refuse(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def test_what_cannot_be_written_or_read_back_names_the_folder(
    scratch: ScratchFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcel = scratch.put(data(0))
    assert scratch._writer.flush(60)
    monkeypatch.setattr(os, "preadv", _refuse(errno.EIO))
    with pytest.raises(WriteFailed, match=rf"activations in {tmp_path}/offload could not be read back: Input/output"):
        parcel.bytes()
    monkeypatch.setattr(os, "pwrite", _refuse(errno.EROFS))
    scratch.put(data(1))
    scratch._writer.flush(60)
    with pytest.raises(WriteFailed, match=rf"could not be written to {tmp_path}/offload: Read-only file system"):
        scratch.put(data(2))
