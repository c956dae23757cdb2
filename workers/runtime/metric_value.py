"""What a metric gives for the rows of a microbatch: one number."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from stageline.pipeline.tree import Tree, describe

Metric = Callable[[Tree, Tree], Tensor | float]


def metric_value(metric: Metric, outputs: Tree, targets: Tree) -> float:
    """Raises `ValueError` if `metric` returns no number, and whatever `metric` raises."""
    found: Any = metric(outputs, targets)
    if isinstance(found, Tensor) and found.numel() == 1:
        return float(found)
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(found, str):
            return float(found)
    what = f"{describe(found)}. Take its mean()" if isinstance(found, Tensor) else f"{found!r:.80}"
    raise ValueError(f"a metric must return one number, the mean over rows; it returned {what}")
