"""Computes one stage: forward with a stash, backward from an output-gradient, update.

    forward   activation in -> layers, each seeded -> stash -> activation out (or the loss, on the last stage)
    backward  gradient with respect to that output in -> autograd -> gradient with respect to the input out
    update    optimizer step, gradients cleared
    snapshot  all state, as a value; restore continues from it with the same bits

In a loop of your own:

    y = first.forward(x)
    loss = last.forward(y, target)
    first.backward(last.backward())
    first.update()
    last.update()
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from stageline.pipeline.errors import ForeignState, LossNotScalar, StageError
from stageline.pipeline.tree import Tree, describe, map_tensors

from .body import Body, Weights, evaluating
from .clipping import GradientClip
from .generators import default_generators
from .memory import OutputGuard, copied
from .optimizer import OptimizerFactory, ParameterGroup, make_optimizer
from .precision import Autocast, precision_of
from .stash import InputNodes, Stash, matched
from .state import StageState, capture_state, restore_state
from .versions import Version, Versions

LrSchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Loss = Callable[[Any, Any], torch.Tensor]
Tap = Callable[[str, Tree], object]  # of a layer's name and what it returned, neither of which it may change

LOSS, OPTIMIZER, LR_SCHEDULER = "the loss", "the optimizer", "the learning rate scheduler"  # in place of a layer's name
GRADIENTS = "the gradients"  # likewise


class _NotGiven:
    """The default of a gradient. None means something else: the next stage ignored its input."""


NOT_GIVEN = _NotGiven()


class Stage:
    """One contiguous segment of a model.

    `layers` are the segment's layers in order; `names` are their names in the unsplit model (by default their numbers,
    from `first_layer` on). `optimizer` makes an optimizer from parameters, as `functools.partial(SGD, lr=0.1)` does; a
    stage without trainable parameters makes none. `lr_scheduler` steps after every `lr_every` updates.
    `loss(output, target)` belongs to the last stage and is a mean over rows. With `stash_weights`, backward
    uses the weights that its forward used (PipeDream, SOSP'19, section 3.3).
    `clip_norm` is the most that the norm of all stages' gradients may be: `norms` and `clip` go before each update.
    `order` has each parameter's number among those of the unsplit model, by name; by default that of the layers.
    `groups` have settings of the optimizer for parameters by their names: those in `titles`, where it has them.
    With `autocast` = "bf16", forwards and the loss compute in that precision where torch's autocast does.
    Every forward seeds torch's default generators, layer by layer.
    """

    def __init__(
        self,
        layers: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        index: int = 0,
        first_layer: int = 0,
        names: Sequence[str] | None = None,
        seed: int = 0,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: LrSchedulerFactory | None = None,
        lr_every: int = 1,
        loss: Loss | None = None,
        device: str | torch.device = "cpu",
        stash_weights: bool = False,
        clip_norm: float | None = None,
        order: Mapping[str, int] | None = None,
        autocast: Autocast | None = None,
        groups: Sequence[ParameterGroup] = (),
        titles: Mapping[str, str] | None = None,
    ) -> None:
        self.index = index
        self.device = torch.device(device)
        self.loss = loss
        self._precision = precision_of(autocast, self.device)
        self.seed = seed
        self.first_layer = first_layer
        self._layers = _listed(layers)
        self.names = tuple(names or (str(first_layer + k) for k in range(len(self._layers))))
        self._body = Body(self._layers, self.names, self.device)
        trainable = {
            (titles or {}).get(name, name): parameter
            for name, parameter in self._body.unsplit_parameters().items()
            if parameter.requires_grad
        }
        self.optimizer = None if optimizer is None else make_optimizer(optimizer, trainable, groups)
        self.lr_scheduler = lr_scheduler(self.optimizer) if lr_scheduler is not None and self.optimizer else None
        self._clip = None if clip_norm is None else GradientClip(index, clip_norm, *self._numbered(order))
        self._lr_every = lr_every
        self._output_guard = OutputGuard(self._body, index)
        self._generators = default_generators(self.device)
        self._stash = Stash(index)
        self._versions = Versions(self._body) if stash_weights else None
        self._roots: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights with gradients that the next backward adds
        self.at_layer = next(iter(self.names), LOSS)  # the layer or the like that ran last, for diagnosis
        self.tap: Tap | None = None  # is given what each layer returns, before the next layer may write to it
        self._forwarded = 0

    @property
    def in_flight(self) -> int:
        """Microbatches run forward and not yet backward."""
        return len(self._stash.kept)

    @property
    def where(self) -> str:
        """What ran last, for people: "layer 3", "the loss"."""
        return f"layer {self.at_layer}" if self.at_layer in self.names else self.at_layer

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
        """Returns the activation for the next stage; with a `target`, on a stage with a loss, the loss (0-dim) times
        `share`.

        `x` is what the stage before returned, or a batch: tensors of any shape and dtype, nested in any way. Backward
        computes the gradients with respect to those of its tensors that require them. `share` is the microbatch's rows
        over the batch's rows. With `owned`, the stage may write to the memory of `x`; otherwise it copies `x`.
        Raises `LossNotScalar`, `StageError`, and whatever the layers raise.
        """
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.forward(x, target, step=step, microbatch=microbatch, share=share, owned=owned)
        key = (step, self._forwarded if microbatch is None else microbatch)
        self._stash.require_absent(key)
        version = self._versions.version_for(key) if self._versions else None
        input_nodes = InputNodes(x)
        output = self._run(map_tensors(partial(self._receive, input_nodes, owned), x), key, version)
        loss = self.loss if target is not None else None
        if loss is not None:
            with self._precision():
                output = self._loss_of(loss, output, target)
        self._stash.put(key, output, share if loss is not None else None, input_nodes, version)
        self._forwarded += 1
        if loss is not None:
            return map_tensors(lambda t: t.detach() * share, output)
        if not isinstance(output, torch.Tensor):
            self._output_guard.refuse_aliases(output)
        return self._output_guard.sendable(output, None if owned else x)

    def backward(
        self,
        gradient: "Tree | _NotGiven" = NOT_GIVEN,
        *,
        step: int | None = None,
        microbatch: int | None = None,
        owned: bool = False,
    ) -> Tree:
        """Returns the gradient with respect to the stage's input, of the named microbatch or of the oldest stashed one.

        `gradient` is with respect to what `forward` returned: the same tree, with a tensor of the same shape and dtype
        for every tensor that requires a gradient, or None for one that gets none. Leave it out after a loss.
        The result has the tree of `x`, with None for leaves that carry no gradient; it is None on a first stage. With
        `owned`, the stage may send on the memory of `gradient`. Parameters' gradients are added up in `.grad`.
        Raises `GradientMismatch`, or `StageError` if nothing is stashed.
        """
        stashed = self._stash.pop(step, microbatch)
        if stashed is None or not stashed.requires_grad:
            return None  # nothing in this stage required a gradient for this microbatch
        if isinstance(gradient, _NotGiven):
            gradient = stashed.gradient_of_loss(self.index)
        gradient = map_tensors(self._here, gradient)
        outputs, gradients = matched(stashed.outputs, gradient, self.index)
        if self._roots:
            outputs, gradients = map(list, zip(*self._roots, *zip(outputs, gradients, strict=True), strict=True))
            self._roots = []
        if outputs:
            torch.autograd.backward(outputs, gradients)
        if self._versions and stashed.version:
            self._versions.collect(stashed.version)
        result = stashed.input_nodes.gradients()
        return None if result is None else self._output_guard.sendable(result, None if owned else gradient)

    @property
    def gradient_norm(self) -> float | None:
        """The norm, over all stages, of the gradients that were clipped last; None if none were."""
        return None if self._clip is None else self._clip.total

    def norms(self, later: Tree = None) -> Tree:
        """After all backwards of a step, the last stage first: the norms of its gradients, with those that the stage
        after it has returned, which are `later`. Raises `GradientNotFinite`, and `GradientMismatch` for what are no
        norms; `StageError` without `clip_norm`."""
        self.at_layer = GRADIENTS
        return self._clipping().gather(later)

    def clip(self, total: Tree = None) -> Tree:
        """After `norms`, the first stage first: clips its gradients. Returns the norm over all stages, which is `total`
        for the stage after it. Raises as `norms` does."""
        self.at_layer = GRADIENTS
        return self._clipping().clip(total, self.device)

    def update(self, step: int | None = None) -> None:
        """One optimizer step with the gradients added up since the last, then one of the learning rate scheduler: after
        the last of every `lr_every` steps, if the number of this `step` is given, counted from 0."""
        self._forwarded = 0
        if self.optimizer is None:
            return
        self.at_layer = OPTIMIZER
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._versions:
            self._versions.invalidate()
        if self.lr_scheduler is not None and (step is None or (step + 1) % self._lr_every == 0):
            self.at_layer = LR_SCHEDULER
            self.lr_scheduler.step()

    def evaluate(self, x: Tree, *, step: int = 0, microbatch: int = 0, owned: bool = False) -> Tree:
        """Returns the stage's output in evaluation mode: without stash and gradients, seeded as in `forward`. The
        layers' modes are afterwards what they were before."""
        with torch.no_grad(), evaluating(self._body):
            inputs = map_tensors(partial(self._own, owned), x)
            return self._output_guard.sendable(self._run(inputs, (step, microbatch), None), None if owned else x)

    def evaluate_loss(self, output: Tree, target: Tree) -> float:
        """The loss of what `evaluate` has returned, a mean over rows, without gradients. Raises `LossNotScalar`, and
        `StageError` on a stage that has no loss."""
        if self.loss is None:
            raise StageError(f"stage {self.index} has no loss: only the last stage has one")
        with torch.no_grad(), self._precision():
            return self._loss_of(self.loss, output, target).item()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the unsplit model's names. The tensors are the stage's own, not copies."""
        return self._body.weights()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads what `state_dict` returns. Raises torch's `RuntimeError`, which names what is missing or misshapen."""
        self._body.set_weights(state)

    def snapshot(self) -> StageState:
        """Copies all state, between two steps.

        In asynchronous mode that includes what the forwards of the microbatches in flight have read. Raises
        `StageError` within a synchronous step: the graphs that are stashed for backward cannot be saved.
        """
        if self._stash.kept and not self._versions:
            raise StageError(
                f"stage {self.index} holds {self.in_flight} microbatches that have yet to go backward: "
                f"a snapshot is taken between two steps, after the update"
            )
        stashed = ((key, each.version) for key, each in self._stash.kept.items() if each.version)
        in_flight = self._versions.in_flight(stashed) if self._versions else ()
        return capture_state(self._body, self.optimizer, self.lr_scheduler, in_flight)

    def state(self) -> StageState:
        """Copies all state but that of microbatches in flight. Possible within a step, too."""
        return capture_state(self._body, self.optimizer, self.lr_scheduler, ())

    def restore(self, state: StageState) -> None:
        """Restores what `snapshot` returned, here or in another process. Does not change `state`.

        Microbatches that were in flight must then be run forward again, as the program from the snapshot's step on
        does: each reads what it read before, and gives the same output. Raises `ForeignState` if this stage has other
        parameters, buffers, optimizer or learning rate scheduler; it must not be used afterwards.
        """
        self._stash.kept.clear()
        self._forwarded = 0
        try:
            restore_state(state, self._body, self.optimizer, self.lr_scheduler)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ForeignState(f"stage {self.index} cannot go on from this state: {error}") from error
        if self._versions:
            self._versions.restore(state.in_flight)
        self._output_guard = OutputGuard(self._body, self.index)

    def buffers(self) -> Weights:
        """Copies of the layers' buffers, by the unsplit model's names."""
        return {name: copied(buffer) for name, buffer in self._body.unsplit_buffers().items()}

    def set_buffers(self, buffers: Weights) -> None:
        """Restores what `buffers` returned. Does not write to unchanged buffers, since a graph may hold them."""
        now = self._body.unsplit_buffers()
        changed = (name for name, kept in buffers.items() if name not in now or not torch.equal(kept, now[name]))
        self._body.set_buffers({name: buffers[name] for name in changed})

    def _clipping(self) -> GradientClip:
        if self._clip is None:
            raise StageError(f"stage {self.index} clips no gradients: make it with clip_norm")
        return self._clip

    def _numbered(self, order: Mapping[str, int] | None) -> tuple[Weights, Mapping[str, int]]:
        """The parameters, by name, and their numbers: those of another stage's layers are lower, or higher."""
        named = self._body.unsplit_parameters()
        first = self.first_layer * 2**32
        return named, {name: first + place for place, name in enumerate(named)} if order is None else order

    def _run(self, x: Tree, key: tuple[int, int], version: Version | None) -> Tree:
        with self._precision():
            if self._versions and version:
                return self._versions.run(version, lambda: self._run_layers(x, key))
            return self._run_layers(x, key)

    def _run_layers(self, x: Tree, key: tuple[int, int]) -> Tree:
        for position, layer in enumerate(self._layers):
            self.at_layer = self.names[position]
            number = layer_seed(self.seed, *key, self.first_layer + position)
            for generator in self._generators:
                generator.manual_seed(number)
            x = layer(x)
            if self.tap is not None:
                self.tap(self.names[position], x)
        return x

    def _receive(self, input_nodes: InputNodes, owned: bool, tensor: torch.Tensor) -> torch.Tensor:
        mine = self._own(owned, tensor)
        return input_nodes.enter(mine) if tensor.requires_grad else mine

    def _own(self, owned: bool, tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.detach()
        here = self._here(mine)
        return here if owned or here is not mine else copied(here)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device)

    def _loss_of(self, function: Loss, output: Tree, target: Tree) -> torch.Tensor:
        self.at_layer = LOSS
        loss = function(output, map_tensors(self._here, target))
        if isinstance(loss, torch.Tensor) and loss.dim() == 0:
            return loss
        raise LossNotScalar(
            f"the loss must be one number (a 0-dimensional tensor, the mean over rows); "
            f"it returned {describe(loss) if isinstance(loss, torch.Tensor) else repr(loss)}. "
            f"Use reduction='mean', or take its mean()."
        )


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of the generators before `layer`, numbered in the unsplit model: it does not depend on the cut."""
    return int.from_bytes(sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()[:8], "little")


def _listed(layers: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    if isinstance(layers, torch.nn.Sequential):
        return list(layers)
    return [layers] if isinstance(layers, torch.nn.Module) else list(layers)
