"""A process that the user's code forks does not return from that code."""

import subprocess
import sys

import pytest

COMES_BACK = """
import os, sys
from stageline.workers.runtime.executor.forked_copy import without_copies

@without_copies
def forward():
    child = os.fork()
    if not child:
        {what}
    return child

child = forward()
assert child, "two processes go on"
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("pass", 0, ["forward (", "os._exit"]),
        ("os._exit(7)", 7, []),
        ("sys.exit()", 0, []),
        ("sys.exit(7)", 7, []),
        ("raise ValueError('odd')", 1, ["ValueError: odd"]),
        ("raise RuntimeError('stage 0 failed') from SystemExit(7)", 7, []),
    ],
)
def test_it_ends_where_it_would_return_and_says_so(what: str, status: int, said: list[str]) -> None:
    script = [sys.executable, "-c", COMES_BACK.format(what=what)]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"{status}\n"), ended.stderr
    assert [part for part in said if part not in ended.stderr] == []
    assert bool(said) == bool(ended.stderr)
