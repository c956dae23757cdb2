"""Backwards of which the first half has run, and the second waits for its turn. `split.py` computes both."""

from collections.abc import Sequence

import torch

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.state.versions import Key
from stageline.pipeline.tree import tensors

from .split import Root, SplitBackward, halfway_bytes
from .stash import Stashed


class WaitingHalves:
    """Those of stage number `stage`; in `kept`, the oldest first."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.kept: dict[Key, SplitBackward] = {}

    def run_first(
        self, key: Key, stashed: Stashed, outputs: list[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Hands gradients to the inputs of microbatch `key`, from `outputs` with theirs. From now on the graph alone
        has the outputs: `stashed` and the list lose them. Raises `StageError` for a layer that cannot be divided."""
        half = SplitBackward(self._stage, outputs, gradients, stashed.input_nodes.anchor)
        stashed.outputs = None
        outputs.clear()
        half.compute_inputs()
        self.kept[key] = half

    def run_second(self, step: int | None, microbatch: int | None, shared: Sequence[Root]) -> None:
        """Adds the gradients of weights, of the named microbatch or of the oldest; before them those of `shared` ones.
        One whose first half had nothing to run, since nothing required a gradient, adds those alone."""
        oldest = next(iter(self.kept), (0, 0))
        key = oldest if step is None or microbatch is None else (step, microbatch)
        half = self.kept.pop(key, None)
        if half is None:
            half = SplitBackward(self._stage, (), (), None)
        half.compute_weights(shared)

    def bytes_after(self, stashed: Stashed) -> int | None:
        """What this one would take between the halves, besides what its forward has saved; None if it cannot be
        divided."""
        outputs = [output for output in tensors(stashed.outputs) if output.requires_grad]
        try:
            return halfway_bytes(self._stage, outputs, stashed.input_nodes.anchor)
        except StageError:
            return None
