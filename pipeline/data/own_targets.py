"""Two sources as one: the inputs of one, the targets of another, for a process that needs both."""

from stageline.pipeline.errors import DataError

from .batch import Batch
from .numbering import Samples
from .source import Source


class OwnTargets:
    """The batches of `inputs`, with the targets of `targets` in place of their own.

    Raises `DataError` if the two have other numbers of batches, or one holds rows back and the other does not.
    """

    def __init__(self, inputs: Source, targets: Source) -> None:
        if inputs.steps_per_epoch != targets.steps_per_epoch:
            raise DataError(
                f"there are {inputs.steps_per_epoch} batches in an epoch of inputs, and {targets.steps_per_epoch} in "
                "one of data.targets; both must draw the same rows"
            )
        self._inputs, self._targets = inputs, targets
        self.steps_per_epoch = inputs.steps_per_epoch
        self._held_out = _joined(inputs.held_out(), targets.held_out())
        samples: Samples | None = getattr(inputs, "samples", None)
        if samples is not None:
            self.samples = samples

    def batch(self, step: int) -> Batch:
        return self._inputs.batch(step)[0], self._targets.batch(step)[1]

    def held_out(self) -> Batch | Source | None:
        return self._held_out


def _joined(inputs: Batch | Source | None, targets: Batch | Source | None) -> Batch | Source | None:
    if inputs is None and targets is None:
        return None
    if isinstance(inputs, tuple | list) and isinstance(targets, tuple | list):
        return inputs[0], targets[1]
    if inputs is None or targets is None or isinstance(inputs, tuple | list) or isinstance(targets, tuple | list):
        raise DataError("of inputs and data.targets, held_out() returns different things; both must hold the same back")
    return OwnTargets(inputs, targets)
