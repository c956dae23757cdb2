"""Distinctions in a group of processes: whether another process is behind an error, and who has ended."""

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from stageline.pipeline.errors import GroupLost
from stageline.pipeline.features.offload import Offload
from stageline.pipeline.plan import read_plan
from stageline.pipeline.process.child import Fork
from stageline.workers.process.group import StageGroups, _is_of_group
from stageline.workers.runtime.job import Job, prepare
from support import reference

GROUPED = Path(reference.__file__).parent / "grouped" / "stageline.toml"


def test_a_process_that_does_not_come_to_the_meeting_is_behind_its_timeout(tmp_path: Path) -> None:
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError) as waited:
        store.wait(["another process"], timedelta(milliseconds=10))
    assert _is_of_group(waited.value)


def test_an_error_of_user_code_is_not_of_the_group() -> None:
    assert not _is_of_group(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_member_that_ends_before_they_have_met_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The leader waited in gloo, which dialled the member for 40 s; here it would wait for a day."""
    meet = distributed.init_process_group

    def end_or_meet(*arguments: Any, rank: int, **options: Any) -> None:
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(*arguments, rank=rank, **options)

    monkeypatch.setattr(distributed, "init_process_group", end_or_meet)
    job = prepare(read_plan(GROUPED, sets=["stage.1.shard=2", "recovery.action=86400"], environment={}))
    with (tmp_path / "log").open("w") as log:
        leader = Fork(lambda: _lead(job), log.fileno())
        try:
            assert leader.wait(60) == 7
        finally:
            leader.kill()
    assert re.search(
        r"stage 1 is lost: its process 1 \(pid \d+\) was killed by SIGKILL", (tmp_path / "log").read_text()
    )


def _lead(job: Job) -> int:
    with StageGroups(job) as groups:
        try:
            groups.make(1, Offload())
        except GroupLost as error:
            print(error)
            return 7
    return 0
