"""The loss of a step that may still be computed: its value is waited for when it is used."""

import math
from collections.abc import Callable


class StepLoss:
    """What `Line.step` returns. `item()`, `float(loss)`, `print(loss)` and `f"{loss:.4f}"` wait for it.

    A batch without rows has no loss: `item()` is None, `float(loss)` is nan. When it is there, the workers without the
    last stage may still compute the step. Reading it raises what ended the run before; what one of those workers raises
    later comes with a later call, or with `close`. Inline, the step is over when it is returned.
    """

    __slots__ = ("_found", "_wait")

    def __init__(self, wait: Callable[[], tuple[float | None, float | None]]) -> None:
        self._wait: Callable[[], tuple[float | None, float | None]] | None = wait
        self._found: tuple[float | None, float | None] = None, None

    def item(self) -> float | None:
        return self._measured()[0]

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients before they were clipped, for which it waits as for the loss; None without
        `clip_norm`."""
        return self._measured()[1]

    def _measured(self) -> tuple[float | None, float | None]:
        if self._wait is not None:
            self._found = self._wait()
            self._wait = None
        return self._found

    def __float__(self) -> float:
        value = self.item()
        return math.nan if value is None else value

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __str__(self) -> str:
        return str(self.item())

    def __repr__(self) -> str:
        return f"StepLoss({self.item()})"

    def __eq__(self, other: object) -> bool:
        return self.item() == (other.item() if isinstance(other, StepLoss) else other)

    def __lt__(self, other: "float | StepLoss") -> bool:
        return float(self) < float(other)

    def __gt__(self, other: "float | StepLoss") -> bool:
        return float(self) > float(other)

    __hash__ = None  # type: ignore[assignment]  # equal to a number, whose hash would need the value
