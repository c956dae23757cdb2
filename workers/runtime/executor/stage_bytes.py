"""Measures what each stage of a worker takes in memory, in its first step: see `pipeline/stage/held.py`."""

from collections.abc import Callable, Mapping, Sequence

from torch.autograd.graph import saved_tensors_hooks

from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.held import SavedBytes, lasting_bytes
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, tensors

CarriesOut = Callable[[Instruction, Sequence[Tree]], Tree]
HeldBytes = tuple[int, int, int | None]  # that last; of a microbatch in flight; and so many more between its halves


class StageBytesMeter:
    """Measures `stages` while `carry_out` computes: of each, the first forward that is trained and the first update.
    `found`, by stage; None for what is between the halves of a backward that cannot be split."""

    def __init__(self, stages: Mapping[int, Stage], carry_out: CarriesOut, found: dict[int, HeldBytes]) -> None:
        self._stages = stages
        self._carry_out = carry_out
        self._found = found
        self._microbatch: dict[int, tuple[int, int | None]] = {}  # by stage, until its first update

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        """The same as without it."""
        index, kind = instruction.action.stage, instruction.action.kind
        if index in self._found or instruction.evaluates or index not in self._stages:
            return self._carry_out(instruction, received)
        if kind is Kind.FORWARD and index not in self._microbatch:
            return self._first_forward(index, instruction, received)
        result = self._carry_out(instruction, received)
        if kind is Kind.UPDATE:
            lasting = lasting_bytes(self._stages[index])
            self._found[index] = sum(lasting.values()), *self._microbatch.pop(index, (0, 0))
        return result

    def _first_forward(self, index: int, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        saved, stage = SavedBytes(self._stages[index]), self._stages[index]
        with saved_tensors_hooks(saved.note, lambda tensor: tensor):
            output = self._carry_out(instruction, received)
        for tensor in tensors(output):
            saved.note(tensor)
        self._microbatch[index] = (saved.bytes, stage.halfway_bytes()) if stage.in_flight else (0, 0)
        return output
