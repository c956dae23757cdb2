"""Errors of a script whose run fails."""

import copy
from pathlib import Path

from stageline.pipeline.errors import ExitCode
from stageline.workers.errors import RunFailed


def test_a_failed_run_is_handed_on_as_it_is():
    """`copy` goes the way of `pickle`, by which a pool of processes hands an exception on."""
    failed = RunFailed("worker 1 failed", ExitCode.FAILED, Path("runs/one"))
    same = copy.copy(failed)
    assert same is not failed
    assert (type(same), str(same)) == (RunFailed, "worker 1 failed (the logs are in runs/one) [SL501]")
    assert (same.exit_code, same.folder) == (ExitCode.FAILED, Path("runs/one"))
