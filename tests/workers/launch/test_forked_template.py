"""A template that is a fork of this process: it has this process's objects, and there is no other of it."""

import os
import signal
from pathlib import Path

import pytest

from stageline.pipeline.model.object_names import OBJECTS
from stageline.workers.launch.template import ForkedTemplate

pytestmark = pytest.mark.slow


def test_what_it_forks_has_the_objects_of_this_process(monkeypatch, tmp_path):
    class Refusing:
        """A plan that tells who reads it."""

        def __getattr__(self, name: str) -> object:
            raise OSError(f"read in process {os.getpid()}")

    monkeypatch.setitem(OBJECTS, "plan", Refusing())
    with ForkedTemplate() as template, (tmp_path / "log").open("a") as log:
        worker = template(["worker", "script:plan", "--spare"], log)
        assert worker.wait(60) == worker.result == 1
    assert (tmp_path / "log").read_text() == f"stageline: read in process {worker.pid}\n"


def test_it_is_not_started_again(tmp_path):
    with ForkedTemplate() as template, (tmp_path / "log").open("a") as log:
        template.warm()
        before = template.pid
        assert template.gone == ""
        os.kill(before, signal.SIGKILL)
        worker = template(["worker", "--help"], log)
        assert (worker.wait(60), worker.result, worker.pid) == (1, None, 0)
        template.warm()
        reason = "the process that has the script's model and functions (pid {}) was killed by SIGKILL"
        assert template.gone == f"{reason.format(before)}, and no other has them"
        assert template.pid == before
    assert template.gone in Path(log.name).read_text()
