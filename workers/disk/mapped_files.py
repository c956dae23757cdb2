"""Memory that is a file's: weights, gradients and what optimizers keep, of which the system has in memory what fits.

Files have no names: a process that ends, however it does, leaves none behind. Their space on the disk is there before
they are used, so that a full disk is an error here and not a signal later.
"""

import ctypes
import mmap
import os
import tempfile
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import torch

from stageline.pipeline.retry import BOUND, Note, persist, reason_of

from .background_writer import WriteFailed
from .freed_memory import function_of_system

_DESCRIPTORS = "/proc/self/fd"  # open files by their numbers, on Linux: a file without a name is mapped by this
_DONTFORK = getattr(mmap, "MADV_DONTFORK", None)  # on Linux
_advise = function_of_system("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFiles:
    """Files in `folder`, which is made. `note` gets faults that may pass, such as a full disk: these are waited for.
    Without it they are not, since nothing would tell of the wait."""

    def __init__(self, folder: Path, note: Note | None) -> None:
        self._folder = folder.absolute()
        self._note = note or (lambda fault: None)
        self._bound = BOUND if note else 0.0

    def storage(self, size: int) -> torch.UntypedStorage:
        """The memory of a new file of `size` bytes, which begins at a page. Raises `WriteFailed`."""
        what = f"make a file of {size} bytes in {self._folder}"
        try:
            return persist(partial(self._mapped, size), what, self._note, now=monotonic, wait=sleep, bound=self._bound)
        except (OSError, RuntimeError) as error:  # torch's, where the system maps no more files
            raise WriteFailed(f"cannot {what}: {reason_of(error)}") from error

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is of one of the files."""
        name = storage.filename
        return name is not None and os.path.dirname(name) in (_DESCRIPTORS, str(self._folder))

    def fetch(self, storage: torch.UntypedStorage) -> None:
        """Begins to read the file of what `storage` returned, where the system can."""
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
        _keep_from_forks(storage)
        return storage


def _keep_from_forks(storage: torch.UntypedStorage) -> None:
    """Leave `storage` out of every process that is forked from this one, where the system can.

    The memory is shared with the file: a fork of the user's code that went on with a step would change the weights of
    this process. Without the memory, it ends by SIGSEGV there.
    """
    if _advise is not None and _DONTFORK is not None:
        _advise(storage.data_ptr(), storage.nbytes(), _DONTFORK)


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)
