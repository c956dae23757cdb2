"""What the broker answers when asked: facts of JSON's own types, each kind under a schema name with a version."""

import dataclasses
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from stageline.broker.control.protocol import Answer, Ask, Refused
from stageline.broker.diagnosis.wait_graph import WaitChain
from stageline.broker.ledger.history import Sources, history
from stageline.broker.membership.member import Member
from stageline.broker.membership.replacements import Replacement
from stageline.broker.membership.standby import Spare
from stageline.pipeline.exit_code import ExitCode

from .run import RunPhase

if TYPE_CHECKING:
    from .coordinator import Coordinator

Facts = dict[str, object]

_RECOLLECTING = "the broker has lost its records and asks the workers, which train on, how far the run is"


class _BadQuestion(Exception):
    """The question lacks something, or something in it is not what it must be."""


def answer(core: "Coordinator", ask: Ask, now: float) -> Answer | Refused:
    """Answers `ask`, or says what can be asked. `now` in seconds since the epoch."""
    if ask.what not in _ANSWERS:
        return Refused(f"the broker has no answer to {ask.what!r}; ask for {', '.join(_ANSWERS)}", code=ExitCode.USAGE)
    try:
        return Answer(f"{ask.what}/1", _ANSWERS[ask.what](core, ask.of, now))
    except _BadQuestion as error:
        return Refused(f"{ask.what}: {error}", code=ExitCode.USAGE)


def _status(core: "Coordinator", of: Mapping[str, str], now: float) -> Facts:
    """The run, its workers, and the losses from step `losses_from` on (all if not given)."""
    first = _number(of, "losses_from", 0)
    outcome, losses = core.outcome, core.ledger.losses
    return {
        "run": core.run,
        "name": core.terms.name,
        "plan": _plan(core),
        "phase": str(core.phase),
        "missing": core.reception.missing if core.phase is RunPhase.WAITING else [],
        "reason": outcome.reason if outcome else None,
        "code": outcome.code if outcome else None,
        "weights_sha256": outcome.weights_sha256 if outcome else None,
        "training_steps": core.training_steps,
        "finished": list(core.ledger.finished),
        "finished_floor": core.ledger.finished_floor,
        "last_loss": core.ledger.last_loss and {"step": core.ledger.last_loss[0], "loss": core.ledger.last_loss[1]},
        "losses": {str(step): losses[step] for step in sorted(step for step in losses if step >= first)},
        "metrics": {name: _sayable(value) for name, value in core.metrics.items()},
        "checkpoint": core.crew.checkpoints.complete if core.terms.snapshots else None,
        "listening": core.reception.listening,  # for workers that may still be at work, after the broker was killed
        "recollecting": core.reception.election is not None,  # the records are lost, and everyone is asked
        "damaged": list(core.reception.damages),  # snapshots that could not be used when the run was resumed
        "restarts": core.replacing.total,
        "recovering": [_gap(core, gap, now) for gap in core.replacing.gaps.values()],
        "spares": [_spare(spare, now) for spare in core.reception.spares],
        "oddities": dict(core.journal.oddities),
        "workers": [_worker(core.registry.members.get(i), i, stages, now) for i, stages in _places(core)],
    }


def _sayable(value: float) -> float | str:
    """JSON has no number for "nan", "inf" and "-inf"; Python's `float` reads these texts."""
    return value if isfinite(value) else str(value)


def _gap(core: "Coordinator", gap: Replacement, now: float) -> Facts:
    """A worker that was lost: `given` says whether another has its place by now, and only has to get going."""
    return {
        "index": gap.index,
        "pid": gap.pid,
        "stages": list(core.registry.placement[gap.index]),
        "since": max(0.0, now - gap.since),  # seconds ago
        "why": gap.why,
        "given": gap.index in core.registry.members,
    }


def _spare(spare: Spare, now: float) -> Facts:
    hello = spare.hello
    return {"name": hello.name, "host": hello.host, "pid": hello.pid, "heard": max(0.0, now - spare.heard)}


def _plan(core: "Coordinator") -> Facts:
    schedule = core.terms.schedule
    return {
        "digest": core.terms.plan,
        "schedule": schedule.name,
        "mode": schedule.mode,
        "microbatches": schedule.microbatches,
        "stages": schedule.stages,
        "placement": [list(stages) for stages in schedule.placement],
        "lease": core.terms.lease,
    }


