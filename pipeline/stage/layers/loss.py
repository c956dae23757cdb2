"""The loss of a batch or a microbatch: one number, the mean over its rows.

With autocast, operations that gain by it take bfloat16:

    forward    in the context: layers, and the loss
    backward   outside of it, as torch recommends: each operation in the dtype that its forward had

The cache of weights that were cast is off. It would add up a weight's gradients in bfloat16 as far as its uses are in
one stage, so the bits would follow from the cut.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import Node

from stageline.pipeline.errors import LossNotScalar, ModelRefused, StageError
from stageline.pipeline.tree import Tree, describe, describe_values, tensors

from .passage import LOSS, Passage, Run

Loss = Callable[[Any, Any], torch.Tensor]
Autocast = Literal["bf16"]
Compute = Callable[..., Any]


def scalar_loss(function: Loss, output: Tree, target: Tree) -> torch.Tensor:
    """Return the loss that `function` computes from `output` and `target`, 0-dimensional.

    Args:
        function: The loss function.
        output: Output of the last stage.
        target: Target of the rows.

    Raises:
        LossNotScalar: `function` returned something else. Exceptions of `function` pass.
    """
    loss = function(output, target)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        # `loss.backward()` takes one number of any shape, too. A reshape adds a node to the graph: only where needed.
        return loss.reshape(()) if loss.dim() else loss
    raise LossNotScalar(
        f"the loss must be one number (a 0-dimensional tensor, the mean over rows); "
        f"it returned {describe(loss)}. "
        f"Use reduction='mean', or take its mean()."
    )


def demand_mean(loss: Loss) -> None:
    """Raise `ModelRefused` for a loss of torch that is known to return a sum over rows, not their mean."""
    options = loss.keywords if isinstance(loss, partial) else vars(loss) if isinstance(loss, torch.nn.Module) else {}
    if options.get("reduction") == "sum":
        raise ModelRefused(
            'the loss has reduction = "sum": a batch is cut into microbatches, and its loss is the mean of theirs, '
            'weighted by their rows, so a sum would be divided by their number. Use reduction = "mean"'
        )


def demand_own(loss: torch.Tensor, ends: Iterable[Node | None], own: Collection[int]) -> None:
    """Raise `StageError` if `loss` depends on parameters that its stage does not train: nothing would train them.

    Args:
        loss: The loss.
        ends: Nodes of the model's output, in which the model's own graph ends.
        own: Ids of the parameters that the stage trains.
    """
    for leaf in _leaves_of(loss, ends):
        if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in own:
            raise StageError(
                f"the loss has a gradient for a parameter, {describe(leaf)}, that is not of this stage, and no stage "
                f"gets it: the loss of a run depends on the model's output alone. Return what it needs of other layers "
                f"from the model's forward; make a parameter of the loss one of the model's last layer; or detach() it"
            )


def _leaves_of(loss: torch.Tensor, ends: Iterable[Node | None]) -> Iterator[torch.Tensor]:
    """Yield the tensors that accumulate a gradient of `loss` otherwise than through the nodes `ends`."""
    if loss.is_leaf:
        yield loss
    seen, stack = {*ends}, [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if before := node.next_functions:
            stack += [each for each, _ in before]
        elif node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]


def demand_gradient(loss: torch.Tensor) -> None:
    """Raise `StageError` if `loss` has no gradient: `loss.backward()` of the unsplit model would raise, too."""
    if not loss.requires_grad:
        raise StageError(
            "the loss has no gradient, so nothing would be trained: between the weights and the loss there is a "
            "detach(), a no_grad(), or an operation without a derivative such as argmax(); or the loss function "
            "returned a constant. For a microbatch that is not to count, return (output * 0).sum()"
        )


def in_precision(autocast: Autocast | None, device: torch.device, compute: Compute) -> Compute:
    """Return `compute` in the precision of `autocast`; `compute` itself if `autocast` is None.

    Args:
        autocast: "bf16" or None.
        device: Device of the computation.
        compute: A forward or a loss.
    """
    if autocast is None:
        return compute

    def computed(*given: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            return compute(*given)

    return computed


def loss_of(
    index: int,
    loss: Loss | None,
    precise: Callable[[Callable[..., Any]], Callable[..., Any]],
    here: Callable[[Tree], Tree],
    note: Callable[..., object],
    own: Collection[int] = (),
) -> Callable[[Tree, Tree], torch.Tensor]:
    """Return the function that computes the loss of an output and a target on one stage.

    Args:
        index: Number of the stage. Without a loss, the returned function raises `StageError` that names it.
        loss: The loss function; None on a stage other than the last.
        precise: Wraps the computation in the precision of the run.
        here: Moves the target to the stage's device.
        note: Called with "the loss" before each computation; if that fails, also with what it was given.
        own: Ids of the parameters that the stage trains.

    Raises:
        ModelRefused: The loss is no mean over rows.
    """

    def missing(output: Tree, target: Tree) -> torch.Tensor:
        raise StageError(f"stage {index} has no loss: only the last stage has one")

    if loss is None:
        return missing
    demand_mean(loss)
    compute = precise(partial(scalar_loss, loss))

    def computed(output: Tree, target: Tree) -> torch.Tensor:
        note(LOSS)
        ends = [each.grad_fn for each in tensors(output)]  # a loss may write to the output
        try:
            found: torch.Tensor = compute(output, here(target))
        except Exception:
            note(LOSS, f"outputs {describe_values(output)} and targets {describe_values(target)}")
            raise
        demand_own(found, ends, own)
        return found

    return computed


def with_loss(loss: Loss | None, compute: Callable[[Tree, Tree], torch.Tensor], run: Run) -> Run:
    """Return `run` followed by the loss of its output, for a microbatch that has a target.

    Args:
        loss: The loss function; if it is None, `run` is returned.
        compute: Computes the loss of an output and a target.
        run: Computes the output.
    """
    if loss is None:
        return run

    def computed(x: Tree, passage: Passage) -> Tree:
        output = run(x, passage)
        return output if passage.target is None else compute(output, passage.target)

    return computed
