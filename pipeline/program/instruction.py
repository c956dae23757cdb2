"""One operation of a worker's program, and the same in one step of a run: an instruction."""

import msgspec

from stageline.pipeline.schedule import Action

from .queue import Per


class Op(msgspec.Struct, frozen=True):
    """One entry of a worker's program.

    Attributes:
        action: What is computed: a kind, for a stage and a microbatch.
        name: The action for people, as in "1F0".
        per: What it runs once for.
        takes: Names of the queues whose next messages it needs, in the order in which it takes them.
        gives: Names of the queues that its result is put into.
        awaits: Queue whose consumer says when it may be computed, since no gradient comes back. Empty for none.
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
    """An operation in one `step`: of training, or whatever else its operation runs once for."""

    step: int
    op: Op

    @property
    def action(self) -> Action:
        """What is computed."""
        return self.op.action

    @property
    def kind(self) -> str:
        """Its kind, as in "F"."""
        return self.op.action.kind

    @property
    def stage(self) -> int:
        """The stage, or copy, that it is computed for."""
        return self.op.action.stage

    @property
    def microbatch(self) -> int:
        """The microbatch of its step; 0 where it is of the whole step."""
        return self.op.action.microbatch

    @property
    def name(self) -> str:
        """The action's, as in "1F0"."""
        return self.op.name

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the queues whose next messages it needs."""
        return self.op.takes

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of the queues that its result is put into."""
        return self.op.gives

    @property
    def evaluates(self) -> bool:
        """True if it belongs to an evaluated batch: no stash, no gradient."""
        return self.op.per is Per.EVALUATED

    @property
    def counted(self) -> bool:
        """True if its step is one of training, which the ledger knows."""
        return not self.evaluates

    def __str__(self) -> str:
        return f"{self.name} of {'evaluated batch' if self.evaluates else 'step'} {self.step}"