def _worker(member: Member | None, index: int, stages: tuple[int, ...], now: float) -> Facts:
    place: Facts = {"index": index, "stages": list(stages)}
    if member is None:
        return {**place, "standing": "missing"}
    report = member.report
    return {
        **place,
        "standing": str(member.standing) if member.sender else "unheard",  # since the broker was started again
        "name": member.name,
        "host": member.host,
        "pid": member.pid,
        "endpoint": member.endpoint,
        "incarnation": member.incarnation,
        "life": member.life,  # which of the workers that have had the place
        "heard": max(0.0, now - member.heard),  # seconds ago
        "now": report.now if report else "starts" if member.sender else "",
        "trouble": report.trouble if report else "",
        "since": report.since if report else None,
        "idle": report.idle if report else None,
        "layer": report.layer if report else "",
        "actions": report.actions if report else 0,
        "retained_bytes": report.retained_bytes if report else 0,
    }


def _queues(core: "Coordinator", of: Mapping[str, str], now: float) -> Facts:
    """Each queue as each worker with an end of it sees it."""
    reports = [(index, member.report) for index, member in sorted(core.registry.members.items()) if member.report]
    rows = [_queue(index, name, depth) for index, report in reports for name, depth in report.queues.items()]
    return {"run": core.run, "queues": rows}


def _queue(worker: int, name: str, depth: list[float]) -> Facts:
    columns = ("ready", "in_flight", "retained", "bytes", "oldest")
    return {"queue": name, "worker": worker, **dict(zip(columns, depth, strict=False))}


def _story(core: "Coordinator", of: Mapping[str, str], now: float) -> Facts:
    step, microbatch = _number(of, "step"), _number(of, "microbatch")
    if microbatch >= core.ledger.microbatches:
        raise _BadQuestion(f"there is no microbatch {microbatch}: a step has {core.ledger.microbatches}")
    sources = Sources(core.ledger, core.terms.schedule, core.store.record, core.crew.attempts.on, _life_in(core))
    chapters = history(sources, step, microbatch)
    return {"run": core.run, "step": step, "microbatch": microbatch, "stages": chapters}


def _life_in(core: "Coordinator") -> Callable[[int], int | None]:
    """Says which life it is that an incarnation is working in; None if nobody is."""

    def life(incarnation: int) -> int | None:
        member = core.registry.current(incarnation)
        return member.life if member is not None else None

    return life


def _why(core: "Coordinator", of: Mapping[str, str], now: float) -> Facts:
    """Why the run waits, or why the worker that owns a stage does."""
    if (apart := _apart_from_waits(core)) is not None:
        text, action = apart
        return {"run": core.run, "phase": str(core.phase), "text": text, "chain": [], "root": None, "action": action}
    found = core.watch.diagnose(now, _owner(core, of))
    return {
        "run": core.run,
        "phase": str(core.phase),
        "text": found.text,
        "chain": [dataclasses.asdict(lack) for lack in found.chain.lacks],
        "root": _root(core, found.chain, now),
        "action": found.action,
    }


def _apart_from_waits(core: "Coordinator") -> tuple[str, str] | None:
    """Why no worker has anything to wait for, and what to do; None if one may have."""
    if core.outcome is not None:
        return core.outcome.reason, "nothing: the run is over"
    if core.reception.election is not None:
        return _RECOLLECTING, "nothing yet: it goes on by itself, or says what is missing"
    if core.reception.listening:
        return core.reception.question, "nothing yet: it goes on by itself"
    if core.reception.question:
        return core.reception.question, "start the workers that are not there, where their snapshots are"
    return None


def _owner(core: "Coordinator", of: Mapping[str, str]) -> int | None:
    if "stage" not in of:
        return None
    stage, stages = _number(of, "stage"), core.terms.schedule.stages
    if stage >= stages:
        raise _BadQuestion(f"there is no stage {stage}: the plan has {stages}")
    return core.terms.schedule.owner(stage)


def _root(core: "Coordinator", chain: WaitChain, now: float) -> Facts:
    if chain.index is None:
        return {"cause": str(chain.cause), "worker": None}
    stages = core.registry.placement[chain.index]
    return {
        "cause": str(chain.cause),
        "worker": _worker(core.registry.members.get(chain.index), chain.index, stages, now),
    }


def _places(core: "Coordinator") -> enumerate[tuple[int, ...]]:
    return enumerate(core.terms.schedule.placement)


def _number(of: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = of.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise _BadQuestion(f"{name} must be a number from 0 on, not {text!r}")
    return int(text)


_ANSWERS: Mapping[str, Callable[["Coordinator", Mapping[str, str], float], Facts]] = {
    "status": _status,
    "queues": _queues,
    "story": _story,
    "why": _why,
}
