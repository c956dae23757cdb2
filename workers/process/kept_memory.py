"""Memory that a worker frees stays with its process, and the next step takes it again.

By default glibc gives what is free at the top of its heap back to the system, and asks for it again for the next
tensor. The system then fills every page with zeros, one page fault each: for 16 MB that takes several times as long
as copying a message of that size. A worker does the same work in every step, so it needs as much memory again.
Where a run offloads, memory is given back instead (`disk/freed_memory.py`).
"""

import ctypes
import os

from stageline.workers.disk.freed_memory import function_of_system

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST = 2**25  # bytes; the most that glibc accepts. Larger blocks are given back one by one when they are freed
_NEVER = 2**31 - 1  # bytes that are free at the top of the heap before they are given back; an int in C
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Has this process keep the memory that it frees. False, and nothing changes, where the C library is not glibc, or
    the user's environment says how it is to behave."""
    if any(name in os.environ for name in _OWN_SETTINGS):
        return False
    mallopt = function_of_system("mallopt", ctypes.c_int, ctypes.c_int)
    return bool(mallopt and mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
