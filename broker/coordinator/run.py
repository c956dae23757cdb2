"""A run as its broker is given it: its part of the plan, how it ended or is to stop, and which run a store holds."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Literal

import msgspec

from stageline.broker.control.messages import Stop, StopRun
from stageline.broker.control.place_keys import QueueGuard, guard_of
from stageline.broker.control.protocol import RunKeys
from stageline.broker.control.records import RunLength
from stageline.broker.control.store import Fact, Store
from stageline.broker.errors import BrokerError
from stageline.broker.keys.access import OPEN, Access
from stageline.broker.keys.parties import Parties
from stageline.broker.ledger.losses import Leases
from stageline.broker.ledger.recovery import EarlierRun
from stageline.pipeline.evaluation import Criterion
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.copies import copy_groups
from stageline.pipeline.program import Neighbours, neighbours_of
from stageline.pipeline.schedule import Placement, Schedule

RESUMED, _RUN = "resumed", "run"  # names of facts
DELAY = 1.0  # seconds at most from a stage's start of a step until the broker's decision on that news arrives there
MOTION = 0.3  # seconds that steps must have been observed for to know their pace
_LEAST = 0.1  # seconds between two reports


class OtherRun(BrokerError):
    """Error that the broker's store holds a run of another plan.

    Mend: Start it with its own plan, or give this run another `run.dir`.

    Example: the broker's store holds run a of another plan (digest 0f1e2d3c4b5a, now 9a8b7c6d5e4f); start it with its
    own plan, or give this run another run.dir
    """

    error_code = "SL413"


class RunPhase(StrEnum):
    """A run's progress, as shown to users and stored."""

    WAITING = "waiting"  # for workers
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"  # or stopped


class Resumption(StrEnum):
    """A way of resuming a run, which `run_of` stores for the coordinator."""

    FROM_SNAPSHOTS = "from snapshots"  # its workers are asked for their snapshots
    AS_A_WHOLE = "as a whole"  # all places are free
    UNLESS_AT_WORK = "unless at work"  # likewise, after its workers had time to reconnect

    @classmethod
    def stored_in(cls, facts: Mapping[str, Fact]) -> "Resumption | None":
        """Return the way of resuming among a store's `facts`; None if nothing is left to resume."""
        fact = facts.get(RESUMED)
        return cls(str(fact["how"])) if fact else None


class RunOutcome(msgspec.Struct, frozen=True):
    """The end of a run: `reason` for people, `code` the exit code.

    A finished run has the digest of its weights in `weights_sha256`.
    """

    phase: RunPhase
    reason: str
    code: int
    weights_sha256: str | None = None
    at_step_end: bool = False
    step: int | None = None  # the number of steps that the workers were to finish first
    early: bool = False  # a finished run has not trained all its steps: its evaluations were not getting better

    @property
    def stop_message(self) -> Stop:
        """The message that tells workers to end the run this way."""
        return Stop(self.reason, self.code, self.at_step_end, self.step)


class StopPlan:
    """A request to stop a run, with what is known about the step after which all stages can stop.

    All stages have to stop after the same step, or their last snapshots make no checkpoint. That step is late enough
    that no stage has passed it when the message arrives, and otherwise as early as possible. In a scripted run it is
    the last step that the script has called for, if that has begun a moment later. Times are seconds since the epoch.
    """

    def __init__(self) -> None:
        """Start without a request."""
        self.request: StopRun | None = None
        self.called_for: int | None = None  # all training steps of a script that makes no more calls
        self.decided = False  # the request has ended the run
        self._deadline = 0.0  # when it is decided, whatever is known
        self._begun = 0  # the first step that no stage had begun when it came
        self._seen: deque[tuple[float, int]] = deque()  # when, and the first step that no stage had begun

    def ask(self, request: StopRun, begun: int, now: float) -> bool:
        """Note a request to stop; return True for the first.

        Later requests replace the first, but the time counts from the first.

        Args:
            request: The request.
            begun: The first step that no stage has begun.
            now: Seconds since the epoch.
        """
        first, self.request = self.request is None, request
        if first:
            self._deadline, self._begun = now + DELAY, begun
        return first

    def decide(self) -> None:
        """Note that the request ends the run."""
        self.decided = True

    def note_calls(self, told: int | None, *, present: bool) -> None:
        """Note the number of steps that a script has called for, if it is `present`.

        `told` is None as long as the script makes more calls.
        """
        self.called_for = told if present else self.called_for

    def note_progress(self, begun: int, now: float) -> None:
        """Note that `begun` is the first step that no stage has begun."""
        self._seen.append((now, begun))
        while len(self._seen) > 1 and self._seen[1][0] <= now - DELAY:
            self._seen.popleft()

    def knows_last_step(self, begun: int, now: float, *, asks_script: bool) -> bool:
        """Return True once `last_step` is known, or is waited for no longer.

        Args:
            begun: The first step that no stage has begun.
            now: Seconds since the epoch.
            asks_script: True if there is a script that is asked for its last call.
        """
        if now >= self._deadline:
            return True
        if self.called_for is not None:  # of which two may be on their way, and may take long
            return begun >= self.called_for
        paced = bool(self._seen) and (now - self._seen[0][0] >= DELAY or self._moving(now) >= MOTION)
        return paced and not asks_script

    def last_step(self, begun: int, training_steps: int | None, now: float) -> int:
        """Return the number of steps after which every stage can stop.

        Args:
            begun: The first step that no stage has begun.
            training_steps: Steps that the run trains; None if not known.
            now: Seconds since the epoch.
        """
        if self.called_for is not None:  # if none has begun since the request, a step takes longer than that
            return self.called_for if begun > self._begun else min(begun, self.called_for)
        lately = max(0, begun - self._seen[0][1]) if self._seen else 0
        # One or two steps do not tell how long each took, only that they may be long.
        ahead = lately if lately <= 2 else ceil(lately / max(_LEAST, self._moving(now)) * DELAY)
        return begun + ahead if training_steps is None else min(begun + ahead, training_steps)

    def _moving(self, now: float) -> float:
        """Return for how many of the observed seconds the run has made progress."""
        first = self._seen[0][1]
        return now - max(at for at, begun in self._seen if begun == first)


class ScriptCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The code that workers on other machines need.

    Attributes:
        torch: The version of torch.
        files: SHA-256 (hex) of each file with a script's model and functions, by its path in the folder of the code,
            such as "model.py".
    """

    torch: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The broker's part of the plan.

    Attributes:
        plan: The plan's digest.
        settings: The plan's mapping.
        restarts: The number of times in a row that a worker may be replaced.
        snapshots: True if the stages write snapshots: queues are then trimmed to complete checkpoints. Without, queues
            are trimmed to what every stage has finished, and no worker can be replaced.
        length: The run's length, if it is known before a worker reports it.
        code: The code of a scripted run whose workers join by its names.
        earlier: The run that this one goes on from in another layout; its stages begin at no step below.
        supervised: True if the process that started the broker starts it again. It starts the workers again too, unless
            they join by a script's names.
        access: The keys of those who may speak to the broker.
    """

    name: str
    plan: str
    settings: Mapping[str, object]
    schedule: Schedule
    leases: Leases
    log_every: int
    restarts: int = 0
    snapshots: bool = False
    snapshot_every: int = 0  # steps; 0: not known
    length: RunLength | None = None
    scripted: bool = False  # a user's script calls the workers, and has the last place
    code: ScriptCode | None = None
    earlier: EarlierRun | None = None
    criterion: Criterion | None = None  # by which rounds of evaluation are compared
    evaluates_every: int | Literal["epoch"] | None = None  # steps; None: only after the last
    keeps_best: bool = False  # the checkpoint of the best round
    supervised: bool = False
    schedule_memory: int | None = None  # bytes that a worker may take, in a run that chooses its schedule
    access: Access = OPEN
    queues: str = "memory://"  # address of the workers' queues
    neighbours: Neighbours = ()  # places whose workers may hold copies of snapshots, for each place

    @property
    def placement(self) -> Placement:
        """The stages of each place: those of the workers, and none for the script."""
        return (*self.schedule.placement, ()) if self.scripted else self.schedule.placement

    @property
    def has_keys(self) -> bool:
        """True if the broker has keys, so that workers may be on other machines, at addresses of their own."""
        return self.access.register is not None

    @property
    def parties(self) -> Parties:
        """The parties whose keys alone protect the queues; none in a run whose broker hands out keys."""
        register = self.access.register
        return () if register is None else register.record.parties

    @property
    def guard(self) -> QueueGuard:
        """The protection of the workers' queues, as far as the broker's plan tells it."""
        return guard_of(self.queues, is_private=not self.access.insecure)

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The stages of each place for people: "1", or "1.0" for the first replica of several."""
        return tuple(tuple(map(self.schedule.label, stages)) for stages in self.placement)

    @property
    def script(self) -> int | None:
        """The index of the script's place, or None."""
        return next((index for index, stages in enumerate(self.placement) if not stages), None)

    @property
    def lease(self) -> float:
        """The seconds that a worker may be silent."""
        return self.leases.silence

    @property
    def patience(self) -> float:
        """The seconds that an empty place waits for a replacement before the run is given up.

        A replacement may have to load its model first.
        """
        return max(60.0, 3 * self.lease, self.leases.loading)

    @classmethod
    def of(
        cls, plan: Plan, schedule: Schedule, length: RunLength | None = None, code: ScriptCode | None = None
    ) -> "RunConfig":
        """Return the broker's part of a plan whose number of stages is known.

        Args:
            plan: The plan.
            schedule: The schedule that the run begins with.
            length: The run's length, if it is known.
            code: The code of a scripted run whose workers join by its names.
        """
        recovery = plan.recovery
        return cls(
            plan.run.name,
            plan.digest(),
            plan.as_mapping(),
            schedule,
            Leases(recovery.lease, recovery.longest_action, recovery.loading),
            plan.run.log_every,
            recovery.restarts if recovery.on else 0,
            snapshots=recovery.on,
            snapshot_every=recovery.snapshot_every,
            length=length,
            scripted=plan.scripted,
            code=code,
            criterion=plan.criterion,
            evaluates_every=None if plan.evaluation is None else plan.evaluation.every,
            keeps_best=plan.keeps_best,
            schedule_memory=plan.schedule.memory if plan.schedule.is_auto else None,
            queues=plan.queues.url,
            neighbours=neighbours_of(len(plan.workers), copy_groups(plan)),
        )


