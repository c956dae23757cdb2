"""Values that hold tensors, such as an optimizer's state, as JSON and named tensors.

    {"betas": (0.9, inf), "state": {0: {"step": <tensor>}}}
    {"betas": {"$tuple": [0.9, {"$float": "inf"}]},
     "state": {"$dict": [[0, {"step": {"$tensor": "optimizer.state.0.step"}}]]}}       <tensor> under that name

Decoded values are equal in value and type. Nothing is evaluated, and no class is looked up by a name in the data.

This is not the structure that travels with messages: that has no dict keys but strings, while optimizers number their
parameters; in JSON it would need these tags as well; and a manifest is there to be read by people.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stageline.workers.disk.tensor_file import Unsaveable

Json = Any  # None, bool, int, float, str, and lists and dicts of them

_EXACT = 2**53  # whole numbers up to here are the same in every reader of JSON


class BadStateTree(Exception):
    """The JSON is not what `encode_state` returns, or its tensors are missing."""


def encode_state(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    """`value` as JSON. Adds its tensors to `tensors`, named by their paths below `path`.

    Raises `Unsaveable` for anything but tensors, None, bool, int, float, str, and dicts, Counters, lists and tuples.
    """
    match value:
        case None | bool() | str() if type(value) in (type(None), bool, str):
            return value
        case Tensor():
            return {"$tensor": _named(value, path, tensors)}
        case int() if type(value) is int:
            return value if abs(value) <= _EXACT else {"$int": str(value)}
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        case list() if type(value) is list:
            return _items(value, path, tensors)
        case tuple() if type(value) is tuple:
            return {"$tuple": _items(value, path, tensors)}
        case dict() if type(value) in (dict, OrderedDict) and all(map(_is_plain, value)):
            return {key: encode_state(each, f"{path}.{key}", tensors) for key, each in value.items()}
        case dict() if isinstance(value, Counter) or type(value) in (dict, OrderedDict):
            pairs = [
                [encode_state(key, f"{path} (a key)", tensors), encode_state(each, f"{path}.{key}", tensors)]
                for key, each in value.items()
            ]
            return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
        case _:
            raise Unsaveable(f"{path} is of type {type(value).__module__}.{type(value).__qualname__}")


def decode_state(encoded: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode_state` has encoded. Raises `BadStateTree`."""
    match encoded:
        case list():
            return [decode_state(each, tensors) for each in encoded]
        case dict() if all(map(_is_plain, encoded)):
            return {key: decode_state(each, tensors) for key, each in encoded.items()}
        case dict():
            return _tagged(encoded, tensors)
        case _:  # JSON has no others: None, bool, int, float and str
            return encoded


def _tagged(encoded: dict[str, Json], tensors: Mapping[str, Tensor]) -> Any:
    match list(encoded.items()):
        case [("$tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("$int", str(digits))] if digits.removeprefix("-").isdecimal():
            return int(digits)
        case [("$float", "inf" | "-inf" | "nan" as name)]:
            return float(name)
        case [("$tuple", list(items))]:
            return tuple(decode_state(each, tensors) for each in items)
        case [("$dict" | "$counter" as tag, list(pairs))]:
            try:
                value = {decode_state(key, tensors): decode_state(each, tensors) for key, each in pairs}
            except (TypeError, ValueError) as error:
                raise _meaningless(pairs) from error
            return Counter(value) if tag == "$counter" else value
        case _:
            raise _meaningless(encoded)


def _named(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    while path in tensors:  # the keys 1 and "1" of one dict give the same path
        path += "'"
    tensors[path] = tensor
    return path


def _items(values: list[Any] | tuple[Any, ...], path: str, tensors: dict[str, Tensor]) -> list[Json]:
    return [encode_state(each, f"{path}.{place}", tensors) for place, each in enumerate(values)]


def _is_plain(key: object) -> bool:
    """Whether `key` can be one of a JSON object, and is not mistaken for a tag."""
    return isinstance(key, str) and not key.startswith("$")


def _meaningless(encoded: Json) -> BadStateTree:
    return BadStateTree(f"{str(encoded)[:200]} is no encoded value")
