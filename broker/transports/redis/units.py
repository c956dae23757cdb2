"""Commands for a Redis server, in units that are carried out as a whole, as bytes to send."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import hiredis
import msgspec

from redis.connection import PythonRespSerializer

Command: TypeAlias = tuple[bytes | memoryview, ...]
Unit: TypeAlias = Sequence[Command]  # commands that are carried out together, or none of them

UNCOPIED = 2**16  # bytes of an argument from which on it is sent without a copy

_BEGIN, _END = (b"MULTI",), (b"EXEC",)
_PACKED_BEGIN, _PACKED_END = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"
_pack_large: Callable[..., list[Any]] = PythonRespSerializer(UNCOPIED, lambda argument: argument).pack


class Exchange(msgspec.Struct, frozen=True):
    """Commands that are carried out together, and the function that takes their answers.

    `has_more`: what is asked next depends on them, so they must not be left unread. `packed`: the unit as it is sent,
    if that was made at once; then its commands are only named in `unit`, with their keys.
    """

    unit: Unit
    receive: Callable[[list[Any]], None]
    has_more: bool = False
    packed: Sequence[bytes | memoryview] | None = None


def pack_exchanges(exchanges: Sequence[Exchange]) -> Sequence[bytes | memoryview]:
    """The units of all the exchanges, as `pack` returns them."""
    if len(exchanges) == 1 and (packed := exchanges[0].packed) is not None:
        return packed
    chunks: list[bytes | memoryview] = []
    for exchange in exchanges:
        chunks += pack([exchange.unit]) if exchange.packed is None else exchange.packed
    return _merged(chunks)


def pack_together(commands: Sequence[Sequence[bytes | memoryview]]) -> Sequence[bytes | memoryview]:
    """The unit of commands that are packed already."""
    if len(commands) == 1:
        return commands[0]
    return _merged([_PACKED_BEGIN, *[chunk for command in commands for chunk in command], _PACKED_END])


def pack(units: Sequence[Unit]) -> list[bytes | memoryview]:
    """The units in Redis' own protocol. Large arguments are not copied; everything between them is in one piece."""
    chunks: list[bytes | memoryview] = []
    small: list[bytes] = []
    for unit in units:
        for command in unit if len(unit) == 1 else (_BEGIN, *unit, _END):
            if max(map(len, command)) > UNCOPIED:
                head, *middle, tail = _pack_large(*command)
                chunks += [b"".join([*small, head]), *middle]
                small = [tail]
            else:
                small.append(hiredis.pack_command(command))  # type: ignore[arg-type]  # typed for one argument
    return [*chunks, b"".join(small)]


def _merged(chunks: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The same bytes in few pieces: a system call for each would take longer than a copy of what is small."""
    merged: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for chunk in chunks:
        if len(chunk) > UNCOPIED:
            merged += (b"".join(small), chunk)
            small = []
        else:
            small.append(chunk)
    return [*merged, b"".join(small)]
