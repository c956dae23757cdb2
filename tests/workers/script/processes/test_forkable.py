"""A process that has what no fork can use is refused, and says what can be done."""

import ctypes
import threading

import pytest
import torch

from stageline.pipeline.model.layered.apart import has_backward_threads
from stageline.workers.script.processes.launcher import CannotFork, demand_forkable, gpu_obstacle

_SET_NAME = 15  # of prctl(2)


def test_a_process_that_has_computed_in_parallel_can_be_forked(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(2**20).exp()
    torch.set_num_threads(before)
    demand_forkable()


def test_a_process_that_uses_a_gpu_cannot_be_forked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(CannotFork, match=r'it has used torch\.cuda, .* workers="inline"'):
        demand_forkable()


def test_a_process_with_torchs_threads_for_backwards_on_gpus_cannot_be_forked():
    named, leave = threading.Event(), threading.Event()

    def stay() -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, b"pt_autograd_0", 0, 0, 0)
        named.set()
        leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    named.wait()
    try:
        assert has_backward_threads()
        with pytest.raises(CannotFork, match="a backward has run in it on a machine with a GPU"):
            demand_forkable()
    finally:
        leave.set()
        thread.join()


def test_a_fork_of_a_script_that_has_asked_for_gpus_is_told_before_a_worker_needs_one(monkeypatch):
    assert gpu_obstacle(["cpu", "cuda:0"]) == ""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert gpu_obstacle(["cpu"]) == ""
    assert "no worker can use cuda:0: the script has asked for GPUs" in gpu_obstacle(["cpu", "cuda:0"])
