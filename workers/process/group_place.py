"""Place of a process in a group, where it meets the others before they compute a stage together."""

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from stageline.pipeline.stage.stage import Stage
from stageline.workers.runtime.job import Job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DESCRIPTORS = "/proc/self/fd" if sys.platform.startswith("linux") else "/dev/fd"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
_LOOK = 0.01  # seconds between two looks whether a call that may be left is to be left


def _call(function: Callable[[], None]) -> None:
    function()


def call_unless(left: Callable[[], bool], function: Callable[[], None]) -> bool:
    """Call `function` in another thread, and return True if it has returned.

    Once `left()` is true, False is returned and the thread stays where it is: a thread that waits in a library cannot
    be ended. Raises any error that `function` raises.
    """
    raised: list[BaseException] = []
    thread = threading.Thread(target=_keeping, args=(function, raised), name="group", daemon=True)
    thread.start()
    while thread.is_alive() and not left():
        thread.join(_LOOK)
    for error in raised:
        raise error
    return not thread.is_alive()


def _keeping(function: Callable[[], None], raised: list[BaseException]) -> None:
    try:
        function()
    except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
        raised.append(error)


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Place of one process in the group that computes a stage.

    Attributes:
        job: Job of the run.
        stage: Number of the stage's copy.
        rank: Number of the process in the group. The leader has 0.
        size: Number of processes in the group.
        store: Descriptor of the open file by which the processes meet.
        timeout: Seconds that the processes wait for each other at most.
    """

    job: Job
    stage: int
    rank: int
    size: int
    store: int
    timeout: float

    @property
    def device(self) -> str:
        """Device of the process: the plan's for the first process, the following devices for the others."""
        device = torch.device(self.job.device_of(self.stage))
        return str(device) if device.type == "cpu" else f"{device.type}:{(device.index or 0) + self.rank}"

    def make(self, watched: Callable[[Callable[[], None]], None] = _call) -> Stage:
        """Return this process's part of the stage, once all processes have met.

        Args:
            watched: Calls the function that waits for the other processes.
        """
        return self.job.stage(self.stage, device=self.device, mesh=self._join(watched))

    def _join(self, watched: Callable[[Callable[[], None]], None]) -> "DeviceMesh":
        """Meet the other processes. Sockets listen on loopback only, unless the environment names other interfaces."""
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _LOOPBACK)
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.backends.mha.set_fastpath_enabled(False)  # it takes weights, and would not gather what is split
        store = distributed.FileStore(f"{_DESCRIPTORS}/{self.store}", self.size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self.timeout))
        watched(
            partial(
                distributed.init_process_group,
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout),
            )
        )
        return init_device_mesh(device.type, (self.size,))


def meeting_file() -> int:
    """Return the descriptor of a new file without a name, which members inherit.

    Whichever process ends first, nothing is left of the file.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("group")
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file
