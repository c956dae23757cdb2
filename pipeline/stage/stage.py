"""Computes one stage: forward with a stash, backward from an output-gradient, update.

    forward   activation in -> layers, each seeded -> stash -> activation out (or the loss, on the last stage)
    backward  gradient with respect to that output in -> autograd -> gradient with respect to the input out
    update    optimizer step, gradients cleared
    snapshot  all state out, as a value; restore: in again, so that what follows has the same bits

By hand, in a loop of your own:

    y = first.forward(x)
    loss = last.forward(y, target)
    first.backward(last.backward())
    first.update()
    last.update()
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stageline.pipeline.errors import ForeignState, LossNotScalar, StageError
from stageline.pipeline.tree import Tree, describe, map_tensors

from .body import Body, Weights
from .input_node import InputNodes
from .matching import matched
from .output_guard import OutputGuard
from .placing import copied
from .seeding import generators, layer_seed
from .stash import Stash
from .state import StageState, adopt, capture
from .versions import Version, Versions

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LrSchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Loss = Callable[[Any, Any], Tensor]

LOSS = "the loss"  # in the place of a layer's name


class _NotGiven:
    """Tells a gradient that was left out from one that is None, which a next stage that ignored its input sends."""


NOT_GIVEN = _NotGiven()


class Stage:
    """One contiguous segment of a model.

    `layers` are the segment's layers in order; `names` are their names in the unsplit model (by default their numbers,
    from `first_layer` on). `optimizer` makes an optimizer from parameters, as `functools.partial(SGD, lr=0.1)` does; a
    stage without trainable parameters makes none. `loss(output, target)` belongs to the last stage and is a mean over
    rows. With `stash_weights`, backward uses the weights that its forward used (PipeDream, SOSP'19, section 3.3).
    Every forward seeds torch's default generators, layer by layer.
    """

    def __init__(
        self,
        layers: nn.Module | Sequence[nn.Module],
        *,
        index: int = 0,
        first_layer: int = 0,
        names: Sequence[str] | None = None,
        seed: int = 0,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: LrSchedulerFactory | None = None,
        loss: Loss | None = None,
        device: str | torch.device = "cpu",
        stash_weights: bool = False,
    ) -> None:
        self.index = index
        self.device = torch.device(device)
        self.loss = loss
        self.seed = seed
        self.first_layer = first_layer
        self._layers = _listed(layers)
        self.names = tuple(names or (str(first_layer + k) for k in range(len(self._layers))))
        self._body = Body(self._layers, self.names, self.device)
        trainable = [p for p in self._body.parameters() if p.requires_grad]
        self.optimizer = optimizer(trainable) if optimizer is not None and trainable else None
        self.lr_scheduler = lr_scheduler(self.optimizer) if lr_scheduler is not None and self.optimizer else None
        self._outlet = OutputGuard(self._body, index)
        self._generators = generators(self.device)
        self._stash = Stash(index)
        self._versions = Versions(self._body) if stash_weights else None
        self._position = 0
        self._forwarded = 0

    @property
    def in_flight(self) -> int:
        """Microbatches run forward and not yet backward."""
        return len(self._stash)

    @property
    def at_layer(self) -> str:
        """The name of the layer that runs now, or ran last, or "the loss": what a diagnosis wants to know."""
        return self.names[self._position] if self._position < len(self.names) else LOSS

    def forward(
        self,
        x: Tree,
        target: Tree = None,
        *,
        step: int = 0,
        microbatch: int | None = None,
        share: float = 1.0,
        owned: bool = False,
    ) -> Tree:
        """The activation for the next stage; with a `target`, on a stage with a loss, `share` times the loss (0-dim).

        `x`: what the stage before returned, or a batch: tensors of any shape and dtype, nested in any way. Gradients
        flow back to those of its tensors that require them. `share` is the microbatch's rows over the batch's rows.
        `owned` says that nobody else needs the memory of `x`; otherwise it is copied, since a layer may write to it.
        Raises `LossNotScalar`, `StageError`, and whatever the layers raise.
        """
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.forward(x, target, step=step, microbatch=microbatch, share=share, owned=owned)
        key = (step, self._forwarded if microbatch is None else microbatch)
        self._stash.refuse(key)
        if not self._body.training:
            self._body.train()
        version = self._versions.of(key) if self._versions else None
        inlets = InputNodes(x)
        output = self._run(map_tensors(partial(self._receive, inlets, owned), x), key, version)
        loss = self.loss if target is not None else None
        if loss is not None:
            output = self._loss_of(loss, output, target)
        self._stash.put(key, output, share if loss is not None else None, inlets, version)
        self._forwarded += 1
        if loss is not None:
            return map_tensors(lambda t: t.detach() * share, output)
        if not isinstance(output, Tensor):
            self._outlet.refuse_aliases(output)
        return self._outlet.sendable(output, None if owned else x)

    def backward(
        self,
        gradient: "Tree | _NotGiven" = NOT_GIVEN,
        *,
        step: int | None = None,
        microbatch: int | None = None,
        owned: bool = False,
    ) -> Tree:
        """The gradient with respect to the stage's input, of the oldest stashed microbatch or of the one named.

        `gradient` is with respect to what `forward` returned: the same tree, a tensor of the same shape and dtype for
        every tensor that requires a gradient, or None for one that gets none. Left out after a loss.
        The result has the tree of `x`, with None for what carries no gradient; None on a first stage. `owned` says that
        nobody else needs the memory of `gradient`. Parameters' gradients are added up in `.grad`.
        Raises `GradientMismatch`, or `StageError` if nothing is stashed.
        """
        stashed = self._stash.pop(step, microbatch)
        if stashed is None or not stashed.requires_grad:
            return None  # nothing in this stage required a gradient for this microbatch
        if isinstance(gradient, _NotGiven):
            gradient = stashed.gradient_of_loss(self.index)
        gradient = map_tensors(self._here, gradient)
        outputs, gradients = matched(stashed.outputs, gradient, self.index)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        if self._versions and stashed.version:
            self._versions.collect(stashed.version)
        result = stashed.inlets.gradients()
        return None if result is None else self._outlet.sendable(result, None if owned else gradient)

    def update(self) -> None:
        """One optimizer step with the gradients added up since the last, then one of the learning rate scheduler."""
        self._forwarded = 0
        if self.optimizer is None:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._versions:
            self._versions.expire()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def evaluate(self, x: Tree, *, step: int = 0, microbatch: int = 0, owned: bool = False) -> Tree:
        """The stage's output in evaluation mode: no stash, no gradient; seeded like `forward`."""
        if self._body.training:
            self._body.eval()
        with torch.no_grad():
            inputs = map_tensors(partial(self._own, owned), x)
            return self._outlet.sendable(self._run(inputs, (step, microbatch), None), None if owned else x)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers under the unsplit model's names; the tensors are the stage's own, not copies."""
        return self._body.weights()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` gave. Raises `RuntimeError`, from torch, naming what is missing or misshapen."""
        self._body.set_weights(state)

    def snapshot(self) -> StageState:
        """All state, in copies, so that the next action may follow at once. Taken between two steps.

        In asynchronous mode it holds what the forwards of the microbatches in flight read. Raises `StageError` within
        a synchronous step: what is stashed for a backward is not state that could be saved.
        """
        if self._stash and not self._versions:
            raise StageError(
                f"stage {self.index} holds {len(self._stash)} microbatches that have yet to go backward: "
                f"a snapshot is taken between two steps, after the update"
            )
        in_flight = self._versions.saved(self._stash.used()) if self._versions else ()
        return capture(self._body, self.optimizer, self.lr_scheduler, in_flight)

    def state(self) -> StageState:
        """All state at this moment, in copies, within a step too; what the microbatches in flight have is left out."""
        return capture(self._body, self.optimizer, self.lr_scheduler, ())

    def restore(self, state: StageState) -> None:
        """Takes over what `snapshot` gave, here or in another process; `state` stays as it is.

        The microbatches that were in flight are then to be run forward again, as the program from the snapshot's step
        on does: each uses what it used before, and gives the same output. Raises `ForeignState` if this stage has
        other parameters, buffers, optimizer or learning rate scheduler; it is then not to be used any more.
        """
        self._stash.clear()
        self._forwarded = 0
        try:
            adopt(state, self._body, self.optimizer, self.lr_scheduler)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ForeignState(f"stage {self.index} cannot go on from this state: {error}") from error
        if self._versions:
            self._versions.restore(state.in_flight)
        self._outlet = OutputGuard(self._body, self.index)

    def buffers(self) -> Weights:
        """The layers' buffers by the unsplit model's names, in copies."""
        return {name: copied(buffer) for name, buffer in self._body.unsplit(dict(self._body.named_buffers())).items()}

    def set_buffers(self, buffers: Weights) -> None:
        """Takes over what `buffers` gave. Those that have not changed are left alone: a graph may hold them."""
        now = self._body.unsplit(dict(self._body.named_buffers()))
        changed = (name for name, kept in buffers.items() if name not in now or not torch.equal(kept, now[name]))
        self._body.set_buffers({name: buffers[name] for name in changed})

    def _run(self, x: Tree, key: tuple[int, int], version: Version | None) -> Tree:
        if self._versions and version:
            return self._versions.run(version, lambda: self._run(x, key, None))
        for position, layer in enumerate(self._layers):
            self._position = position
            number = layer_seed(self.seed, *key, self.first_layer + position)
            for generator in self._generators:
                generator.manual_seed(number)
            x = layer(x)
        return x

    def _receive(self, inlets: InputNodes, owned: bool, tensor: Tensor) -> Tensor:
        mine = self._own(owned, tensor)
        return inlets.enter(mine) if tensor.requires_grad else mine

    def _own(self, owned: bool, tensor: Tensor) -> Tensor:
        mine = tensor.detach()
        here = self._here(mine)
        return here if owned or here is not mine else copied(here)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device)

    def _loss_of(self, function: Loss, output: Tree, target: Tree) -> Tensor:
        self._position = len(self._layers)
        loss = function(output, map_tensors(self._here, target))
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = describe(loss) if isinstance(loss, Tensor) else repr(loss)
            raise LossNotScalar(
                f"the loss must be one number (a 0-dimensional tensor, the mean over rows); "
                f"it returned {found}. Use reduction='mean', or take its mean()."
            )
        return loss


def _listed(layers: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(layers, nn.Sequential):
        return list(layers)
    return [layers] if isinstance(layers, nn.Module) else list(layers)
