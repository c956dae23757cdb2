"""What becomes of memory that a process has freed: kept for the next step, or given back to the system.

By default glibc gives what is free at the top of its heap back to the system, and asks for it again for the next
tensor. The system then fills every page with zeros, one page fault each: for 16 MB that takes several times as long
as copying a message of that size. A worker does the same work in every step, so it keeps what it frees. Where memory
is scarce, it gives everything large back: an allocator that keeps it has several times what is in use.
"""

import ctypes
import os
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 1 << 25  # bytes; the most that glibc accepts. Larger blocks are given back one by one when they are freed
_NEVER = 2**31 - 1  # bytes that are free at the end of the heap before they are given back; an int in C
_TOP = 1 << 17  # the same, as glibc begins with
_LARGE = 1 << 20  # bytes from which on memory is the system's own, and goes back when it is freed
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def function_of_system(name: str, *types: type) -> Callable[..., int] | None:
    """The C library's function of that name, where it has one."""
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found.argtypes = types
    return found


_tune = function_of_system("mallopt", ctypes.c_int, ctypes.c_int)
_trim = function_of_system("malloc_trim", ctypes.c_size_t)


def keep_freed_memory() -> bool:
    """Has this process keep the memory that it frees. False, and nothing changes, where the C library is not glibc, or
    the user's environment says how it is to behave."""
    if _tune is None or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    return bool(_tune(_MMAP_THRESHOLD, _LARGEST) and _tune(_TRIM_THRESHOLD, _NEVER))


def give_back_memory() -> None:
    """What is free now, and from now on what is large whenever it is freed, whatever the allocator was told before.
    Where the C library is not glibc, nothing changes."""
    if _tune is not None:
        _tune(_MMAP_THRESHOLD, _LARGE)
        _tune(_TRIM_THRESHOLD, _TOP)
    if _trim is not None:
        _trim(0)
