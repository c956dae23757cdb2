"""Matches a received gradient with the stashed outputs, leaf by leaf: same place, shape and dtype."""

from torch import Tensor

from stageline.pipeline.errors import GradientMismatch
from stageline.pipeline.tree import Leaf, Tree, describe, leaves


def matched(outputs: Tree, gradient: Tree, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that take part in backward, and their gradients. An output without a gradient takes no part.

    Raises `GradientMismatch`, which names `stage`, the gradient and the output.
    """
    if isinstance(outputs, Tensor) and _fits(outputs, gradient):
        return [outputs], [gradient]  # type: ignore[list-item]  # only a tensor fits
    found = {path: given for path, given in leaves(gradient) if given is not None}
    taking_part, gradients = [], []
    for path, output in leaves(outputs):
        given = found.pop(path, None)
        if given is None:
            continue
        if not _fits(output, given):
            raise _mismatch(stage, path, output, given)
        taking_part.append(output)
        gradients.append(given)
    for path, extra in found.items():
        raise _mismatch(stage, path, None, extra)
    return taking_part, gradients  # type: ignore[return-value]  # only tensors fit


def _fits(output: Leaf, gradient: Tree) -> bool:
    if not isinstance(output, Tensor) or not isinstance(gradient, Tensor) or not output.requires_grad:
        return False
    return gradient.shape == output.shape and gradient.dtype == output.dtype


def _mismatch(stage: int, path: str, output: Leaf, given: Leaf) -> GradientMismatch:
    return GradientMismatch(
        f"stage {stage} got a gradient of {describe(given)} for output{path}, which is {describe(output)}. "
        f"Wanted is the gradient with respect to the activation that the stage sent, of the same shape and dtype, "
        f"not the gradient of a weight: what the next stage's backward() returns."
    )
