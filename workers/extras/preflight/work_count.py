"""Counts how long operations compute, in nanoseconds at fixed rates: by what they multiply and by the bytes they touch.

Not by a clock: what follows from it must be the same on a machine that is busy. A forward that runs again counts as
often as it runs.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stageline.pipeline.tree import tensors

FLOPS = 20.0  # floating point operations of a thread in a nanosecond
TOUCHED = 5.0  # bytes that a process reads and writes in a nanosecond


class WorkCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`nanoseconds`: of the operations in this context, entered once or several times, on `threads` threads."""

    def __init__(self, threads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nanoseconds = 0.0
        self._threads = threads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            known = flop_registry.get(func.overloadpacket)
            flops = 0 if known is None else known(*args, **kwargs, out_val=result)
            touched = sum(each.nbytes for each in _tensors([*args, *kwargs.values(), result]))
            self.nanoseconds += max(flops / FLOPS / self._threads, touched / TOUCHED)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tensors(values) if each.layout is torch.strided]
