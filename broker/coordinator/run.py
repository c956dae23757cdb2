"""A run as the broker sees it: what it was told of the plan, how far the run is, how it ended, and its id."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from stageline.broker.control.protocol import Stop
from stageline.broker.errors import BrokerError
from stageline.broker.stores.base import Fact, Store
from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Schedule

RESUMED = "resumed"  # the name of a fact


class OtherRun(BrokerError):
    """The store holds a run of another plan, which has not ended or is asked for by its id."""


class RunPhase(StrEnum):
    """How far the run is."""

    WAITING = "waiting"  # for workers
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"  # or stopped


class Resuming(StrEnum):
    """How a run is to go on. `run_of` leaves it in the store, for the core."""

    WITHOUT_RECORDS = "without records"  # its workers are asked for their snapshots
    AS_A_WHOLE = "as a whole"  # all places are free
    UNLESS_AT_WORK = "unless at work"  # likewise, but not before its workers had time to say that they are at work

    @classmethod
    def told(cls, facts: Mapping[str, Fact]) -> "Resuming | None":
        """What was left among a store's `facts`, if it is still to be done."""
        fact = facts.get(RESUMED)
        return cls(str(fact["how"])) if fact else None


class RunOutcome(msgspec.Struct, frozen=True):
    """How the run ended: `code` is the exit code of whoever waited for it. A finished run has its `weights_sha256`."""

    phase: RunPhase
    reason: str
    code: int
    weights_sha256: str | None = None
    at_step_end: bool = False
    step: int | None = None  # the steps that the workers were to finish first

    @property
    def farewell(self) -> Stop:
        """What the workers are told."""
        return Stop(self.reason, self.code, self.at_step_end, self.step)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What the broker must know of the plan: `plan` is its digest, `settings` its mapping, `lease` in seconds.

    `restarts`: how often in a row a worker may be replaced. `snapshots`: the stages write snapshots, and queues are
    trimmed to complete checkpoints; without, to what every stage has finished, and nobody can be replaced.
    """

    name: str
    plan: str
    settings: Mapping[str, object]
    schedule: Schedule
    lease: float
    log_every: int
    restarts: int = 0
    snapshots: bool = False

    @property
    def patience(self) -> float:
        """For how many seconds somebody is waited for who could take a lost worker's place."""
        return max(60.0, 3 * self.lease)

    @classmethod
    def of(cls, plan: Plan, schedule: Schedule) -> "RunConfig":
        """The terms of a plan whose number of stages is known, and its schedule."""
        recovery = plan.recovery
        return cls(
            plan.run.name,
            plan.digest(),
            plan.as_mapping(),
            schedule,
            recovery.lease,
            plan.run.log_every,
            recovery.restarts if recovery.on else 0,
            snapshots=recovery.on,
        )


def run_of(store: Store, plan: str, fresh: str, *, resume: bool = False, alone: bool = False) -> str:
    """The id of the run to serve: the one in the store if it has not ended, or if `fresh` asks for it; else `fresh`.

    What another run left, if it has ended, is forgotten. With `resume`, the run in the store goes on however it was
    stopped: all places are free, and whoever takes one begins at the newest complete checkpoint; a finished run stays
    finished. If nobody has recorded an end, its workers may still be at work, unless the broker is `alone`: then they
    are listened for first. If the store has lost the run, the workers will be asked for their snapshots.
    Raises `OtherRun` if the run in the store has not the digest `plan`.
    """
    facts = store.load().facts
    kept = msgspec.convert(facts["run"], _Name) if "run" in facts else None
    if kept is not None and resume:
        run = _checked(kept, plan)
        store.put("run", {"id": run, "plan": plan})  # the first write: from here on it is this broker's
        if not _finished(facts):  # its former end goes last: a broker that is killed in between leaves it stopped
            store.put(RESUMED, {"how": _how(facts, alone=alone)})
            store.put("outcome", {})
        return run
    if kept is None or (facts.get("outcome") and kept.id != fresh):
        store.begin()
        if resume:  # before the run's id: whoever finds that finds this
            store.put(RESUMED, {"how": Resuming.WITHOUT_RECORDS})
        store.put("run", {"id": fresh, "plan": plan})
        return fresh
    run = _checked(kept, plan)
    store.put("run", {"id": run, "plan": plan})
    return run


class _Name(msgspec.Struct, frozen=True):
    id: str
    plan: str


def _how(facts: Mapping[str, Fact], *, alone: bool) -> Resuming:
    if (before := Resuming.told(facts)) in (Resuming.WITHOUT_RECORDS, Resuming.AS_A_WHOLE):
        return before  # nobody has a place yet
    return Resuming.AS_A_WHOLE if alone or facts.get("outcome") else Resuming.UNLESS_AT_WORK


def _finished(facts: Mapping[str, Fact]) -> bool:
    return bool(facts.get("outcome")) and msgspec.convert(facts["outcome"], RunOutcome).phase is RunPhase.FINISHED


def _checked(kept: _Name, plan: str) -> str:
    if kept.plan != plan:
        raise OtherRun(
            f"the broker's store holds run {kept.id} of another plan (digest {kept.plan[:12]}, now {plan[:12]}); "
            "start it with its own plan, or give this run another run.dir"
        )
    return kept.id
