"""Gradients clipped by their norm over all stages: `N` gathers norms, `C` clips by the total.

The result is that of `torch.nn.utils.clip_grad_norm_` on the whole model:

    stage 2   norms of its gradients             -- gathered -->   stage 1
    stage 1   those, and norms of its own        -- gathered -->   stage 0
    stage 0   all norms, in the unsplit model's order of parameters; the norm of these is the total
    each      gradients times min(1, most / (total + 1e-6)), with the total from the stage before

A gathered norm has the dtype of its gradient. docs/project/decisions/clipping.md says why the bits are those of the
unsplit model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from stageline.pipeline.errors import GradientMismatch, StageError
from stageline.pipeline.feature import Compute, Feature, Operation
from stageline.pipeline.stage.layers.memory import is_split, whole
from stageline.pipeline.tree import Tree, describe

_Part = tuple[torch.Tensor, torch.Tensor]  # numbers of parameters, int64 [n], and the norms of their gradients, [n]


class ClippedGradients(Feature):
    """The feature that computes the norms and the clips of stages that have a `clip_norm`."""

    name = "clipping"

    def __init__(self, last: int, loss: Callable[[int], float | None]) -> None:
        """Prepare for the stages of a worker.

        Args:
            last: Number of the last stage.
            loss: Returns the loss of a step there, or raises: a bad microbatch is named before its gradients are.
        """
        self._last = last
        self._loss = loss

    def handlers(self, stage: Any) -> Mapping[str, Compute]:
        """Return the functions that compute `N` (norms) and `C` (clip) on `stage`."""

        def norms(operation: Operation, received: Sequence[Tree]) -> Tree:
            if stage.index == self._last:
                self._loss(operation.step)
            found: Tree = stage.norms(*received)
            return found

        return {"N": norms, "C": lambda operation, received: stage.clip(*received)}


class GradientNotFinite(StageError):
    """Error that a gradient which is to be clipped has a norm that is not finite.

    Mend: Look at the batch of this step, or lower the learning rate.

    Example: the norm of the gradient of head.weight is nan: clipped by it, every weight would become nan. Look at the
    batch of this step, or lower the learning rate
    """

    error_code = "SL205"


class NoClip:
    """The absence of clipping, on a stage that clips nothing.

    Attributes:
        total: The norm by which the newest step was clipped; None if there was none.
    """

    total: float | None = None

    def __init__(self, stage: int) -> None:
        """Take the number of the stage, for errors."""
        self._stage = stage

    def gather(self, later: Tree) -> Tree:
        """Raise `StageError`, since the stage clips nothing."""
        raise StageError(f"stage {self._stage} clips no gradients: set clip_norm in its StageSettings")

    def clip(self, total: Tree, device: torch.device) -> torch.Tensor:
        """Raise `StageError`, since the stage clips nothing."""
        raise StageError(f"stage {self._stage} clips no gradients: set clip_norm in its StageSettings")


class GradientClip(NoClip):
    """The gradients of one stage, clipped so that their norm over all stages is at most a limit.

    Attributes:
        total: The norm by which the newest step was clipped; None before the first.
    """

    def __init__(
        self, stage: int, most: float, parameters: Mapping[str, torch.Tensor], order: Mapping[str, int]
    ) -> None:
        """Prepare for the parameters of a stage.

        Args:
            stage: Number of the stage, for errors.
            most: Largest norm over all stages.
            parameters: The parameters that the stage trains, by name.
            order: Number of each parameter among those of the unsplit model, by the same names.
        """
        super().__init__(stage)
        self._most = most
        self._parameters = sorted((order[name], name, each) for name, each in parameters.items())
        self._gathered: list[_Part] = []

    def gather(self, later: Tree) -> Tree:
        """Return the norms of this stage's gradients together with those of later stages.

        Args:
            later: The return value of `gather` on the next stage; None on the last stage.

        Returns:
            Pairs of parameters' numbers, int64 [n], and norms, [n].

        Raises:
            GradientNotFinite: The norm of a gradient is nan or infinite.
            GradientMismatch: `later` has another form.
        """
        self._gathered = [*self._checked(later), *self._own()]
        return tuple(self._gathered)

    def clip(self, total: Tree, device: torch.device) -> torch.Tensor:
        """Clip the gradients by their norm over all stages.

        Args:
            total: The norm, a 0-dimensional tensor, that the previous stage returned; None on the first stage, which
                computes it.
            device: Device on which the first stage computes the norm.

        Returns:
            The norm over all stages, 0-dimensional, on the CPU.

        Raises:
            GradientNotFinite: The norm is nan or infinite.
            GradientMismatch: `total` is no 0-dimensional tensor.
        """
        norm = self._norm(device) if total is None else total
        if not isinstance(norm, torch.Tensor) or norm.dim():
            raise GradientMismatch(f"stage {self._stage} got {describe(norm)} to clip by; expected one number")
        self._gathered = []
        self.total = norm.item()
        for alike in _by_kind([each for _, _, each in self._parameters]):
            clip_grads_with_norm_(alike, self._most, norm.to(device))
        return norm.cpu()

    def _own(self) -> Iterator[_Part]:
        """Yield numbers and norms of this stage's gradients, one pair for each dtype."""
        found = [(number, name, each.grad) for number, name, each in self._parameters if each.grad is not None]
        gradients = [gradient for _, _, gradient in found]
        for norms, places in _norms_by_dtype(gradients):
            self._demand_finite(norms, [f"the gradient of {found[place][1]}" for place in places])
            yield torch.tensor([found[place][0] for place in places]), norms

    def _norm(self, device: torch.device) -> torch.Tensor:
        numbered = {number: norm for part in self._gathered for number, norm in _numbered(part)}
        if not numbered:
            return torch.tensor(0.0)
        ordered = [numbered[number].to(device) for number in sorted(numbered)]
        grouped = _group_tensors_by_device_and_dtype([list(ordered)]).values()
        norms = [norm for ([alike], _) in grouped for norm in alike if norm is not None]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        self._demand_finite(total.reshape(1), ["all gradients together"])
        return total

    def _demand_finite(self, norms: torch.Tensor, names: Sequence[str]) -> None:
        finite = norms.isfinite()
        if not finite.all():
            place = int(finite.logical_not().nonzero()[0])
            raise GradientNotFinite(
                f"the norm of {names[place]} is {norms[place].item()}: clipped by it, every weight "
                f"would become nan. Look at the batch of this step, or lower the learning rate"
            )

    def _checked(self, later: Tree) -> Iterator[_Part]:
        match later:
            case None:
                return
            case tuple() | list():
                for part in later:
                    yield self._part(part)
            case _:
                raise self._mismatch(later)

    def _part(self, part: Tree) -> _Part:
        match part:
            case (torch.Tensor() as numbers, torch.Tensor() as norms) if (
                numbers.dtype == torch.int64 and numbers.dim() == 1 and numbers.shape == norms.shape
            ):
                return numbers, norms
            case _:
                raise self._mismatch(part)

    def _mismatch(self, given: Tree) -> GradientMismatch:
        return GradientMismatch(
            f"stage {self._stage} got {describe(given)} for the norms of later stages' gradients; expected pairs of "
            f"numbers of parameters and norms"
        )


