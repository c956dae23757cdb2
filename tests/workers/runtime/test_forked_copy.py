"""A process that the user's code forks does not return from that code."""

import subprocess
import sys

import pytest

COMES_BACK = """
import os, sys
from stageline.workers.runtime.forked_copy import without_copies

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
        ("sys.exit(2**70)", 0, []),
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


AROUND = """
try:
    raise KeyError("of the caller")
except KeyError:
    child = forward()
"""
BY_A_LIBRARY = """
import ctypes

inner = os.fork()  # a fork of which the line is known
if inner:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
os.fork = ctypes.CDLL(None).fork  # tells Python nothing
child = forward()
"""


def ended(calls: str) -> subprocess.CompletedProcess[str]:
    text = COMES_BACK.format(what="pass").replace("child = forward()\n", calls)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


def test_an_exception_that_the_caller_handles_is_not_of_the_copy() -> None:
    """The copy ended with that one's traceback, as if the user's code had raised it."""
    copy = ended(AROUND)
    assert (copy.returncode, copy.stdout) == (0, "0\n"), copy.stderr
    assert "was forked from pid" in copy.stderr
    assert "KeyError" not in copy.stderr


def test_the_line_of_an_earlier_fork_is_not_told_as_that_of_a_copy() -> None:
    copy = ended(BY_A_LIBRARY)
    assert (copy.returncode, copy.stdout) == (0, "0\n"), copy.stderr
    assert "was forked from pid" in copy.stderr
    assert ", line " not in copy.stderr
