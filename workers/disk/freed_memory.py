"""Gives memory that is freed back to the system. An allocator would keep it, in pieces between what is in use."""

import ctypes
from collections.abc import Callable

_MMAP_THRESHOLD = -3  # of mallopt(3): memory of so many bytes is the system's own, and goes back when it is freed
_LARGE = 1 << 20


def function_of_system(name: str, *types: type) -> Callable[..., int] | None:
    """The C library's function of that name, where it has one."""
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found.argtypes = types
    return found


_tune = function_of_system("mallopt", ctypes.c_int, ctypes.c_int)
_trim = function_of_system("malloc_trim", ctypes.c_size_t)


def give_back_memory() -> None:
    """What is free now, and from now on what is large whenever it is freed. Where the C library is not glibc, nothing
    changes."""
    if _tune is not None:
        _tune(_MMAP_THRESHOLD, _LARGE)
    if _trim is not None:
        _trim(0)
