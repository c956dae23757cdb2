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
_pack_large: Callable[..., list[Any]] = PythonRespSerializer(UNCOPIED, lambda argument: argument).pack


class Exchange(msgspec.Struct, frozen=True):
    """Commands that are carried out together, and the function that takes their answers.

    `has_more`: what is asked next depends on them, so they must not be left unread.
    """

    unit: Unit
    receive: Callable[[list[Any]], None]
    has_more: bool = False


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
