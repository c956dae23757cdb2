"""A process's place in a group, where it meets the others before they compute a stage together."""

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
    """Calls `function` by another thread; whether it has returned. Once `left()`, that thread is left where it is: what
    waits in a library cannot be ended. Raises what `function` raises."""
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
    """Number `rank` of the `size` processes that compute `stage`. They meet by the open file `store`, and wait
    `timeout` seconds for each other at most."""

    job: Job
    stage: int
    rank: int
    size: int
    store: int
    timeout: float

    @property
    def device(self) -> str:
        """The plan's device is the first process's; those of the others follow it."""
        device = torch.device(self.job.device_of(self.stage))
        return str(device) if device.type == "cpu" else f"{device.type}:{(device.index or 0) + self.rank}"

    def make(self, watched: Callable[[Callable[[], None]], None] = _call) -> Stage:
        """Return this process's part of the stage, once all processes are there. `watched` calls what waits for
        them."""
        return self.job.stage(self.stage, device=self.device, mesh=self._join(watched))

    def _join(self, watched: Callable[[Callable[[], None]], None]) -> "DeviceMesh":
        """Nothing listens at other addresses than loopback, unless the environment says so."""
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
    """A new file without a name, which members inherit: whatever ends when, nothing is left of it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("group")
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file
