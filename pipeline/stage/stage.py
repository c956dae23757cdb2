"""Stage of a model: forward with a stash, backward from the output's gradient, update.

    forward   activation in -> layers, each seeded -> stash -> activation out (or the loss, on the last stage)
    backward  gradient with respect to that output in -> autograd -> gradient with respect to the input out
              or in two halves, of which the second may wait: the input's gradient first, those of the weights later
    update    optimizer step, gradients cleared, averages of the weights
    snapshot  all state, as a value; restore continues from it with the same bits

In a loop of your own: `examples/two_stages.py`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import torch

from stageline.pipeline.errors import ForeignState, StageError
from stageline.pipeline.feature import Feature, restore_states, states_of
from stageline.pipeline.features.clipping import clip_of, numbers_of
from stageline.pipeline.features.halves import Root, WaitingHalves
from stageline.pipeline.features.offload import scratch_of
from stageline.pipeline.features.recompute import recomputation_of
from stageline.pipeline.features.ties import SharedParameters
from stageline.pipeline.features.versions import InFlight, versions_of
from stageline.pipeline.tree import Tree, map_tensors

from .layers.body import Body, evaluating
from .layers.file_memory import layers_of
from .layers.loss import Loss, demand_gradient, in_precision, loss_of, with_loss
from .layers.memory import OutputGuard, gathering
from .layers.passage import (
    GRADIENTS,
    Arrivals,
    InputNodes,
    Passage,
    Run,
    SeededLayers,
    Stash,
    Stashed,
    Tap,
    Version,
    matched,
)
from .layers.skipped_calls import plain_layers
from .settings import StageSettings
from .stage_state import NamedTensors, StageState, capture_state, restore_state
from .stage_update import OptimizerFactory


class _NotGiven:
    """The default of a gradient. None means something else: the next stage ignored its input."""


NOT_GIVEN = _NotGiven()


class Stage(NamedTensors):
    """A contiguous segment of a model that computes forwards, backwards and updates."""

    def __init__(
        self,
        layers: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        index: int = 0,
        first_layer: int = 0,
        optimizer: OptimizerFactory | None = None,
        loss: Loss | None = None,
        settings: StageSettings = StageSettings(),  # noqa: B008  # frozen
        shared: SharedParameters | None = None,
        features: Sequence[Feature] = (),
    ) -> None:
        """Make the stage and move its layers to its device.

        Args:
            layers: Layers of the segment, in order.
            index: Number of the stage, from 0.
            first_layer: Number of the first layer in the unsplit model. Random generators are seeded by such numbers.
            optimizer: Makes an optimizer from parameters, as `functools.partial(SGD, lr=0.1)` does. Not called without
                trainable parameters.
            loss: Computes the mean loss over rows from output and target, on the last stage.
            settings: Precision, recomputation and so on; the defaults are those of a plain synchronous stage.
            shared: Parameters that other stages have, too.
            features: Features of the user; the outermost first.
        """
        listed = plain_layers(layers)
        offload = settings.offload
        self.names = tuple(settings.names or map(str, range(first_layer, first_layer + len(listed))))
        self.device = torch.device(settings.device)
        body = Body(listed, self.names, self.device)
        ahead = layers_of(body, offload.weight_files)
        self._layers = SeededLayers(
            ahead.layers, self.names, first_layer=first_layer, seed=settings.seed, device=self.device
        )
        named, titles = body.unsplit_parameters(), settings.titles
        trainable = {titles.get(name, name): each for name, each in named.items() if each.requires_grad}
        super().__init__(index, body, settings.update(index, body, trainable, optimizer, self._layers.note))
        self.loss = loss
        self.shared = shared or SharedParameters()
        self.features = features
        self._trainable = trainable
        self.seed = settings.seed
        self.first_layer = first_layer
        self.file_memory = offload.files
        self._copied = offload.copied
        self._arrivals = Arrivals(self.device)
        self._clip = clip_of(index, settings.clip_norm, named, settings.order or numbers_of(named, first_layer))
        self._output_guard = OutputGuard(body, index)
        self._stash = Stash(index)
        self._versions = versions_of(body, stash=settings.stash_weights, delay=settings.delay_weights)
        recomputation = recomputation_of(body, settings.recompute, versions=self._versions.stashed)
        scratch = scratch_of(offload.scratch, body)
        self._halves = WaitingHalves(index, recomputation.indivisible or self._versions.indivisible)
        self._forwarded = 0
        # Composed once: a microbatch does not pass through a feature that is off. No function here may refer to the
        # stage, whose memory would then wait for the collector of garbage.
        precise = partial(in_precision, settings.autocast, self.device)
        gathered = gathering(body)
        again = partial(self._layers.run, again=True)
        self._output: Run = gathered(precise(self._layers.run))
        own = frozenset(map(id, trainable.values()))
        self._loss_of = loss_of(index, loss, precise, self._arrivals.here, self._layers.note, own)
        run = with_loss(loss, self._loss_of, self._versions.around(self._output))
        run_again = with_loss(loss, self._loss_of, self._versions.around(gathered(precise(again))))
        self._compute = scratch.around(recomputation.around(run, run_again))
        self._version_for = self._versions.version_for
        self._backward = self._versions.around_backward(_through_graph)
        self._begins = (*scratch.begins, *ahead.begins)  # what is read ahead for the backward of a microbatch
        self._forgets = scratch.clear

    def tapped(self, tap: Tap) -> AbstractContextManager[None]:
        """Return a context in which `tap` gets each layer's name and output, before the next layer may write to it."""
        return self._layers.tapped(tap)

    @property
    def in_flight(self) -> int:
        """The number of microbatches that were run forward and not yet backward, with both halves."""
        return len(self._stash.kept) + len(self._halves.kept)

    @property
    def where(self) -> str:
        """The part of the stage that ran last, for people: "layer 3", "the loss"."""
        return str(self._layers)

    @property
    def given(self) -> str:
        """The values that the part `where` was given, in words, if it has failed; else ""."""
        return self._layers.given

    def now_at(self, what: str, given: str = "") -> None:
        """Note what the stage's worker does now, such as "the data source", for `where`; if it has failed, `given`."""
        self._layers.note(what, given)

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
        """Return the activation for the next stage; with a `target`, on a stage with a loss, `share` times the loss.

        Raises `LossNotScalar`, `StageError` if the microbatch is stashed already, and whatever the layers raise. A loss
        without a gradient is a `StageError` also where the stage has no trainable parameter and `x` requires no
        gradient: `loss.backward()` of the unsplit model raises then, too, and a `detach()` in a stage before would
        otherwise train nothing without a word.

        Args:
            x: The previous stage's activation, or a batch: tensors of any shape and dtype, nested in any way. Backward
                computes the gradients of the tensors that require them.
            target: Target of the loss, as the loss function takes it.
            step: Step of the microbatch.
            microbatch: Number of the microbatch in the step; by default, forwards are counted from the last update on.
            share: Rows of the microbatch over those of the batch.
            owned: True if the stage may write to the memory of `x`; otherwise it copies `x`.
        """
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.forward(x, target, step=step, microbatch=microbatch, share=share, owned=owned)
        key = (step, self._forwarded if microbatch is None else microbatch)
        self._stash.require_absent(key)
        input_nodes = InputNodes(x)
        passage = Passage(key, input_nodes, self._version_for(key), target)
        output = self._compute(self._arrivals.entered(x, input_nodes, owned=owned), passage)
        is_loss = target is not None and self.loss is not None
        if is_loss:
            demand_gradient(cast(torch.Tensor, output))
        self._stash.put(passage, output, share if is_loss else None)
        self._forwarded += 1
        if is_loss:
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
        roots: Sequence[Root] = (),
    ) -> Tree:
        """Return the gradient with respect to the stage's input; add parameters' gradients to their `.grad`.

        The result has the tree of `x`, with None for leaves without a gradient; it is None on a first stage,
        and where nothing required a gradient. Raises `GradientMismatch`, or `StageError` if it is to take the oldest
        stashed microbatch and none is stashed.

        Args:
            gradient: Gradient with respect to the output of `forward`: the same tree, with a tensor of the same shape
                and dtype for each tensor that requires a gradient, or None for one that gets none. Left out after a
                loss.
            step: Step of the microbatch. By default, or if `microbatch` is None, the oldest stashed one goes backward.
            microbatch: Number of the microbatch in the step.
            owned: True if the stage may send on the memory of `gradient`.
            roots: Parameters with gradients from elsewhere, to which autograd adds the stage's own.
        """
        stashed = self._stash.kept.pop(self._stash.key(step, microbatch), None)
        if stashed is None or not stashed.requires_grad:
            if roots:
                ends, given = zip(*roots, strict=True)
                torch.autograd.backward(ends, given)
            return None  # nothing in this stage required a gradient for this microbatch
        gradient, outputs, gradients = self._begun(stashed, gradient)
        if roots:
            outputs, gradients = map(list, zip(*roots, *zip(outputs, gradients, strict=True), strict=True))
        self._backward(stashed.version, outputs, gradients)
        return self._result(stashed, None if owned else gradient)

    def halfway_bytes(self) -> int | None:
        """Return the bytes that the newest microbatch in flight would take between the halves of its backward.

        What its forward has saved is not counted. 0 if none is in flight, None if the stage cannot halve backwards.
        """
        return self._halves.bytes_after(next(reversed(self._stash.kept.values()), None))

    def backward_input(
        self,
        gradient: "Tree | _NotGiven" = NOT_GIVEN,
        *,
        step: int | None = None,
        microbatch: int | None = None,
        owned: bool = False,
    ) -> Tree:
        """Run the first half of `backward`, with the same arguments, result and errors, and no gradients of parameters.

        Between the halves, what the forward has saved stays in memory. Raises `StageError` for a layer that cannot
        compute these gradients alone, with `stash_weights`, and with `recompute`.
        """
        self._halves.demand()
        key = self._stash.key(step, microbatch)
        stashed = self._stash.kept.pop(key, None)
        if stashed is None or not stashed.requires_grad:
            return None
        gradient, outputs, gradients = self._begun(stashed, gradient)
        self._halves.run_first(key, stashed, outputs, gradients)
        return self._result(stashed, None if owned else gradient)

    def backward_weight(
        self, *, step: int | None = None, microbatch: int | None = None, roots: Sequence[Root] = ()
    ) -> None:
        """Run the second half of `backward`: add the parameters' gradients, and `roots` as there, to `.grad`.

        It is that of the named microbatch or of the oldest that has run `backward_input`. Microbatches must come in the
        order of an undivided backward.
        """
        self._halves.run_second(step, microbatch, roots)

    @property
    def gradient_norm(self) -> float | None:
        """The norm, over all stages, of the gradients that were clipped last; None if none were."""
        return self._clip.total

    def norms(self, later: Tree = None) -> Tree:
        """Return the norms of this stage's gradients, after those that the next stage has returned, which are `later`.

        Called after all backwards of a step, on the last stage first. Raises `GradientNotFinite`, `GradientMismatch` if
        `later` has other contents, and `StageError` without `clip_norm`.
        """
        self.now_at(GRADIENTS)
        return self._clip.gather(later)

    def clip(self, total: Tree = None) -> Tree:
        """Clip the gradients by `total`, which the previous stage returned, and return the norm over all stages.

        Called after `norms`, on the first stage first: it gets None. Raises as `norms` does.
        """
        self.now_at(GRADIENTS)
        return self._clip.clip(total, self.device)

    def update(self, step: int | None = None, epoch: int = 0) -> None:
        """Step the optimizer; step the scheduler if `step`, from 0, is None or the last of every `lr_every` steps.

        `epoch` takes the place of an `lr_every` of 0.
        """
        self._forwarded = 0
        moved = self._versions.begin_update()
        if self._update(step, epoch):
            self._versions.invalidate()
        if moved:
            self._output_guard = OutputGuard(self._body, self.index)

    def evaluated(self, value: float) -> None:
        """Step a scheduler that follows evaluations, by the `value` that the newest one has found."""
        self._update.evaluated(value)

    def evaluate(self, x: Tree, *, step: int = 0, microbatch: int = 0, owned: bool = False, ema: bool = False) -> Tree:
        """Return the stage's output in evaluation mode, without stash and gradients, seeded as in `forward`.

        With `ema`, the averages of the weights compute it; raises `StageError` if the stage has none. With `owned`, the
        stage may write to `x`. Afterwards the layers' modes are as before, and nothing has written to weights.
        """
        with torch.no_grad(), evaluating(self._body), self._update.average.computing(ema=ema) as averages:
            passage = Passage((step, microbatch), InputNodes(None))
            output = self._output(self._arrivals.own(x, owned=owned), passage)
            return self._output_guard.sendable(output, [*averages, None if owned else x])

    def evaluate_loss(self, output: Tree, target: Tree) -> float:
        """Return the mean loss of an output of `evaluate`. Raises `LossNotScalar`, or `StageError` without a loss."""
        with torch.no_grad():
            return self._loss_of(output, target).item()

    def snapshot(self) -> StageState:
        """Return a copy of all state, between two steps.

        In asynchronous mode that includes what the forwards of the microbatches in flight have read. Raises
        `StageError` within a synchronous step: the graphs that are stashed for backward cannot be saved.
        """
        if self.in_flight and not self._versions.stashed:
            raise StageError(
                f"stage {self.index} holds {self.in_flight} microbatches that have yet to go backward: "
                f"a snapshot is taken between two steps, after the update"
            )
        in_flight = self._versions.in_flight((key, each.version) for key, each in self._stash.kept.items())
        return self._captured(in_flight)

    def state(self) -> StageState:
        """Return a copy of all state but that of microbatches in flight. Possible within a step, too."""
        return self._captured(())

    def restore(self, state: StageState) -> None:
        """Restore what `snapshot` returned, here or in another process. Does not change `state`.

        Microbatches that were in flight must then be run forward again, as the program from the snapshot's step on
        does: each reads what it read before, and gives the same output. Raises `ForeignState` if this stage has other
        parameters, buffers, optimizer or learning rate scheduler; it must not be used afterwards.
        """
        self._stash.kept.clear()
        self._halves.kept.clear()
        self._forgets()
        self._forwarded = 0
        try:
            restore_state(state, self._body, self._update)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ForeignState(f"stage {self.index} cannot go on from this state: {error}") from error
        self._versions.restore(state.in_flight, state.previous)
        self._output_guard = OutputGuard(self._body, self.index)
        restore_states(self.features, self, state.features)

    def trainable(self) -> Mapping[str, torch.Tensor]:
        """Return the trained parameters, not copies, by their first names in the unsplit model."""
        return self._trainable

    def _captured(self, in_flight: tuple[InFlight, ...]) -> StageState:
        features = states_of(self.features, self)
        return capture_state(self._body, self._update, in_flight, self._versions.previous, features, self._copied)

    def _begun(
        self, stashed: Stashed, gradient: "Tree | _NotGiven"
    ) -> tuple[Tree, list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradient, here, with the outputs that take part in a backward and their gradients."""
        for begin in self._begins:
            begin(stashed.input_nodes)
        if isinstance(gradient, _NotGiven):
            gradient = stashed.gradient_of_loss(self.index)
        gradient = self._arrivals.here(gradient)
        return gradient, *matched(stashed.outputs, gradient, self.index)

    def _result(self, stashed: Stashed, received: Tree) -> Tree:
        """Return the gradients of the inputs, without memory of what was `received`."""
        result = stashed.input_nodes.gradients()
        return None if result is None else self._output_guard.sendable(result, received)


def _through_graph(version: Version, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    if outputs:
        torch.autograd.backward(outputs, gradients)
