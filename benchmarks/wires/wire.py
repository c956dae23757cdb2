"""The interface of a wire that is measured."""

from types import TracebackType
from typing import Protocol, Self

from torch import Tensor


class Wire(Protocol):
    """One end of a connection between two processes that carries float32 vectors of one size."""

    def send(self, tensor: Tensor) -> None: ...

    def receive(self) -> Tensor:
        """The next tensor, waiting for it; its memory may be written again some messages later."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
