"""A plan's unsplit model with something in the place of a cut, and what crosses that.

    x --> layers before the cut --> defence --> codec --> what crosses --> layers after it --> outputs

Unsplit it computes what the split model would, with one microbatch in a batch, and with no codec at other cuts.

What crosses a cut is changed by the codecs of its queues, and by defences, which are layers beside it:

    activation --> forward codec --> what the layers above are given
    what the layers below are given <-- backward codec <-- its gradient

A cut that the plan has, too, has the codecs of its two queues; another has those that the plan gives all queues of a
direction.

Defences have a price in accuracy. The first two stand last before the cut, the third first after it, since each
stands with the one who sends:

    AddNoise            forward    x + share * std(x) * N(0, 1), in training and evaluation
    ClipRows            forward    rows with a larger norm are scaled down to it
    EqualNormGradients  backward   each row's gradient is scaled to the mean norm: norms tell no labels, directions do

A stage's layers are seeded one by one, so noise is the same wherever the model is cut, and in a run that is repeated.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.tensors import delivered
from stageline.pipeline.data import Batch, Source, rows
from stageline.pipeline.errors import ModelRefused, describe_error, raised_by_user_code
from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.plan_stage import optimizer_of
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Tree, map_tensors, tensors
from stageline.workers.extras.forward.forward_run import Wanted, batches_of, loss_of, metrics_of
from stageline.workers.runtime.executor import metric_value


@dataclass(frozen=True, slots=True)
class CutCodecs:
    """Codecs of activations and of the gradients that come back, by the plan's names."""

    forward: str = "lossless"
    backward: str = "lossless"

    @property
    def lossless(self) -> bool:
        """True if neither direction loses anything."""
        return self.forward == self.backward == "lossless"

    def passed(self, tree: Tree) -> Tree:
        """Return `tree` as it arrives after the forward codec. In backward, gradients pass the backward codec."""
        if self.lossless:
            return tree
        return map_tensors(lambda each: _Passed.apply(each, self) if each.is_floating_point() else each, tree)  # type: ignore[no-untyped-call]


def codecs_at(plan: Plan, cuts: Iterable[int]) -> dict[int, CutCodecs]:
    """Return the codecs at each of `cuts`. The model is made if some queue has a codec of its own.

    Args:
        plan: Plan with the codecs of its queues.
        cuts: Numbers of the layers above the cuts.

    Raises:
        ModelRefused: The model cannot be made.
        PlanRefused: The model cannot be cut as the plan says.
    """
    named = any("-" in name for name in plan.queues.codecs)
    stages = {part.first_layer: part.index for part in build_segments(plan)} if named else {}
    return {cut: _codecs(plan, stages.get(cut)) for cut in cuts}


def _codecs(plan: Plan, above: int | None) -> CutCodecs:
    """Return the codecs at the cut below the stage `above`; None stands for a cut that the plan does not have."""
    below = None if above is None else above - 1
    return CutCodecs(plan.queues.codec_of("forward", above), plan.queues.codec_of("backward", below))


class _Passed(torch.autograd.Function):
    """Passage of a tensor through the codecs of a cut: values by the forward codec, gradients by the backward codec."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, codecs: CutCodecs) -> Tensor:
        context.codec = codecs.backward
        return _delivered(tensor, codecs.forward)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _delivered(gradient, context.codec), None


def _delivered(tensor: Tensor, codec: str) -> Tensor:
    """Return the tensor as it arrives, never `tensor` itself: a layer may write to its input."""
    found: Tensor = delivered(tensor.detach().clone(), Codec[codec.upper()])  # type: ignore[assignment]  # of a tensor
    return found


class AddNoise(nn.Module):
    """Layer that adds normal noise to its input, in training and evaluation.

    Args:
        share: Deviation of the noise, as a share of the deviation of the input's numbers; above 0.

    Raises:
        ValueError: `share` is not above 0.
    """

    def __init__(self, share: float) -> None:
        """Keep `share`."""
        super().__init__()
        self.share = _positive("share", share)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with noise. `x` is floating, [rows, ...]; shape and dtype stay the same."""
        return x + self.share * x.detach().std(correction=0) * torch.randn_like(x)

    def extra_repr(self) -> str:
        """Return the share, for `repr`."""
        return f"{self.share:g}"


