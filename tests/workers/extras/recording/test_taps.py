"""Taps are written in a thread beside the compute loop, in order with snapshots, and nothing is lost in silence."""

import errno
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from stageline.pipeline import retry
from stageline.pipeline.plan import read_plan
from stageline.pipeline.retry import ResourceFault
from stageline.pipeline.schedule import Action, Kind
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.disk.tensor_file import publish_tensors, read_tensors
from stageline.workers.extras.recording.taps import KEY, TapFailed, TapWriter
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.progress import Progress
from support.workspace import Workspace

TAPS = ('taps.layers=["0", "1"]', "taps.every=2")


class TappedWorker:
    """Worker 0, which has all stages, with what a test looks at."""

    def __init__(self, workspace: Workspace, *sets: str) -> None:
        self.run = workspace.folder / "run"
        self.job: Job = prepare(read_plan(workspace.folder, sets=[*TAPS, *sets, "workers.0.stages=[0, 1]"]))
        self.notes: list[ResourceFault | None] = []
        self.writer = BackgroundWriter("test", limit=1, note=self.notes.append)
        self.executor = self.job.executor([0, 1])
        self.progress = Progress()
        self.taps = TapWriter(self.job, self.executor, self.run, self.writer, self.progress)
        self.carry_out = self.executor.within([self.taps])

    def forward(self, step: int = 0, microbatch: int = 0, *, evaluates: bool = False) -> torch.Tensor:
        """Of stage 0: what goes to stage 1."""
        action = Action(Kind.FORWARD, 0, microbatch)
        given = self.carry_out(self.job.program.instruction(step, action, evaluates=evaluates), [])
        assert isinstance(given, torch.Tensor)
        return given

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.run / "taps")) for path in self.run.rglob("*") if path.is_file())


def test_the_tapped_steps_are_written_and_no_others(workspace: Workspace) -> None:
    worker = TappedWorker(workspace)
    with worker.taps as taps:
        given = [worker.forward(step, 1) for step in range(4)]
        worker.forward(0, evaluates=True)
        taps.finish()
        assert worker.files() == ["about.json", "stage-0/step-0-1.safetensors", "stage-0/step-2-1.safetensors"]
        found = read_tensors(worker.run / "taps" / "stage-0" / "step-2-1.safetensors")
    assert [*found] == ["0", "1"]
    assert torch.equal(found["1"], given[2])
    assert torch.equal(found["0"].relu(), found["1"])


def test_evaluated_batches_are_counted_from_0(workspace: Workspace) -> None:
    worker = TappedWorker(workspace, "taps.evaluation=true", "taps.every=100")
    with worker.taps as taps:
        worker.forward(1, evaluates=True)
        taps.finish()
        assert worker.files() == ["about.json", "stage-0/evaluation-1-0.safetensors"]


def test_the_last_stages_worker_writes_samples_and_targets(workspace: Workspace) -> None:
    worker = TappedWorker(workspace)
    with worker.taps as taps:
        last = worker.job.program.instruction(0, Action(Kind.FORWARD, 1, 2))
        worker.carry_out(last, [worker.forward(0, 2)])
        taps.finish()
    assert worker.files() == ["about.json", "samples/step-0-2.safetensors", "stage-0/step-0-2.safetensors"]
    known = read_tensors(worker.run / "taps" / "samples" / "step-0-2.safetensors")
    assert torch.equal(known["targets"], worker.job.feed.microbatch(0, 2).targets)
    assert torch.equal(known["samples"], worker.job.feed.samples(0, 2))


def test_a_forward_that_raises_leaves_no_file_and_no_tap(workspace: Workspace) -> None:
    worker = TappedWorker(workspace)

    def fail(layer: object, inputs: object, output: object) -> None:
        raise ValueError("bad")

    worker.executor.stages[0]._body[1].register_forward_hook(fail)
    with worker.taps as taps:
        with pytest.raises(Exception, match="ValueError: bad"):
            worker.forward()
        taps.finish()
    assert worker.files() == ["about.json"]


def test_drafts_that_a_killed_worker_has_left_are_removed(workspace: Workspace) -> None:
    draft = workspace.folder / "run" / "taps" / "stage-0" / ".step-0-0.safetensors-5fa0c1d2"
    draft.parent.mkdir(parents=True)
    draft.touch()
    worker = TappedWorker(workspace)
    with worker.taps as taps:
        taps.finish()
    assert worker.files() == ["about.json"]


def test_a_file_that_is_written_again_has_the_same_bytes(workspace: Workspace) -> None:
    contents = []
    for _ in range(2):
        worker = TappedWorker(workspace)
        with worker.taps as taps:
            worker.forward()
            taps.finish()
        contents.append((worker.run / "taps" / "stage-0" / "step-0-0.safetensors").read_bytes())
    assert contents[0] == contents[1]


def test_what_was_tapped_before_a_snapshot_is_on_the_disk_when_that_is(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that begins at the snapshot does not compute it again. The disk is slow, and then fails for a while."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    gate, failing, found = threading.Event(), [True, True], []

    def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        assert gate.wait(30)
        if failing and failing.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        publish_tensors(path, tensors)

    monkeypatch.setattr("stageline.workers.extras.recording.taps.publish_tensors", write)
    worker = TappedWorker(workspace)
    with worker.taps as taps:
        worker.forward()
        worker.writer.submit(lambda: found.extend(worker.files()), 0, 1)  # as a snapshot is
        gate.set()
        taps.finish()
    assert found == ["about.json", "stage-0/step-0-0.safetensors"]
    faults = [note for note in worker.notes if note is not None]
    file = worker.run / "taps" / "stage-0" / "step-0-0.safetensors"
    assert {(fault.what, fault.reason) for fault in faults} == {(f"write {file}", "No space left on device")}
    assert worker.notes[-1] is None


def test_beyond_the_backlog_the_loop_waits_and_says_for_what(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageline.workers.extras.recording.taps.LONGEST_WRITE", 0.01)
    gate = threading.Event()
    worker = TappedWorker(workspace)
    worker.writer.grant(KEY, 300)  # a file is 2 rows of 8 numbers, twice
    with worker.taps, closing(worker.writer):
        assert worker.writer.flush(30)
        worker.writer.submit(lambda: gate.wait(30) and None)
        for microbatch in range(3):
            worker.forward(0, microbatch)
        assert worker.progress.writes == ""
        with pytest.raises(TapFailed, match=r"the disk is still busy after 0\.01 s"):
            worker.forward(2)
        gate.set()


def test_what_cannot_be_written_ends_the_run_and_is_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, tensors: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("stageline.workers.extras.recording.taps.publish_tensors", refuse)
    worker = TappedWorker(workspace)
    with worker.taps as taps:
        worker.forward()
        with pytest.raises(TapFailed, match=r"taps/stage-0/step-0-0.safetensors could not be written: .*denied"):
            taps.finish()
        with pytest.raises(TapFailed, match="step-0-0"):
            worker.forward(2)