class RunIdentity(msgspec.Struct, frozen=True):
    """A store's record of which run it holds: the run's id, its plan's digest, and the key of all its secrets.

    With `adopted`, the records began under an id that was given. A former broker's records may then be lost, and with
    them the key: its workers cannot prove who they are.
    """

    id: str
    plan: str
    key: str = ""  # hex
    adopted: bool = False

    @classmethod
    def stored_in(cls, facts: Mapping[str, Fact]) -> "RunIdentity | None":
        """Return the identity among a store's `facts`, or None."""
        fact = facts.get(_RUN)
        return msgspec.convert(fact, cls) if fact else None

    @property
    def keys(self) -> RunKeys:
        """The run's secrets, derived from its key."""
        return RunKeys(self.id, bytes.fromhex(self.key))


def run_of(
    store: Store, plan: str, fresh: str, key: bytes, *, new: bool = False, resume: bool = False, alone: bool = False
) -> str:
    """Return the id of the run to serve: the stored one if it has not ended, or if `fresh` names it; else `fresh`.

    Records of another run that has ended are deleted. With `resume`, the stored run continues however it was stopped:
    all places are free, and every stage starts at the newest complete checkpoint; a finished run stays finished. If no
    end is recorded, the run's workers may still be running and first get time to reconnect, unless the broker is
    `alone`. If the store has lost the run, the workers will be asked for their snapshots.

    Args:
        store: The store of the run's records.
        plan: The plan's digest.
        fresh: The id for a new run.
        key: Random bytes, for a run that has no key.
        new: True if no broker has served `fresh` before.
        resume: True to resume the stored run.
        alone: True if no worker of the stored run can still run.

    Raises:
        OtherRun: The stored run has another digest than `plan`.
    """
    facts = store.load().facts
    kept = RunIdentity.stored_in(facts)
    if kept is None or (not resume and facts.get("outcome") and kept.id != fresh):
        store.begin()
        if resume:  # stored before the run's id: a broker that finds the id also finds this
            store.put(RESUMED, {"how": Resumption.FROM_SNAPSHOTS})
        _put(store, RunIdentity(fresh, plan, key.hex(), adopted=not new))
        return fresh
    if kept.plan != plan:
        raise OtherRun(
            f"the broker's store holds run {kept.id} of another plan (digest {kept.plan[:12]}, now {plan[:12]}); "
            "start it with its own plan, or give this run another run.dir"
        )
    # The first write: from here on the store is this broker's.
    _put(store, msgspec.structs.replace(kept, key=kept.key or key.hex()))
    ended = facts.get("outcome")
    finished = ended and msgspec.convert(ended, RunOutcome).phase is RunPhase.FINISHED
    if resume and not finished:  # the outcome is cleared last: a broker killed in between leaves a stopped run
        store.put(RESUMED, {"how": _resumption(facts, alone=alone)})
        store.put("outcome", {})
    return kept.id


def _put(store: Store, run: RunIdentity) -> None:
    store.put(_RUN, msgspec.to_builtins(run))


def _resumption(facts: Mapping[str, Fact], *, alone: bool) -> Resumption:
    if (before := Resumption.stored_in(facts)) in (Resumption.FROM_SNAPSHOTS, Resumption.AS_A_WHOLE):
        return before  # no worker has been placed yet
    return Resumption.AS_A_WHOLE if alone or facts.get("outcome") else Resumption.UNLESS_AT_WORK
