"""A model, its data and its machine, as slow as the options say: layers, the source, links and the disk sleep.

Copied beside a plan, which imports it by its path.
"""

import sys
import time
from time import sleep

import torch
from torch import Tensor, nn

from stageline import Rows


class _Sleeps(torch.autograd.Function):
    """Sleeps for so many seconds in its forward, and for so many in its backward."""

    @staticmethod
    def forward(context, x, there, back):
        context.back = back
        sleep(there)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        sleep(context.back)
        return gradient, None, None


class SleepingLayer(nn.Module):
    """Scales its input; takes `seconds` forward, and twice as long backward."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleeps.apply(x * _Sleeps.apply(self.scale, 0.0, self.seconds), self.seconds, self.seconds)


def build(times, width=64, lag=0.0, rate=0.0, at=-1, disk=0.0, clock=0.0):
    """A layer for each stage; messages from worker `at` (all: -1) are late by `lag`, or pass at `rate` bytes/s.

    The clock of worker `at` is ahead by `clock` seconds.
    """
    if lag or rate or clock:
        _slow_link(lag, rate, at, clock)
    if disk:
        _slow_disk(disk)
    return nn.Sequential(*(SleepingLayer(each, width) for each in times))


class SlowRows(Rows):
    """Rows that take `seconds` to draw."""

    seconds = 0.0

    def batch(self, step):
        sleep(self.seconds)
        return super().batch(step)


def batches(batch_size, seed, width=64, seconds=0.0, held_out=0):
    generator = torch.Generator().manual_seed(seed)
    held = tuple(torch.randn(held_out, width, generator=generator) for _ in range(2)) if held_out else None
    seen = (torch.randn(4 * batch_size, width, generator=generator) for _ in range(2))
    rows = SlowRows(*seen, batch_size, seed, held_out=held)
    rows.seconds = seconds
    return rows


class SlowDataset(torch.utils.data.Dataset):
    """Samples of which each takes `seconds` to read."""

    def __init__(self, count, width, seconds):
        generator = torch.Generator().manual_seed(7)
        self.rows, self.seconds = torch.randn(count, width, generator=generator), seconds

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        sleep(self.seconds)
        return self.rows[index], self.rows[index]


def dataset(count=256, width=64, seconds=0.0):
    return SlowDataset(count, width, seconds)


def _slow_link(lag, rate, at, clock):
    from benchmarks.latency.delayed_link import DelayedLink
    from benchmarks.wires.link import SlowLink
    from stageline.pipeline.process.steady_clock import STEADY
    from stageline.workers.process import worker

    plain = worker.reachable

    def slowly(endpoint, broker):
        here = plain(endpoint, broker)
        index = sys._getframe(1).f_locals["assigned"].index
        if clock and index == at:
            time.time = lambda real=time.time: real() + clock
            STEADY.__init__(time.time)  # as if this process had begun with that clock
        if not here.startswith("tcp://") or at not in (-1, index):
            return here
        if rate:
            return SlowLink(rate, lag).before(here)
        return DelayedLink(here, lag).endpoint if lag else here

    worker.reachable = slowly


def _slow_disk(seconds):
    from stageline.workers.checkpoint.directory import SnapshotDirectory

    plain = SnapshotDirectory.write

    def slowly(self, snapshot):
        sleep(seconds)
        return plain(self, snapshot)

    SnapshotDirectory.write = slowly