class ClipRows(nn.Module):
    """Layer that scales rows with a larger Euclidean norm than `norm` down to it.

    Args:
        norm: Largest norm of a row; above 0.

    Raises:
        ValueError: `norm` is not above 0.
    """

    def __init__(self, norm: float) -> None:
        """Keep `norm`."""
        super().__init__()
        self.norm = _positive("norm", norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with clipped rows. `x` is floating, [rows, ...]; shape and dtype stay the same."""
        norms = x.detach().flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))
        clipped: Tensor = x * (self.norm / norms.clamp(min=self.norm))
        return clipped

    def extra_repr(self) -> str:
        """Return the norm, for `repr`."""
        return f"{self.norm:g}"


class EqualNormGradients(nn.Module):
    """Identity whose backward scales each row's gradient to the mean norm of the microbatch's rows.

    A gradient of zeros stays zeros.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of `x`, which is floating, [rows, ...]."""
        found: Tensor = _EqualNorm.apply(x)  # type: ignore[no-untyped-call]
        return found


class _EqualNorm(torch.autograd.Function):
    """Function of `EqualNormGradients`: an identity whose backward equalizes the norms of the rows' gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        norms = gradient.flatten(1).norm(dim=1)
        scale = torch.where(norms > 0, norms.mean() / norms, torch.zeros_like(norms))
        return gradient * scale.reshape(-1, *[1] * (gradient.dim() - 1))


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} = {value:g}: expected a number above 0")
    return value


LOSSLESS = CutCodecs()


class _Whole(NamedTuple):
    """Model of a plan that has one stage, with the loss."""

    plan: Plan
    layers: Sequence[nn.Module]
    names: Sequence[str]
    loss: Callable[[Tree, Tree], Tensor]


