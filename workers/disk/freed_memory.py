"""Gives memory that is freed back to the system. An allocator would keep it, in pieces between what is in use."""

import ctypes
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_TOP = 1 << 17  # bytes that may be free at the end of the heap, as glibc begins with
_LARGE = 1 << 20  # bytes from which on memory is the system's own, and goes back when it is freed


def function_of_system(name: str, *types: type) -> Callable[..., int] | None:
    """The C library's function of that name, where it has one."""
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found.argtypes = types
    return found


_tune = function_of_system("mallopt", ctypes.c_int, ctypes.c_int)
_trim = function_of_system("malloc_trim", ctypes.c_size_t)


def give_back_memory() -> None:
    """What is free now, and from now on what is large whenever it is freed, whatever the allocator was told before.
    Where the C library is not glibc, nothing changes."""
    if _tune is not None:
        _tune(_MMAP_THRESHOLD, _LARGE)
        _tune(_TRIM_THRESHOLD, _TOP)
    if _trim is not None:
        _trim(0)
