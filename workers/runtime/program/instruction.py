"""One thing that a worker does in a run: an action of a step, with the queues that it touches."""

import msgspec

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.schedule import Action, Kind

from .replays import CacheUse


class Instruction(msgspec.Struct, frozen=True):
    """An action of one step with the queues it takes from and gives to. `evaluates`: no stash, no gradient.
    `needs_credit`: no gradient comes back for what it gives, so the consumer says when it may be computed.

    `also`: further queues that get the same.

    `name` is the action's, as in "1F0"; its messages have `number` in their queues. `counted`: its step is one of the
    run's, which the ledger knows; evaluated batches are not, and `step` then numbers those. `cache`: what is done with
    the cache of what leaves the frozen first stages.
    """

    step: int
    action: Action
    number: int
    name: str
    takes: tuple[QueueKey, ...]
    gives: QueueKey | None
    evaluates: bool = False
    counted: bool = True
    needs_credit: bool = False
    also: tuple[QueueKey, ...] = ()
    cache: CacheUse | None = None

    @property
    def kind(self) -> Kind:
        """The action's kind."""
        return self.action.kind

    @property
    def stage(self) -> int:
        """The stage of the action; a replica's own number where stages have several."""
        return self.action.stage

    @property
    def microbatch(self) -> int:
        """The microbatch of the action."""
        return self.action.microbatch

    @property
    def inputs(self) -> tuple[QueueKey, ...]:
        """The queues that bring what it computes from, or once did: what is replayed is what one of them brought."""
        if self.cache is CacheUse.REPLAYED:
            return (QueueKey(Flow.FORWARD, self.action.stage),)
        return self.takes

    def __str__(self) -> str:
        if self.action.kind is Kind.VERDICT:
            return f"{self.name} of round {self.step} of evaluation"
        return f"{self.name} of {'step' if self.counted else 'evaluated batch'} {self.step}"
