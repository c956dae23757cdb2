"""Number of files and sockets that this process may have open."""

import resource
from contextlib import suppress

ENOUGH = 2**16  # descriptors; programs that are started may walk through all that are allowed


def raise_descriptor_limit() -> None:
    """Raise the limit of this process, and of those that it starts, as far as it may.

    The usual 1024 are few for a process that others connect to.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS refuses more than a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    """Return the number of descriptors that this process may have; `ENOUGH` if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft
