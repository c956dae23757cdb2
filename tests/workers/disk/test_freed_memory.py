"""Memory that is freed stays with its process, or goes back to the system, small pieces between it or not.

In processes of their own, whose heap nothing else has used.
"""

import os
import platform
import subprocess
import sys

import pytest

from support.freeing import SIZE
from support.paths import importing_tests

PAGES = 2**24 // os.sysconf("SC_PAGESIZE")  # of the memory that each round takes, 16 MiB

ROUNDS = """
import resource, sys
from stageline.workers.disk.memory import keep_freed_memory
kept = keep_freed_memory() if "keep" in sys.argv else None
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytearray(2**20) for _ in range(16)]
    del held
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def last_round(*arguments: str, **environment: str) -> tuple[str, int]:
    """Result of `keep_freed_memory`, and the page faults of the last of four equal rounds."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", ROUNDS, *arguments]
    done = subprocess.run(command, env={**own, **environment}, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.slow
def test_without_it_every_round_asks_the_system_for_all_its_memory() -> None:
    """Else the next test could not fail."""
    kept, faults = last_round()
    assert kept == "None"
    assert faults > PAGES / 2


def test_a_round_takes_the_memory_that_the_one_before_has_freed() -> None:
    kept, faults = last_round("keep")
    assert kept == "True"
    assert faults < PAGES / 50


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_what_the_user_has_set_for_it_stays(name: str) -> None:
    kept, faults = last_round("keep", **{name: "131072"})
    assert kept == "False"
    assert faults > PAGES / 2


@pytest.mark.slow
def test_large_memory_between_small_goes_back_when_it_is_freed() -> None:
    left = {}
    for gives_back in ("no", "yes"):
        command = [sys.executable, "-m", "support.freeing", gives_back]
        left[gives_back] = int(subprocess.run(command, env=importing_tests(), capture_output=True, check=True).stdout)
    assert left["no"] > 8 * SIZE  # how much stays depends on what the heap looked like before
    assert left["yes"] < SIZE
