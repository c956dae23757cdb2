"""A process learns that the one which started it is gone, and ends even if its code hangs."""

import subprocess
import sys
from contextlib import closing

import pytest

from stageline.pipeline.process.lifeline import Lifeline, LifelineOwner

HANGS = """
import sys, time
from stageline.pipeline.process.lifeline import Lifeline
Lifeline(int(sys.argv[1])).end_process_when_cut(after=0.01)
print("hangs", flush=True)
while True:
    time.sleep(60)
"""

FORKS = """
import os, signal, time
from stageline.pipeline.process.lifeline import Lifeline, LifelineOwner
owner = LifelineOwner()
if not (forked := os.fork()):
    signal.pause()
owner.leave_to_parent()
while not Lifeline(owner.end).cut:  # the process that was forked closes its copy first of all
    assert os.waitpid(forked, os.WNOHANG) == (0, 0)
os.kill(forked, signal.SIGKILL)
os.wait()
"""


def test_it_is_cut_when_its_owner_is_killed() -> None:
    with closing(LifelineOwner()) as owner:
        lifeline = Lifeline(owner.end)
        assert (lifeline.supervised, lifeline.cut) == (True, False)
        owner.leave_to_parent()
        assert lifeline.cut


def test_a_process_that_is_forked_does_not_keep_it() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKS]) as process:
        assert process.wait() == 0


def test_a_process_whose_code_hangs_ends_once_it_is_cut() -> None:
    with closing(LifelineOwner()) as owner:
        command = [sys.executable, "-c", HANGS, str(owner.end)]
        with subprocess.Popen(command, pass_fds=[owner.end], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert process.poll() is None
            owner.leave_to_parent()
            assert process.wait() == 1


def test_a_process_that_was_started_by_hand_has_none() -> None:
    assert (Lifeline().supervised, Lifeline().cut) == (False, False)


def test_a_descriptor_that_is_not_open_is_refused() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Lifeline(9999)
