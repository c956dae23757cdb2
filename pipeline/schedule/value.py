"""A schedule as a value: what each worker does in which order, and the program that repeats it over a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal

from .action import Action, Kind
from .alternating import alternate, one_f_one_b
from .clipping import clip_queues
from .merge import merge
from .shape import Placement
from .ties import Tied, Ties, tied_queues

Mode = Literal["sync", "async"]
Lists = tuple[tuple[Action, ...], ...]  # the actions of each worker in one step

_AHEAD = 2  # microbatches by which the merged lists of asynchronous mode let a stage without backwards be ahead

# What an action takes besides: of the stage that its own one shares parameters with, what it adds its own gradients to,
# or sets them to; of a neighbour, norms of gradients, or the norm by which it clips its own.
_BESIDES = {
    Kind.BACKWARD: "tied",
    Kind.WEIGHT: "tied",
    Kind.SUBTOTAL: "subtotal",
    Kind.NORMS: "norms",
    Kind.CLIP: "clip",
    Kind.UPDATE: "total",
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """For every worker, its list of actions for a step.

    `workers[w]` is one step of worker w and ends each of its stages with the stage's `U`. Stages below
    `first_trainable` run forward only; their `U` marks the end of the step there.
    In asynchronous mode a step is one microbatch, and steps overlap as `program` orders them.
    `ties` are pairs of stages that share parameters, the lower one first; `tied` says after what they send gradients.
    `frozen` are stages above `first_trainable` of which nothing is trained: their backwards compute the gradients of
    their inputs alone.
    With `clips`, gradients are clipped by their norm over all stages.
    """

    name: str
    mode: Mode
    placement: Placement
    microbatches: int
    workers: Lists
    first_trainable: int = 0
    ties: Ties = ()
    tied: Tied = "microbatch"
    frozen: tuple[int, ...] = ()
    clips: bool = False

    @property
    def stages(self) -> int:
        return sum(len(stages) for stages in self.placement)

    @property
    def ahead(self) -> frozenset[str]:
        """The queues from stages that run forward only to other workers. No gradient comes back for what is put there,
        so the schedule does not say how far the producer may be ahead of the consumer: the consumer's credit does."""
        forward_only = range(self.first_trainable if self.first_trainable < self.stages else 0)
        return frozenset(f"forward-{stage + 1}" for stage in forward_only if self.owner(stage) != self.owner(stage + 1))

    @property
    def routes(self) -> dict[str, tuple[int, int]]:
        """Every queue between stages: the stage that puts into it, and the one that takes from it."""
        forward = {f"forward-{stage}": (stage - 1, stage) for stage in range(1, self.stages)}
        backward = {f"backward-{stage}": (stage + 1, stage) for stage in range(self.first_trainable, self.stages - 1)}
        clip = clip_queues(self.first_trainable, self.stages) if self.clips else {}
        return forward | backward | tied_queues(self.ties, self.tied) | clip

    def takes(self, action: Action) -> tuple[str, ...]:
        """The queues whose next messages `action` needs, in the order in which it takes them."""
        besides = f"{_BESIDES[action.kind]}-{action.stage}" if action.kind in _BESIDES else ""
        routes = self.routes
        return tuple(name for name in (action.inbound, besides) if name in routes)

    def gives(self, action: Action) -> str | None:
        """The queue that the result of `action` is put into."""
        match action.kind:
            case Kind.TIED:
                names = [f"tied-{lower}" for lower, upper in self.ties if upper == action.stage]
            case Kind.SUBTOTAL:
                names = [f"subtotal-{lower}" for lower, upper in self.ties if upper == action.stage]
            case Kind.NORMS:
                names = [f"norms-{action.stage - 1}"]
            case Kind.CLIP:
                names = [f"clip-{action.stage + 1}"]
            case Kind.UPDATE:
                names = [f"total-{upper}" for lower, upper in self.ties if lower == action.stage]
            case _:
                names = [action.outbound]
        return next((name for name in names if name in self.routes), None)

    def owner(self, stage: int) -> int:
        """The worker that owns `stage`. Raises `ValueError` if no worker does."""
        for worker, stages in enumerate(self.placement):
            if stage in stages:
                return worker
        raise ValueError(f"no worker owns stage {stage}: stages are numbered 0 to {self.stages - 1}")

    def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """The actions of `worker` over `steps`, in order, each with its step.

        In synchronous mode the step's list is repeated. In asynchronous mode it is one list over all steps, in which
        the microbatch is always 0, since the step is the microbatch's number.
        """
        match self.mode:
            case "sync":
                actions = self.workers[worker]
                return chain.from_iterable(zip(repeat(step), actions, strict=False) for step in steps)
            case "async":
                return self._overlapping(worker, steps)

    def _overlapping(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """PipeDream (SOSP'19): 1F1B over all steps without a flush, with an update right after each backward.

        A stage that is not trained ends its steps with the forward.
        """
        for kind, stage, step in self._one_f_one_b(worker, steps):
            yield step, Action(kind, stage)
            if kind is Kind.BACKWARD or stage < self.first_trainable:
                yield step, Action(Kind.UPDATE, stage)

    def _one_f_one_b(self, worker: int, steps: range) -> Iterator[Action]:
        """The actions of `worker`, with steps in place of microbatches."""
        own = self.placement[worker]
        lists = [
            alternate(stage, steps, warm_up, self.first_trainable)
            for stage, warm_up in enumerate(one_f_one_b(self.stages))
        ]
        if len(own) == 1:
            return lists[own[0]]
        merged = merge(lists, self.first_trainable, ahead=_AHEAD)
        return (action for action in merged if action.stage in own)
