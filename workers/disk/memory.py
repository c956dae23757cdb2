"""Memory mapped to files, scratch files for what leaves memory for a while, and control of freed memory.

`ScratchFiles` keep activations of microbatches in flight, and bring them back before they are needed:

put ─> backlog ─> writing thread ─> file ─> reading thread ─> memory
          └───── data not yet written are given back as they are ──────┘

`MappedFiles` are the memory of weights, gradients and optimizer state, of which the system keeps in memory what fits.
Their space on the disk is reserved before they are used, so that a full disk is an error here and not a signal later.
Files have no names: a process that ends, however it does, leaves none behind. A scratch file lives as long as one of
its parcels.

By default glibc gives what is free at the top of its heap back to the system, and asks for it again for the next
tensor; the system then fills every page with zeros, which takes several times as long as copying a message. A worker
does the same work in every step, so it keeps what it frees (`keep_freed_memory`). Where memory is scarce, it gives
everything large back (`give_back_memory`): an allocator that keeps it has several times what is in use.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep

import torch

from stageline.pipeline.retry import BOUND, Note, persist, reason_of

from .background_writer import BackgroundWriter, WriteFailed

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 1 << 25  # bytes; the most that glibc accepts. Larger blocks are given back one by one when they are freed
_NEVER = 2**31 - 1  # bytes that are free at the end of the heap before they are given back; an int in C
_TOP = 1 << 17  # the same, as glibc begins with
_LARGE = 1 << 20  # bytes from which on memory is the system's own, and goes back when it is freed
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
BACKLOG = 1 << 26  # bytes that wait to be written
_FILE = 1 << 26  # bytes of a file, from which on the next one begins
_CLOSE = 10.0  # seconds


def function_of_system(name: str, *types: type) -> Callable[..., int] | None:
    """Return the C library's function `name`, which returns an int; None if it has none.

    `types` are the types of its arguments.
    """
    try:
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)((name, ctypes.CDLL(None)))
    except AttributeError:
        return None


_tune = function_of_system("mallopt", ctypes.c_int, ctypes.c_int)
_trim = function_of_system("malloc_trim", ctypes.c_size_t)


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees; return True if it does.

    Nothing changes if the C library is not glibc, or if the user's environment configures it.
    """
    if _tune is None or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    return bool(_tune(_MMAP_THRESHOLD, _LARGEST) and _tune(_TRIM_THRESHOLD, _NEVER))


def give_back_memory() -> None:
    """Give free memory back to the system now, and large blocks from now on whenever they are freed.

    Earlier settings of the allocator are replaced. Nothing changes if the C library is not glibc.
    """
    if _tune is not None:
        _tune(_MMAP_THRESHOLD, _LARGE)
        _tune(_TRIM_THRESHOLD, _TOP)
    if _trim is not None:
        _trim(0)


