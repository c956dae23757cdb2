"""The process that is kept ready, with real processes."""

import signal

from stageline.workers.launch.prefork import Prefork


def test_the_prepared_process_becomes_the_worker_that_is_started_next(tmp_path):
    with Prefork() as prefork, (tmp_path / "log").open("a") as log:
        prefork.fill()
        used = prefork(["worker", "--help"], log)
        assert used.wait(60) == 0
        assert "stageline.workers.cli.prepared" in used.args
        prefork.fill()
        killed = prefork._ready
        killed.kill(), killed.wait()
        other = prefork(["worker", "--help"], log)
        assert other.wait(60) == 0
        prefork.fill()
        unused = prefork._ready
    assert unused.returncode == -signal.SIGKILL
    assert (tmp_path / "log").read_text().count("Usage: stageline worker") == 2
