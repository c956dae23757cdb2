"""A schedule as a value: what each worker does in which order, and the program that repeats it over a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Literal

from .actions.action import Action, Kind, Lists
from .actions.shape import Placement
from .alternating import alternate, one_f_one_b
from .clipping import clip_queues
from .merge import merge
from .replicas import Replicas, Shares, replicas_of
from .ties import Tied, Ties, tied_queues

Mode = Literal["sync", "async"]

DELAYED = "2bw"  # the name of the asynchronous schedule whose steps have several microbatches

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
    In asynchronous mode steps overlap as `program` orders them, and a step is one microbatch, but for `DELAYED`.
    `ties` are pairs of stages that share parameters, the lower one first; `tied` says after what they send gradients.
    `frozen` are stages above `first_trainable` of which nothing is trained: their backwards compute the gradients of
    their inputs alone.
    With `clips`, gradients are clipped by their norm over all stages.
    `shares` has, for every stage, what part of the microbatches each of its replicas has; () where no stage has
    several. An action's `stage`, and those of `placement`, are copies as `replicas.py` numbers them.
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
    shares: Shares = ()
    _routes: Mapping[str, tuple[int, int]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def stages(self) -> int:
        """Of the model."""
        return len(self.shares) or self.copies

    @property
    def copies(self) -> int:
        """Of stages: as many as there are stages, where none has replicas."""
        return sum(len(stages) for stages in self.placement)

    @property
    def replicas(self) -> Replicas:
        """Which stage each copy is of, and which microbatches it has."""
        return replicas_of(self.shares or ((1,),) * self.copies, self.microbatches)

    def label(self, copy: int) -> str:
        """ "1", "1.0": a copy for people."""
        return self.replicas.label(copy) if self.shares else str(copy)

    def name_of(self, action: Action) -> str:
        """An action for people: "1F3", "1.0F3"."""
        return f"{self.label(action.stage)}{action.name}"

    def trains(self, copy: int) -> bool:
        """Whether the copy runs backwards."""
        return (self.replicas.stage(copy) if self.shares else copy) >= self.first_trainable

    def adds(self, copy: int) -> bool:
        """Whether the copy exchanges sums with other replicas: gradients, or on the last stage losses."""
        if not self.shares:
            return False
        replicas = self.replicas
        stage, last = replicas.stage(copy), self.stages - 1
        return self.trains(copy) and replicas.is_replicated(stage) and (stage == last or stage not in self.frozen)

    @property
    def delays(self) -> bool:
        """Whether the microbatches of a step read the weights before the newest update, in all stages
        (PipeDream-2BW, arXiv 2006.09503)."""
        return self.name == DELAYED

    @property
    def halves_backwards(self) -> bool:
        """Whether backwards run in two halves."""
        return any(action.kind is Kind.INPUT for actions in self.workers for action in actions)

    @property
    def ahead(self) -> frozenset[str]:
        """The queues from stages that run forward only to other workers. No gradient comes back for what is put there,
        so the schedule does not say how far the producer may be ahead of the consumer: the consumer's credit does."""
        if self.shares:
            return frozenset(
                name
                for name, (source, to) in self.routes.items()
                if not self.trains(source) and self.owner(source) != self.owner(to)
            )
        forward_only = range(self.first_trainable if self.first_trainable < self.stages else 0)
        return frozenset(f"forward-{stage + 1}" for stage in forward_only if self.owner(stage) != self.owner(stage + 1))

    @property
    def routes(self) -> Mapping[str, tuple[int, int]]:
        """Every queue between stages: the stage that puts into it, and the one that takes from it."""
        if self._routes is None:  # looked at for every action, and a schedule has tens of thousands
            object.__setattr__(self, "_routes", self._all_routes())
        return self._routes or {}

    def _all_routes(self) -> dict[str, tuple[int, int]]:
        if self.shares:
            return self._routes_of_replicas()
        forward = {f"forward-{stage}": (stage - 1, stage) for stage in range(1, self.stages)}
        backward = {f"backward-{stage}": (stage + 1, stage) for stage in range(self.first_trainable, self.stages - 1)}
        clip = clip_queues(self.first_trainable, self.stages) if self.clips else {}
        return forward | backward | tied_queues(self.ties, self.tied) | clip

    def takes(self, action: Action) -> tuple[str, ...]:
        """The queues whose next messages `action` needs, in the order in which it takes them."""
        if self.shares:
            return self._taken_by_replica(action)
        besides = f"{_BESIDES[action.kind]}-{action.stage}" if action.kind in _BESIDES else ""
        routes = self.routes
        return tuple(name for name in (action.inbound, besides) if name in routes)

    def gives(self, action: Action) -> str | None:
        """The queue that the result of `action` is put into; the first, if there are several."""
        if self.shares:
            return next(iter(self.given_by_replica(action)), None)
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

    def also_gives(self, action: Action) -> tuple[str, ...]:
        """Further queues that it is put into: the sums of a stage that has more than two replicas."""
        return self.given_by_replica(action)[1:] if action.kind is Kind.ADD else ()

    def given_by_replica(self, action: Action) -> tuple[str, ...]:
        """The queues that the result of `action` is put into, where stages have replicas."""
        replicas, copy = self.replicas, action.stage
        stage = replicas.stage(copy)
        match action.kind:
            case Kind.FORWARD if stage + 1 < self.stages:
                return (replicas.queue("forward", copy, replicas.having(stage + 1, action.microbatch)),)
            case Kind.BACKWARD | Kind.INPUT if stage > self.first_trainable:
                return (replicas.queue("backward", copy, replicas.having(stage - 1, action.microbatch)),)
            case Kind.ADD:
                return tuple(replicas.queue("sum", copy, other) for other in replicas.others(copy))
            case _:
                return ()

    def carried(self, queue: str) -> tuple[int, ...] | None:
        """The microbatches of a step that a queue carries, where stages have replicas; None for one message a step."""
        return None if queue.startswith("sum-") else self.replicas.common(*self.routes[queue])

    def _routes_of_replicas(self) -> dict[str, tuple[int, int]]:
        replicas = self.replicas
        forward = [replicas.between("forward", stage - 1, stage) for stage in range(1, self.stages)]
        backward = [
            replicas.between("backward", stage + 1, stage) for stage in range(self.first_trainable, self.stages - 1)
        ]
        sums = [
            {replicas.queue("sum", copy, other): (copy, other) for other in replicas.others(copy)}
            for copy in replicas.copies
            if self.adds(copy)
        ]
        return {name: ends for each in (*forward, *backward, *sums) for name, ends in each.items()}

    def _taken_by_replica(self, action: Action) -> tuple[str, ...]:
        replicas, copy = self.replicas, action.stage
        stage = replicas.stage(copy)
        match action.kind:
            case Kind.FORWARD if stage:
                return (replicas.queue("forward", replicas.having(stage - 1, action.microbatch), copy),)
            case Kind.BACKWARD | Kind.INPUT if stage + 1 < self.stages:
                return (replicas.queue("backward", replicas.having(stage + 1, action.microbatch), copy),)
            case Kind.UPDATE if self.adds(copy):
                return tuple(replicas.queue("sum", other, copy) for other in replicas.others(copy))
            case _:
                return ()

    def splits(self, stage: int) -> bool:
        """Whether backwards of `stage` run in two halves, all or some."""
        return any(action.kind is Kind.INPUT and action.stage == stage for action in self.workers[self.owner(stage)])

    def owner(self, stage: int) -> int:
        """The worker that owns `stage`. Raises `ValueError` if no worker does."""
        for worker, stages in enumerate(self.placement):
            if stage in stages:
                return worker
        raise ValueError(f"no worker owns stage {stage}: stages are numbered 0 to {self.stages - 1}")

    def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """The actions of `worker` over `steps`, in order, each with its step.

        In synchronous mode the step's list is repeated. In asynchronous mode it is one list over all steps.
        """
        match self.mode:
            case "sync":
                actions = self.workers[worker]
                return chain.from_iterable(zip(repeat(step), actions, strict=False) for step in steps)
            case "async":
                return self._overlapping(worker, steps)

    def _overlapping(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """1F1B over the microbatches of all steps without a flush, with an update right after the last backward of each
        step: of every microbatch in PipeDream (SOSP'19), of several in PipeDream-2BW (arXiv 2006.09503).

        A stage that is not trained ends its steps with the forward.
        """
        count = self.microbatches
        for kind, stage, number in self._one_f_one_b(worker, range(steps.start * count, steps.stop * count)):
            step, microbatch = divmod(number, count)
            yield step, Action(kind, stage, microbatch)
            if microbatch == count - 1 and (kind is Kind.BACKWARD or stage < self.first_trainable):
                yield step, Action(Kind.UPDATE, stage)

    def _one_f_one_b(self, worker: int, numbers: range) -> Iterator[Action]:
        """The actions of `worker` on these microbatches, which are numbered over the whole run."""
        own = self.placement[worker]
        lists = [
            alternate(stage, numbers, warm_up, self.first_trainable)
            for stage, warm_up in enumerate(one_f_one_b(self.stages))
        ]
        if len(own) == 1:
            return lists[own[0]]
        merged = merge(lists, self.first_trainable, ahead=_AHEAD)
        return (action for action in merged if action.stage in own)
