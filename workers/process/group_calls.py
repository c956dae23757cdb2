"""Calls of a group as bytes, from the leader to a member, through a socket. Nothing is unpickled.

size of the header (8 bytes) | header: the call's name, its arguments' structure, a form of each tensor | tensor 0 | ...
"""

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from stageline.broker.codec.message import buffer, pack, unpack
from stageline.broker.codec.structure import Structure, flatten, unflatten
from stageline.broker.codec.tensors import TensorHeader
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.snapshot import state_of, training_of
from stageline.workers.disk.tensor_file import decode_state, encode_state

Frames = Sequence[bytes | memoryview]

_SIZE = 8  # bytes that say how long a header is
_DEPTH = 64  # containers within containers: an optimizer's state is deep


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Header of a call. `state` is the place of the argument that is a stage's state, -1 if none is."""

    name: str
    structure: Structure
    tensors: list[TensorHeader]
    state: int


_headers = msgspec.msgpack.Decoder(_Header)


def encode_call(name: str, arguments: "Sequence[Tree | StageState]") -> Frames:
    """Return a call as bytes.

    Raises:
        Unsendable: An argument would not arrive unchanged.
        Unsaveable: A stage's state would not arrive unchanged.
    """
    trees = tuple(_tree_of(each) if isinstance(each, StageState) else each for each in arguments)
    state = next((place for place, each in enumerate(arguments) if isinstance(each, StageState)), -1)
    structure, tensors = flatten(trees, _DEPTH)
    packed = [pack(tensor) for tensor in tensors]
    header = msgspec.msgpack.encode(_Header(name, structure, [form for form, _ in packed], state))
    return [len(header).to_bytes(_SIZE, "little") + header, *(memory for _, memory in packed)]


def send_call(connection: socket.socket, frames: Frames) -> None:
    """Send an encoded call. Raises `OSError` if the member is gone."""
    for frame in frames:
        connection.sendall(frame)


def receive_call(connection: socket.socket) -> tuple[str, tuple[Any, ...]] | None:
    """Return the name and the arguments of the next call. Returns None if the leader is gone or has ended the group."""
    size = _read(connection, _SIZE)
    encoded = None if size is None else _read(connection, int.from_bytes(size, "little"))
    if encoded is None:
        return None
    header = _headers.decode(encoded)
    memories = [buffer(form) for form in header.tensors]
    if not all(_read_into(connection, memory) for memory in memories):
        return None
    tensors = map(unpack, header.tensors, memories)
    arguments: Any = unflatten(header.structure, iter(list(tensors)))
    places = enumerate(arguments)
    return header.name, tuple(_state_in(each) if place == header.state else each for place, each in places)


def _tree_of(state: StageState) -> Tree:
    tensors: dict[str, Any] = {}
    training = {name: encode_state(value, name, tensors) for name, value in training_of(state).items()}
    return {
        "weights": dict(state.weights),
        "averages": dict(state.averages),
        "training": training,
        "tensors": tensors,
    }


def _state_in(tree: Any) -> StageState:
    training = {name: decode_state(each, tree["tensors"]) for name, each in tree["training"].items()}
    return state_of(tree["weights"], tree["averages"], training)


def _read(connection: socket.socket, size: int) -> bytes | None:
    content = bytearray(size)
    return bytes(content) if _read_into(connection, memoryview(content)) else None


def _read_into(connection: socket.socket, memory: memoryview) -> bool:
    """Fill `memory` from the connection. Returns False if the connection ended before."""
    while memory:
        if not (count := connection.recv_into(memory)):
            return False
        memory = memory[count:]
    return True
