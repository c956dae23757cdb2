"""Records every byte that passes a proxy, so that a test can look for what should not be among them."""

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from support.proxy import Change, Proxy

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RECORDING = """
import sys
from pathlib import Path

from stageline.workers.process import worker

sys.path.append({tests!r})

from support.byte_tap import ByteTap

def _tapped(endpoint, broker, plain=worker.reachable):
    return ByteTap(plain(endpoint, broker), Path({folder!r})).endpoint

worker.reachable = _tapped
"""


class ByteTap(Proxy):
    """A proxy that writes each direction of each connection into a file of its own in `folder`."""

    _numbers = itertools.count()

    def __init__(self, target: str, folder: Path) -> None:
        self._folder = folder
        super().__init__(target)

    def _copy(self, source: socket.socket, sink: socket.socket, change: Change) -> None:
        with (self._folder / f"{os.getpid()}-{next(self._numbers)}").open("xb", buffering=0) as record:
            super()._copy(source, sink, _recorded(record.write, change))


def recorded(folder: Path) -> list[bytes]:
    """Bytes that each connection has carried, each way."""
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def found(folder: Path, needles: Iterator[bytes]) -> list[bytes]:
    """Those of the needles that some connection has carried."""
    streams = recorded(folder)
    return [needle for needle in needles if any(needle in stream for stream in streams)]


def rows_of(tensor: Tensor) -> Iterator[bytes]:
    """The bytes of each row, in every dtype in which it might travel."""
    for row in tensor.detach():
        yield from (bytes_of(row.to(dtype)) for dtype in (row.dtype, *DTYPES))


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _recorded(write: Callable[[bytes], object], change: Change) -> Change:
    def keep(passing: bytes) -> bytes:
        write(passing)
        return change(passing)

    return keep
