"""In which precision a stage computes: with autocast, operations that gain by it take bfloat16.

    forward    in the context: layers, and the loss
    backward   outside of it, as torch recommends: each operation in the dtype that its forward had

Without the cache of weights that were cast, which would add up a weight's gradients in bfloat16 as far as its uses are
in one stage: the bits would follow from the cut.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch

Autocast = Literal["bf16"]
Precision = Callable[[], AbstractContextManager[object]]  # a context for one forward


def precision_of(autocast: Autocast | None, device: torch.device) -> Precision:
    """The context of each forward, on `device`; one that does nothing without `autocast`."""
    if autocast is None:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16, cache_enabled=False)
