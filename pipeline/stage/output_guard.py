"""Makes a stage's outputs safe to send: detached, without memory shared with what will be written to.

A retained message must never change, but an update writes to weights, a forward to buffers, an in-place layer to its
input.
"""

from functools import partial

from torch import Tensor

from stageline.pipeline.errors import StageError
from stageline.pipeline.tree import Tree, leaves, map_tensors, tensors

from .body import Body
from .placing import copied


class OutputGuard:
    """Checks and copies the outputs of stage number `stage`. Notes where the weights and buffers of `body` lie."""

    def __init__(self, body: Body, stage: int) -> None:
        self._stage = stage
        self._owned = {_address(tensor) for tensor in (*body.parameters(), *body.buffers())} - {0}

    def sendable(self, tree: Tree, received: Tree) -> Tree:
        """`tree` detached, and copied where it shares memory with weights, buffers or what was `received`."""
        return map_tensors(partial(self._send, [_address(tensor) for tensor in tensors(received)]), tree)

    def refuse_aliases(self, output: Tree) -> None:
        """Raises `StageError` if two tensors of `output` share memory.

        They would arrive as two: an in-place layer would write to one of them only, and their gradients would be
        added up in another order.
        """
        seen: dict[int, str] = {}
        for path, leaf in leaves(output):
            if not isinstance(leaf, Tensor) or not leaf.numel():
                continue
            if (first := seen.setdefault(leaf.data_ptr(), path)) != path:
                raise StageError(
                    f"stage {self._stage} returns the same memory twice, as output{first} and output{path}: send one, "
                    f"and derive the other in the next stage; or clone it"
                )

    def _send(self, taken: list[int], tensor: Tensor) -> Tensor:
        detached = tensor.detach()
        address = _address(detached)
        if address and (address in taken or address in self._owned):
            detached = copied(detached)
        return detached.requires_grad_() if tensor.requires_grad else detached


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
