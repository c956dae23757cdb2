"""Memory that is freed goes back to the system, small pieces between it or not."""

import platform
from contextlib import closing

import pytest

from support.fork_server import ForkServer
from support.freeing import PIECES, SIZE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are not told")
def test_large_memory_between_small_goes_back_when_it_is_freed(fork_server: ForkServer) -> None:
    left = {}
    for gives_back in (False, True):
        with closing(fork_server.call("support.freeing:main", gives_back)) as process:
            said, errors = process.communicate()
        assert process.returncode == 0, errors
        left[gives_back] = int(said)
    assert left[False] > PIECES * SIZE // 2
    assert left[True] < SIZE
