"""pyzmq alone: a PAIR socket, the tensor's bytes as the whole message, received into tensors that exist already."""

from itertools import cycle
from types import TracebackType
from typing import Self

import torch
import zmq
from torch import Tensor

from benchmarks.measuring.processes import PATIENCE

IN_FLIGHT = 8  # messages either side may hold; as many tensors take turns receiving


def open_wire(url: str, end: int, nbytes: int) -> "BareWire":
    return BareWire(url.replace("shm://", "ipc://"), end, nbytes)


class BareWire:
    """End 0 binds `url`, end 1 connects to it."""

    def __init__(self, url: str, end: int, nbytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.hwm = IN_FLIGHT
        self._socket.rcvtimeo = self._socket.sndtimeo = self._socket.linger = int(1000 * PATIENCE)
        (self._socket.connect if end else self._socket.bind)(url)
        self._memory = cycle([torch.empty(nbytes // 4) for _ in range(IN_FLIGHT)])

    def send(self, tensor: Tensor) -> None:
        self._socket.send(tensor.numpy().data, copy=False)

    def receive(self) -> Tensor:
        tensor = next(self._memory)
        self._socket.recv_into(tensor.numpy().data)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()
