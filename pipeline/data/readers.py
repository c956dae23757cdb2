"""Processes that draw batches ahead of their use, in the order of the steps.

              step to draw                  batch
    Readers ──── 7, 9, ... ───> reader 0 ──────────> 7, 9, ...
            ──── 8, 10, ... ──> reader 1 ──────────> 8, 10, ...

Readers are forks of this process, since forks have the dataset as it is, also one that was defined in a notebook, and
are at work in milliseconds. This process may have threads: like torch's own readers, readers need none of them.

Readers are forked with the first batch and serve all epochs. Asking for another step than the next one discards the
batches drawn ahead. If a reader dies, others draw again what it had, with the same bits.

A batch travels as bytes. Nothing is unpickled.

    size of the header (8 bytes) | header: the batch, forms in place of tensors | memory of tensor 0 | of tensor 1 | ...
"""

import ctypes
import errno
import os
import signal
import socket
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import msgspec
import torch

from stageline.pipeline.data.batch import Batch
from stageline.pipeline.errors import DataError, describe_error
from stageline.pipeline.process.child import Fork
from stageline.pipeline.retry import passing_fault
from stageline.pipeline.tree import Tree, tensors

_SIZE = 8  # bytes that say how long a header is
_TENSOR = 1  # the code of a tensor's form

Frames: TypeAlias = list[bytes | memoryview]

_forms = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], tuple[int, ...]])


class Ended(Exception):
    """The process at the other end is gone."""


def encode(content: Tree) -> Frames:
    """Return the bytes of a tree of dense tensors on the CPU, whose memory is not copied."""
    header = msgspec.msgpack.encode(content, enc_hook=_form_of)
    return [len(header).to_bytes(_SIZE, "little") + header, *map(_memory, tensors(content))]


def send(connection: socket.socket, frames: Frames) -> None:
    """Send `frames`. Raises `OSError` if the other end is gone."""
    for frame in frames:
        connection.sendall(frame)


def receive(connection: socket.socket) -> Tree:
    """Return the tree that was sent; sequences are tuples. Raises `Ended`, or `OSError`, if the other end is gone."""
    header = _read(connection, int.from_bytes(_read(connection, _SIZE), "little"))
    content = _with_tuples(msgspec.msgpack.decode(header, ext_hook=_empty))
    for tensor in tensors(content):
        _read_into(connection, _memory(tensor))
    return content


def _form_of(tensor: torch.Tensor) -> msgspec.msgpack.Ext:
    form = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(form))


def _empty(code: int, form: memoryview) -> torch.Tensor:
    dtype, shape, strides = _forms.decode(form)
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))


