"""Memory that is freed goes back to the system, small pieces between it or not."""

import platform
import subprocess
import sys

import pytest

from support.freeing import PIECES, SIZE
from support.paths import importing_tests


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are not told")
def test_large_memory_between_small_goes_back_when_it_is_freed() -> None:
    """In processes of their own, whose heap nothing else has used."""
    left = {}
    for gives_back in ("no", "yes"):
        command = [sys.executable, "-m", "support.freeing", gives_back]
        left[gives_back] = int(subprocess.run(command, env=importing_tests(), capture_output=True, check=True).stdout)
    assert left["no"] > PIECES * SIZE // 2
    assert left["yes"] < SIZE
