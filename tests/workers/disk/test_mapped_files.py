"""Memory of a file is as any other, leaves neither names nor descriptors, and a disk that cannot have it is named."""

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from stageline.workers.disk import memory as mapped_files
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.disk.memory import MappedFiles


def files_in(folder: Path) -> MappedFiles:
    return MappedFiles(folder, lambda fault: None)


def test_memory_of_a_file_keeps_what_is_written_and_leaves_no_name_and_no_descriptor(tmp_path: Path) -> None:
    files = files_in(tmp_path / "offload")
    before = len(os.listdir("/proc/self/fd"))
    storages = [files.storage(100_000) for _ in range(3)]
    views = [torch.empty(0, dtype=torch.uint8).set_(each, 0, (100_000,), (1,)) for each in storages]
    for number, view in enumerate(views):
        view.fill_(number)
    assert [int(view.sum()) for view in views] == [0, 100_000, 200_000]
    assert not list((tmp_path / "offload").iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="only Linux makes files without names")  # noqa: S108
def test_a_file_never_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had one until it was unlinked; a process that was killed in between left it behind."""
    monkeypatch.setattr(os, "unlink", lambda *_, **__: pytest.fail("the file had a name"))
    with TemporaryDirectory(dir="/dev/shm") as folder:  # a tmpfs, which any Linux can do this in
        assert files_in(Path(folder)).storage(70_000).nbytes() == 70_000


def test_where_the_system_lists_no_descriptors_a_file_has_a_name_until_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "_DESCRIPTORS", "/proc/self/no-such-folder")
    files = files_in(tmp_path)
    storage = files.storage(70_000)
    assert files.has(storage)
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (70_000,), (1,)).fill_(7)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="only Linux keeps memory from forks")
def test_a_fork_of_the_process_has_no_memory_of_a_file_and_cannot_write_to_it(tmp_path: Path) -> None:
    storage = files_in(tmp_path).storage(70_000)
    view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (70_000,), (1,)).fill_(7)
    reads, writes = os.pipe()
    if not (copy := os.fork()):
        try:
            os.readv(reads, [view.numpy().data])  # type: ignore[list-item]  # a write to memory that is not there fails
        except OSError as error:
            os._exit(error.errno or 0)
        os._exit(0)
    os.write(writes, b"other")
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == errno.EFAULT
    os.close(reads)
    os.close(writes)
    assert view.sum() == 7 * 70_000


def test_it_is_known_which_memory_is_of_a_file(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    assert files.has(files.storage(100))
    assert not files.has(torch.empty(100).untyped_storage())


def test_where_there_can_be_no_file_the_error_names_the_folder_the_size_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, size: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(mapped_files, "_reserve", refused)
    with pytest.raises(WriteFailed, match=rf"cannot make a file of 70000 bytes in {tmp_path}: .*Read-only"):
        files_in(tmp_path).storage(70_000)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_noted_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, notes = [None, None], []

    def full_twice(descriptor: int, size: int, plain: Callable[[int, int], None] = mapped_files._reserve) -> None:
        if left:
            left.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor, size)

    monkeypatch.setattr(mapped_files, "_reserve", full_twice)
    monkeypatch.setattr(mapped_files, "sleep", lambda seconds: None)
    storage = MappedFiles(tmp_path, notes.append).storage(70_000)
    assert storage.nbytes() == 70_000
    assert notes.pop() is None
    told = [note.told(note.since) for note in notes]
    assert len(told) == 2
    assert told[0].startswith(
        f"cannot make a file of 70000 bytes in {tmp_path}: No space left on device; tried for 0 s"
    )
    assert not list(tmp_path.iterdir())
