"""Finds tensors that would cross a cut twice: two values of a graph in one memory, such as one and a view of it.

A stage refuses to send them (`pipeline/stage/layers/memory.py`). While torch.export traces, each of its stand-ins for
a tensor has a stand-in for its memory, too, which views share.
"""

import re
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from stageline.pipeline.code_lines import CodeLine, users_line

_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')


def one_memory(nodes: Sequence[Node]) -> str:
    """The first two of `nodes` of which tensors begin at one address, for an error; "" if there are none."""
    seen: dict[tuple[int, str], Node] = {}
    for node in nodes:
        for place in _places(node):
            if (first := seen.setdefault(place, node)) is not node:
                return f"{_shown(first)} and {_shown(node)}"
    return ""


def _places(node: Node) -> Iterator[tuple[int, str]]:
    """Where the node's tensors begin. An offset may be a formula, of the number of rows."""
    found = node.meta.get("val")
    for value in found if isinstance(found, tuple | list) else (found,):
        if isinstance(value, torch.Tensor) and torch._C._has_storage(value):
            yield value.untyped_storage()._cdata, str(value.storage_offset())


def _shown(node: Node) -> str:
    """`view.default in forward (/home/anna/net/model.py, line 12)`: the operator, and the user's line."""
    name = f"the input {node.name}" if node.op == "placeholder" else str(getattr(node.target, "__name__", node.target))
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    line = users_line(CodeLine(file, int(number), function) for file, number, function in reversed(frames))
    return f"{name} in {line}" if line else name
