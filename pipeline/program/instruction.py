"""An operation of a worker's program, and an instruction: the operation in one step of a run."""

import msgspec

from stageline.pipeline.schedule import Action

from .queue import Per


class Op(msgspec.Struct, frozen=True):
    """An entry of a worker's program.

    Attributes:
        action: Action to compute: a kind, for a stage and a microbatch.
        name: The action for people: "1F0".
        per: Unit that the operation runs once for.
        takes: Names of the queues whose next messages the operation needs, in the order in which it takes them.
        gives: Names of the queues that the result is put into.
        awaits: Queue whose consumer says when the operation may be computed, since no gradient comes back. Empty for
            none.
        marks: Words that a feature has left for the code that carries the operation out.
    """

    action: Action
    name: str
    per: Per = Per.MICROBATCH
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    awaits: str = ""
    marks: tuple[str, ...] = ()


class Instruction(msgspec.Struct, frozen=True):
    """An operation in one `step`: of training, or of the other unit that the operation runs once for."""

    step: int
    op: Op

    @property
    def action(self) -> Action:
        """Action to compute."""
        return self.op.action

    @property
    def kind(self) -> str:
        """Kind of the action: "F"."""
        return self.op.action.kind

    @property
    def stage(self) -> int:
        """Stage, or copy, that the action is computed for."""
        return self.op.action.stage

    @property
    def microbatch(self) -> int:
        """Microbatch of the step; 0 for an action of the whole step."""
        return self.op.action.microbatch

    @property
    def name(self) -> str:
        """The action for people: "1F0"."""
        return self.op.name

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the queues whose next messages the instruction needs."""
        return self.op.takes

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of the queues that the result is put into."""
        return self.op.gives

    @property
    def evaluates(self) -> bool:
        """True if the instruction belongs to an evaluated batch: no stash, no gradient."""
        return self.op.per is Per.EVALUATED

    @property
    def counted(self) -> bool:
        """True if the step is one of training, which the ledger knows."""
        return not self.evaluates

    def __str__(self) -> str:
        """Return the instruction for people: "1F0 of step 3"."""
        return f"{self.name} of {'evaluated batch' if self.evaluates else 'step'} {self.step}"