class AuditedModel:
    """Model of a plan that has one stage, as the factory makes it, cut at a place of choice.

    An error that the model's code raises becomes `ModelRefused`.
    """

    def __init__(
        self, whole: _Whole, cut: int = 0, defence: nn.Module | None = None, codecs: CutCodecs = LOSSLESS
    ) -> None:
        """Cut a model.

        Args:
            whole: Model with its plan and loss.
            cut: Number of the layer after the cut; 0 for no cut.
            defence: Layer that changes what crosses the cut; None for none.
            codecs: Codecs of what crosses the cut.
        """
        self._whole = whole
        self._plan, self._layers, self._names, self._loss = whole
        self.cut, self.codecs = cut, codecs
        self.layer = self._names[cut - 1] if cut else ""
        self._what = f"the audit of cut {cut}, after layer {self.layer}," if cut else "the audit"
        self.defence = nn.Identity() if defence is None else defence

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Make the model of `plan`, without a cut.

        Raises:
            ModelRefused: The model or its loss cannot be made.
        """
        (part,) = build_segments(plan)
        part.load()
        return cls(_Whole(plan, part.layers, part.names, loss_of(plan)))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def cut_before(self, layer: int, defence: nn.Module | None = None, codecs: CutCodecs = LOSSLESS) -> Self:
        """Return a model of the same layers with a cut before one of them.

        Args:
            layer: Number of the layer after the cut, from 1 on.
            defence: Layer that changes what crosses the cut; None for none.
            codecs: Codecs of what crosses the cut.
        """
        return type(self)(self._whole, layer, defence, codecs)

    def features(self, inputs: Tree) -> Tensor:
        """Return what crosses the cut for `inputs`: float32 [rows, features]."""
        with torch.no_grad():
            return side_by_side(self._ran(self._below, _own(inputs)), rows(inputs), self._what)

    def train(self, source: Source, steps: int) -> None:
        """Train `steps` batches of `source` with the plan's optimizer. The layers are left in evaluation mode."""
        torch.manual_seed(self._plan.run.seed)
        every = {id(each): each for layer in self._layers for each in layer.parameters() if each.requires_grad}
        optimizer = optimizer_of(self._plan)([*every.values()]) if every else None
        self._set_mode(training=True)
        for step in range(steps if optimizer is not None else 0):
            self._step(source.batch(step), optimizer)
        self._set_mode(training=False)

    def crossing(self, sample: Batch) -> tuple[Tensor, Tensor]:
        """Return what crosses the cut, and the gradients of the mean loss that come back: float32 [rows, features]."""
        inputs, targets = sample
        sent = map_tensors(_leaf, self._ran(self._sent, _own(inputs)))
        arrived = self._ran(self._arrived, sent)
        features = side_by_side(arrived, rows(inputs), self._what)
        torch.autograd.backward(tensors(self._ran(lambda x: self._loss(self._above(x), targets), _own(arrived))))
        ends = [tensor for tensor in tensors(sent) if tensor.requires_grad]
        gradients: list[Tree] = [torch.zeros_like(end) if end.grad is None else end.grad for end in ends]
        return features, side_by_side(gradients, rows(inputs), self._what)

    def score(self) -> float:
        """Return the plan's first metric, or the loss if it has none, over the rows that the plan holds out."""
        metric = next(iter(metrics_of(self._plan).values()), None)
        total, count = 0.0, 0
        with torch.no_grad():
            for inputs, targets in batches_of(self._plan, Wanted()):
                outputs = self._ran(lambda x: self._above(self._below(x)), _own(inputs))
                found = self._loss(outputs, targets) if metric is None else metric_value(metric, outputs, targets)
                total, count = total + float(found) * rows(inputs), count + rows(inputs)
        return total / count

    def _below(self, inputs: Tree) -> Tree:
        return self._arrived(self._sent(inputs))

    def _sent(self, inputs: Tree) -> Tree:
        for layer in self._layers[: self.cut]:
            inputs = layer(inputs)
        return inputs if self._defends_gradients else self._defended(inputs)

    def _arrived(self, sent: Tree) -> Tree:
        """Return what the layers above the cut are given.

        The defence of gradients comes after the codec: the sender of gradients is there.
        """
        arrived = self.codecs.passed(sent)
        return self._defended(arrived) if self._defends_gradients else arrived

    @property
    def _defends_gradients(self) -> bool:
        return isinstance(self.defence, EqualNormGradients)

    def _defended(self, tree: Tree) -> Tree:
        return map_tensors(lambda tensor: self.defence(tensor) if tensor.is_floating_point() else tensor, tree)

    def _above(self, crossing: Tree) -> Tree:
        for layer in self._layers[self.cut :]:
            crossing = layer(crossing)
        return crossing

    def _step(self, batch: Batch, optimizer: torch.optim.Optimizer | None) -> None:
        inputs, targets = batch
        loss = self._ran(lambda x: self._loss(self._above(self._below(x)), targets), _own(inputs))
        if optimizer is not None:
            optimizer.zero_grad()
            torch.autograd.backward(tensors(loss))
            optimizer.step()

    def _set_mode(self, *, training: bool) -> None:
        for layer in self._layers:
            layer.train(training)

    def _ran(self, work: Callable[[Tree], Tree], given: Tree) -> Tree:
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=self._plan.model.autocast is not None):
                return work(given)
        except BaseException as error:  # user code may raise anything; the cause is chained
            if not raised_by_user_code(error):
                raise
            raise ModelRefused(f"{self._what} failed: {describe_error(error)}") from error


def side_by_side(tree: Tree, count: int, what: str) -> Tensor:
    """Return the floating-point tensors of `tree` side by side, float32 [rows, features].

    Args:
        tree: Tensors, of which those count whose dimension 0 is `count`.
        count: Number of rows.
        what: Subject of the error's text.

    Raises:
        ModelRefused: There is no such tensor.
    """
    usable = [each for each in tensors(tree) if each.is_floating_point() and each.shape[:1] == (count,)]
    if not usable:
        raise ModelRefused(f"{what} found no tensor of numbers with a fraction whose dimension 0 counts the rows")
    return torch.cat([each.detach().float().flatten(1) for each in usable], dim=1)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _own(inputs: Tree) -> Tree:
    """Return copies of `inputs`: a layer may write to its input."""
    return map_tensors(torch.clone, inputs)