def _with_tuples(content: object) -> Tree:
    if isinstance(content, list):
        return tuple(_with_tuples(part) for part in content)
    if isinstance(content, dict):
        return {name: _with_tuples(part) for name, part in content.items()}
    return content  # type: ignore[return-value]  # a leaf


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor, in the order in which they lie."""
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(b"")
    held = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    held.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(held).cast("B")


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    _read_into(connection, memoryview(content))
    return bytes(content)


def _read_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        if not (count := connection.recv_into(memory)):
            raise Ended
        memory = memory[count:]


AHEAD = 2  # steps that each reader has been asked for
_STEP = 8  # bytes of a request
_EXIT_TIMEOUT = 1.0  # seconds for a process that has closed its connection to be over
_WAYS_OUT = {
    signal.SIGKILL: "That is how a system without memory ends processes: use fewer num_workers, or smaller batches",
    signal.SIGTERM: "Find what ends it, or use num_workers = 0",
}
_CRASHED = "A library that the dataset calls has crashed: num_workers = 0 draws in this process, and shows where"
_EXITED = "Its code has ended the process: num_workers = 0 draws in this process, and shows where"


class ReaderDied(Exception):
    """A reader process ended by itself. `way_out` says how to prevent it."""

    def __init__(self, pid: int, status: int) -> None:
        """Describe the end of process `pid` with the return code `status`, negative for a signal."""
        killed = status < 0
        how = f"was killed by {signal.Signals(-status).name}" if killed else f"ended with status {status}"
        super().__init__(f"reader process {pid} of the loader {how}")
        self.way_out = _WAYS_OUT.get(signal.Signals(-status), _CRASHED) if killed else _EXITED


class Reader:
    """A process that draws the batches it is asked for, forked from this one.

    Any other exception than `DataError` in one of its methods ends its use.
    """

    def __init__(self, draw: Callable[[int], Batch]) -> None:
        """Fork the process, which calls `draw` with a step. Raises `OSError` if there can be none."""
        self.connection, theirs = socket.socketpair()
        self._asked = 0  # batches that have not come yet
        self._stale = 0  # of them, the first ones, which are not wanted any more
        with theirs:
            self._process = Fork(partial(_serve, draw, self.connection, theirs), dies_with_parent=True)

    def ask_for(self, step: int) -> None:
        """Ask for the batch of `step`, which comes after those asked for before. Raises `ReaderDied`."""
        self._asked += 1
        with self._expected_to_live():
            self.connection.sendall(step.to_bytes(_STEP, "little"))

    def forget(self) -> None:
        """Discard the batches that were asked for so far."""
        self._stale = self._asked

    def batch(self) -> Batch:
        """Return the next batch that is wanted.

        Raises:
            DataError: The batch could not be drawn.
            ReaderDied: The process has ended.
        """
        while self._stale:
            self._receive()
            self._stale -= 1
        match self._receive():
            case (str(fault), int(number)):
                raise DataError(fault) from (OSError(number, os.strerror(number)) if number else None)
            case (None, (inputs, targets)):
                return inputs, targets
            case other:
                raise TypeError(f"a reader process sent {type(other).__name__}")

    def kill(self) -> None:
        """End the process at once."""
        self.connection.close()
        self._process.end()

    def _receive(self) -> Tree:
        with self._expected_to_live():
            content = receive(self.connection)
        self._asked -= 1
        return content

    @contextmanager
    def _expected_to_live(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Ended):
            self._process.end(_EXIT_TIMEOUT)
            raise ReaderDied(self._process.pid, self._process.returncode or 0) from None


def _serve(draw: Callable[[int], Batch], asking: socket.socket, requests: socket.socket) -> int:
    """Draw the requested batches until the other end of `requests`, `asking`, is closed; return the exit code."""
    asking.close()
    os.register_at_fork(after_in_child=requests.close)  # a fork by the user's code neither sends nor holds it open
    torch.set_num_threads(1)
    try:
        while request := requests.recv(_STEP, socket.MSG_WAITALL):
            send(requests, _drawn(draw, int.from_bytes(request, "little")))
            sys.stdout.flush()
    except OSError:  # the other end is gone, or this is such a fork
        pass
    return 0


def _drawn(draw: Callable[[int], Batch], step: int) -> Frames:
    """Return `(None, batch)` encoded, or the error's text with the number of a system fault that may pass, else 0."""
    try:
        return encode((None, draw(step)))
    except DataError as error:
        return encode((str(error), _passing(error)))
    except BaseException as error:  # noqa: BLE001  # what no frame can hold, or no memory
        text = f"the batch of step {step} cannot be handed over: {describe_error(error)}"
        return encode((text, _passing(error)))


def _passing(error: BaseException) -> int:
    fault = passing_fault(error)
    return 0 if fault is None else getattr(fault, "errno", None) or errno.ENOMEM


class Readers:
    """A group of processes that draw batches ahead. Readers start with the first batch."""

    def __init__(self, draw: Callable[[int], Batch], count: int) -> None:
        """Prepare for `count` processes that call `draw`, which gives the batch of a step or raises `DataError`."""
        self._draw = draw
        self._count = count
        self._next = 0  # the step whose batch comes next
        self._readers: list[Reader] = []
        _all.add(self)

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`. Raises `DataError` as `draw` does, or if readers die one after the other."""
        try:
            return self._read(step)
        except ReaderDied as died:
            warnings.warn(f"{died}. What it had is drawn again.", RuntimeWarning, stacklevel=3)
        try:
            return self._read(step)
        except ReaderDied as died:
            raise DataError(f"{died}; so did the one before it. {died.way_out}.") from None

    def close(self) -> None:
        """End the processes; the next batch starts others. In a forked process, leave them to its parent."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.kill()

    def __del__(self) -> None:
        """End the processes."""
        self.close()

    def _read(self, step: int) -> Batch:
        try:
            if not self._readers or step != self._next:
                self._begin_at(step)
            self._next = step + 1
            reader = self._readers[step % self._count]
            reader.ask_for(step + AHEAD * self._count)
            return reader.batch()
        except DataError:
            raise
        except BaseException:  # Ctrl-C too: half a batch may be left in the connection
            self.close()
            raise

    def _begin_at(self, step: int) -> None:
        while len(self._readers) < self._count:
            self._readers.append(Reader(self._draw))
        for reader in self._readers:
            reader.forget()
        for ahead in range(step, step + AHEAD * self._count):
            self._readers[ahead % self._count].ask_for(ahead)


_all: "weakref.WeakSet[Readers]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for readers in list(_all):
        readers.close()


os.register_at_fork(after_in_child=_leave_all_to_parent)
