"""A process's place in a group, where it meets the others before they compute a stage together."""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from stageline.pipeline.stage.stage import Stage
from stageline.workers.runtime.job import Job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DESCRIPTORS = "/proc/self/fd" if sys.platform.startswith("linux") else "/dev/fd"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


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

    def make(self, kind: Callable[..., Stage]) -> Stage:
        """This process's part of the stage, once all of them are there."""
        return self.job.stage(self.stage, device=self.device, mesh=self._join(), kind=kind)

    def _join(self) -> "DeviceMesh":
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
        distributed.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout),
        )
        return init_device_mesh(device.type, (self.size,))


def meeting_file() -> int:
    """A new file without a name, which members inherit: whatever ends when, nothing is left of it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("group")
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file