class ScratchFiles(AbstractContextManager["ScratchFiles"]):
    """Scratch files for data that leave memory for a while, written and read by two threads."""

    def __init__(
        self,
        folder: Path,
        note: Note,
        room: Callable[[BackgroundWriter], None],
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Start the threads.

        Args:
            folder: Folder of the files, made at the first write.
            note: Called with faults that may pass.
            room: Waits until the writer's backlog has room; raises `WriteFailed` if it stays full.
            waited: Called with the seconds of each wait for bytes that are read back.
        """
        self._folder = folder
        self._room = room
        self._waited = waited
        self._writer = BackgroundWriter("offload", BACKLOG, note=note)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._file = _File(folder)

    def __exit__(self, *_: object) -> None:
        """End the threads; wait up to `_CLOSE` seconds for the writing."""
        self._writer.close(_CLOSE)
        self._reader.shutdown(cancel_futures=True)

    def put(self, data: torch.Tensor) -> "FileParcel":
        """Queue `data`, uint8 [n], which must not be written to afterwards; return its parcel. Raises `WriteFailed`."""
        self._room(self._writer)
        if self._file.size >= _FILE:
            self._file = _File(self._folder)
        parcel = FileParcel(data, self._file, self._reader, self._waited)
        what = f"write activations to {self._folder}"
        self._writer.submit(parcel.write, None, data.numel(), what=what)
        return parcel


class FileParcel:
    """Bytes, uint8 [n], in memory until they are written, then in a file."""

    def __init__(
        self, data: torch.Tensor, file: "_File", reader: ThreadPoolExecutor, waited: Callable[[float], object]
    ) -> None:
        """Reserve room for `data`, uint8 [n], in `file`.

        Args:
            data: Bytes.
            file: File.
            reader: Thread that reads them back.
            waited: Called with the seconds of a wait for them.
        """
        self._waited = waited
        self._data: torch.Tensor | None = data
        self._size = data.numel()
        self._file, self._offset = file, file.take(self._size)
        self._reader = reader
        self._coming: Future[torch.Tensor] | None = None

    def write(self) -> None:
        """Write the bytes and release their memory; for the writing thread. Raises `WriteFailed`."""
        data = self._data
        if data is not None:
            self._file.write(memoryview(data.numpy().data), self._offset)
            self._data = None

    def fetch(self) -> None:
        """Start to read the bytes, unless they have not been written yet."""
        if self._data is None and self._coming is None:
            self._coming = self._reader.submit(self._read)

    def bytes(self) -> torch.Tensor:
        """Return the bytes, uint8 [n]. Raises `WriteFailed`."""
        if (data := self._data) is not None:
            return data
        coming, self._coming = self._coming, None
        if coming is not None and coming.done():  # most are: no look at the clock
            return coming.result()
        began = perf_counter()
        try:
            return self._read() if coming is None else coming.result()
        finally:
            self._waited(perf_counter() - began)

    def _read(self) -> torch.Tensor:
        data = torch.empty(self._size, dtype=torch.uint8)
        self._file.read(memoryview(data.numpy().data), self._offset)
        return data


class _File:
    """File without a name in `folder`, which is made at the first write."""

    def __init__(self, folder: Path) -> None:
        self.size = 0
        self._folder = folder
        self._descriptor: int | None = None

    def take(self, size: int) -> int:
        """Reserve `size` bytes and return their offset."""
        offset, self.size = self.size, self.size + size
        return offset

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Raises `WriteFailed`."""
        try:
            descriptor = self._opened()
            while data:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise WriteFailed(f"activations could not be written to {self._folder}: {error.strerror}") from error

    def read(self, data: memoryview, offset: int) -> None:
        """Fill `data` from `offset`. Raises `WriteFailed`, since data that were written are lost."""
        try:
            descriptor = self._opened()
            while data:
                count = os.preadv(descriptor, [data], offset)
                if not count:
                    raise OSError(errno.EIO, f"they end at byte {offset}")
                data, offset = data[count:], offset + count
        except OSError as error:
            raise WriteFailed(f"activations in {self._folder} could not be read back: {error.strerror}") from error

    def _opened(self) -> int:
        if self._descriptor is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor, name = tempfile.mkstemp(dir=self._folder, prefix="offload-")
            Path(name).unlink()
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


_DESCRIPTORS = "/proc/self/fd"  # open files by their numbers, on Linux: a file without a name is mapped by this
_DONTFORK = getattr(mmap, "MADV_DONTFORK", None)  # on Linux
_advise = function_of_system("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFiles:
    """Files without names in a folder, mapped as the memory of tensors."""

    def __init__(self, folder: Path, note: Note | None) -> None:
        """Name the folder, which is made when it is first used.

        Args:
            folder: Folder of the files.
            note: Called with faults that may pass, such as a full disk, which are waited for. Without it they raise at
                once, since nothing would tell of the wait.
        """
        self._folder = folder.absolute()
        self._note = note or (lambda fault: None)
        self._bound = BOUND if note else 0.0

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return the page-aligned memory of a new file of `size` bytes. Raises `WriteFailed`."""
        what = f"make a file of {size} bytes in {self._folder}"
        try:
            return persist(partial(self._mapped, size), what, self._note, now=monotonic, wait=sleep, bound=self._bound)
        except (OSError, RuntimeError) as error:  # torch's, where the system maps no more files
            raise WriteFailed(f"cannot {what}: {reason_of(error)}") from error

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return True if `storage` is the memory of one of these files."""
        name = storage.filename
        return name is not None and os.path.dirname(name) in (_DESCRIPTORS, str(self._folder))

    def fetch(self, storage: torch.UntypedStorage) -> None:
        """Start to read the file of `storage`, which `MappedFiles.storage` returned, where the system can."""
        if _advise is not None:
            _advise(storage.data_ptr(), storage.nbytes(), mmap.MADV_WILLNEED)

    def _mapped(self, size: int) -> torch.UntypedStorage:
        self._folder.mkdir(parents=True, exist_ok=True)
        nameless = os.path.exists(_DESCRIPTORS)
        made = tempfile.TemporaryFile if nameless else tempfile.NamedTemporaryFile  # each of them is gone when closed
        with made(dir=self._folder, prefix="state-") as file:
            descriptor = file.fileno()
            _reserve(descriptor, size)
            name = f"{_DESCRIPTORS}/{descriptor}" if nameless else file.name
            storage: torch.UntypedStorage = torch.UntypedStorage.from_file(name, True, size)  # type: ignore[assignment]
        # The memory is shared with the file: a fork of the user's code that went on with a step would change the
        # weights of this process. Without the memory, it ends by SIGSEGV there.
        if _advise is not None and _DONTFORK is not None:
            _advise(storage.data_ptr(), storage.nbytes(), _DONTFORK)
        return storage


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)