def clip_of(stage: int, most: float | None, parameters: Mapping[str, torch.Tensor], order: Mapping[str, int]) -> NoClip:
    """Return the clipping of one stage's gradients.

    Args:
        stage: Number of the stage, for errors.
        most: Largest norm over all stages; None if nothing is clipped.
        parameters: The parameters that the stage trains, by name.
        order: Number of each parameter among those of the unsplit model, by the same names.
    """
    return NoClip(stage) if most is None else GradientClip(stage, most, parameters, order)


def numbers_of(parameters: Iterable[str], first_layer: int) -> dict[str, int]:
    """Return numbers for the `parameters` of layers from `first_layer` on, by name, in their order.

    Parameters of earlier stages have lower numbers, those of later stages higher ones.
    """
    return {name: first_layer * 2**32 + place for place, name in enumerate(parameters)}


def _norms_by_dtype(gradients: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield the norms of `gradients` of one dtype and device, on the CPU, with their places in `gradients`.

    They are computed as `clip_grad_norm_` does.
    """
    if not gradients:
        return
    grouped = _group_tensors_by_device_and_dtype([list(gradients)], with_indices=True)
    for (device, _), ([alike], places) in grouped.items():
        same = [each for each in alike if each is not None]
        together = _has_foreach_support(same, device) and len(_by_kind(same)) == 1
        norms = torch._foreach_norm(same, 2.0) if together else [torch.linalg.vector_norm(each, 2.0) for each in same]
        yield torch.stack([whole(norm) for norm in norms]).cpu(), places


def _by_kind(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return `tensors` as up to two lists: whole ones, and those split over a group of processes.

    Torch takes no list of both.
    """
    split = [is_split(each) for each in tensors]
    kinds = [[each for each, of in zip(tensors, split, strict=True) if of is kind] for kind in (False, True)]
    return [alike for alike in kinds if alike]


def _numbered(part: _Part) -> Iterator[tuple[int, torch.Tensor]]:
    numbers, norms = part
    return zip(numbers.tolist(), norms.unbind(), strict=True)
