"""Answers to queries: facts of JSON's own types, each kind under a schema name with a version."""

import dataclasses
from collections.abc import Callable, Mapping
from math import isfinite

import msgspec

from stageline.broker.control.messages import Answer, Ask, Refused
from stageline.broker.ledger.evaluations import fact_of
from stageline.broker.ledger.explain import MEND
from stageline.broker.ledger.ledger import MicrobatchPosition
from stageline.broker.ledger.losses import Replacement
from stageline.broker.ledger.recovery import attempts_on
from stageline.broker.ledger.registry import Contact
from stageline.broker.ledger.times import timed_actions
from stageline.broker.ledger.wait_graph import WaitChain
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.evaluation import Standing
from stageline.pipeline.schedule import ONCE_PER_STEP, Schedule

from .copying import told_copies
from .measuring import measures
from .pacing import course, history, number, pace_of, schedule_at, slow, timetable
from .pausing import told
from .peeks import over
from .queue_queries import BadQuery, microbatches, queue, queues
from .restart import missing, waiting_for
from .run import RunPhase
from .setbacks import lost_time
from .state import Life, RunState
from .waiting import why_waiting

Facts = dict[str, object]

_WHILE_PLACING = {  # what can be done while no worker has anything to wait for
    Life.CHOOSING_CHECKPOINT: "start the missing workers, where their snapshots are",
    Life.RECONCILING: "wait: the run continues by itself, or the broker names what is missing",
    Life.RECONNECTING: "wait: the run continues by itself",
}


NO_KEYS = "this broker has no keys: only processes of its own machine reach it, or its plan has broker.insecure = true"


def answer(run: RunState, ask: Ask, now: float) -> Answer | Refused:
    """Return the answer to a query; an unknown or invalid query is refused, and the refusal names what can be asked.

    Args:
        run: The state.
        ask: The query.
        now: Seconds since the epoch.
    """
    if ask.what not in _ANSWERS:
        return Refused(f"the broker has no answer to {ask.what!r}; ask for {', '.join(_ANSWERS)}", code=ExitCode.USAGE)
    try:
        return Answer(f"{ask.what}/{_VERSIONS.get(ask.what, 1)}", _ANSWERS[ask.what](run, ask.of, now))
    except BadQuery as error:
        return Refused(f"{ask.what}: {error}", code=ExitCode.USAGE)


def _status(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return the facts of the run: its plan, end, workers, losses and rounds of evaluation.

    The losses and rounds are those from step `losses_from` on, or all. `script` is the run's script as a worker without
    stages, None if the run has none.
    """
    first = number(of, "losses_from", 0)
    outcome, ledger, schedule = run.outcome, run.ledger, run.config.schedule
    places, workers = range(len(run.config.placement)), range(len(schedule.placement))
    lacking = [index for index in missing(run) if index in workers] if run.phase is RunPhase.WAITING else []
    return {
        "run": run.id,
        "name": run.config.name,
        "plan": {
            "digest": run.config.plan,
            "schedule": schedule.name,
            "mode": schedule.mode,
            "microbatches": schedule.microbatches,
            "stages": schedule.stages,
            "placement": [list(stages) for stages in schedule.placement],
            "lease": run.config.lease,
        },
        "orders": _orders(run),
        "phase": str(run.phase),
        "missing": lacking,
        "script": next((_worker(run, now, index) for index in places if index not in workers), None),
        "reason": outcome.reason if outcome else None,
        "code": outcome.code if outcome else None,
        "saving": run.saving,
        "paused": told(run),
        "weights_sha256": outcome.weights_sha256 if outcome else None,
        "training_steps": run.training_steps,
        "finished": list(ledger.finished),
        "finished_floor": ledger.finished_floor,
        "last_loss": _loss(ledger.last_loss),
        "finished_loss": _loss(ledger.finished_loss),
        "gradient_norm": _norm(ledger.last_norm),
        "losses": {str(step): ledger.losses[step] for step in sorted(ledger.losses) if step >= first},
        # JSON has no number for "nan", "inf" and "-inf"; Python's `float` reads these texts.
        "metrics": {name: value if isfinite(value) else str(value) for name, value in run.evaluations.metrics.items()},
        "evaluations": [fact_of(each) for each in run.evaluations if each.step > first],
        "last_evaluation": run.evaluations.newest_fact,
        "best": _best(run.evaluations.standing()),
        "stopped_early": outcome.reason if outcome and outcome.early else None,
        "checkpoint": run.checkpoints.complete if run.config.snapshots else None,
        "copies": list(told_copies(run)),
        "listening": run.lifecycle.state is Life.RECONNECTING,
        "recollecting": run.lifecycle.state is Life.RECONCILING,
        "damaged": list(run.search.damages),
        "restarts": run.replacements.ever.total(),
        "recovering": [
            _replacement(run, now, each) for each in run.replacements.pending.values() if each.index in workers
        ],
        "fault": run.fault,
        "declined": [{"host": each.host, "pid": each.pid, "reason": each.reason} for each in run.declined],
        "spares": [_standby(contact, now) for contact in run.standby.values()],
        "oddities": dict(run.events.anomalies),
        "workers": [_worker(run, now, index) for index in workers],
        "keys": run.config.access.summary,
        "pace": pace_of(run, now),
    }


def _orders(run: RunState) -> Facts | None:
    """Return the orders of a run that chooses its schedule, with reasons; None for another run."""
    if run.config.schedule_memory is None:
        return None
    book, begins_with = run.orders, run.config.schedule.name
    return {
        "memory": run.config.schedule_memory,
        "begins_with": begins_with,
        "orders": [
            {"step": each.step, "name": each.name, "window": each.window, "why": why}
            for each, why in zip(book.orders, book.reasons, strict=False)
        ],
        "closed": book.closed,  # the step that no worker begins before the next order is known
        "review": None if book.review is None else msgspec.to_builtins(book.review),
    }


def _best(standing: Standing | None) -> Facts | None:
    """Return the best round of evaluation, or None; `since` counts the newest rounds in a row that were not better."""
    if standing is None or standing.best is None:
        return None
    best = standing.best
    return {"step": best.step, "metric": standing.criterion.metric, "value": best.value, "since": standing.since}


def _norm(found: tuple[int, float] | None) -> Facts | None:
    return None if found is None else {"step": found[0], "norm": found[1]}


def _loss(found: tuple[int, float | None] | None) -> Facts | None:
    return None if found is None else {"step": found[0], "loss": found[1]}


def _replacement(run: RunState, now: float, pending: Replacement) -> Facts:
    """Return the facts of a pending replacement.

    `given` is True if the place is taken again and its new worker has yet to complete an action.
    """
    return {
        "index": pending.index,
        "pid": pending.pid,
        "host": pending.host,
        "stages": list(run.config.schedule.placement[pending.index]),
        "since": max(0.0, now - pending.since),  # seconds ago
        "why": pending.why,
        "how": pending.how,
        "on_notice": pending.left,
        "left": max(0.0, run.config.patience - (now - pending.awaited)),  # seconds for another to join
        "given": pending.index in run.registry.members,
    }


def _standby(contact: Contact, now: float) -> Facts:
    hello = contact.hello
    return {"name": hello.name, "host": hello.host, "pid": hello.pid, "heard": max(0.0, now - contact.last_seen)}


def _worker(run: RunState, now: float, index: int) -> Facts:
    member = run.registry.members.get(index)
    config = run.config
    place: Facts = {"index": index, "stages": list(config.placement[index])}
    place |= _labelled(config.schedule, labels=list(config.labels[index]))
    if member is None:
        return {**place, "standing": "missing"}
    report = member.report
    return {
        **place,
        "standing": str(member.status) if member.sender else "unheard",  # since the broker restarted
        "name": member.name,
        "host": member.host,
        "pid": member.pid,
        "endpoint": member.endpoint,
        "incarnation": member.incarnation,
        "generation": member.generation,
        "heard": max(0.0, now - member.last_seen),  # seconds ago
        "now": report.now if report else "starts" if member.sender else "",
        "trouble": report.trouble if report else "",
        "fault": report.fault if report else "",
        "since": report.since if report else None,
        "idle": report.idle if report else None,
        "layer": report.layer if report else "",
        "actions": report.actions if report else 0,
        "retained_bytes": report.retained_bytes if report else 0,
        "memory": report.memory if report and report.memory else None,
        "clock": report.clock if report else None,
    }


def _join(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return what a worker without a plan file needs to join a script's run.

    That is the run's plan, the code that it goes with, and True under `over` if the worker comes too late.
    """
    code = run.config.code
    if code is None:
        raise BadQuery(
            f"run {run.id} has no script that gives its workers a plan. Start them with the plan that its broker "
            "has: stageline worker CONFIG --join LINE, or --broker URL"
        )
    settings = dict(run.config.settings)
    over = run.lifecycle.over
    return {"run": run.id, "settings": settings, "torch": code.torch, "files": dict(code.files), "over": over}


def _story(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return the history of a microbatch: one entry per stage."""
    step, microbatch = number(of, "step"), number(of, "microbatch")
    schedule = run.config.schedule
    if microbatch >= schedule.microbatches:
        raise BadQuery(
            f"there is no microbatch {microbatch}: a step has {schedule.microbatches}, 0 to {schedule.microbatches - 1}"
        )
    _check_step(run, step)
    stages = [_at_stage(run, MicrobatchPosition(stage, step, microbatch)) for stage in _having(schedule, microbatch)]
    return {"run": run.id, "step": step, "microbatch": microbatch, "stages": stages}


def _having(schedule: Schedule, microbatch: int) -> list[int]:
    """Return the copies of stages that have the microbatch, one of each stage."""
    return [schedule.replicas.having(stage, microbatch) for stage in range(schedule.stages)]


def _labelled(schedule: Schedule, **facts: object) -> Facts:
    """Return the `facts` on labels if the plan has replicas, else none: there a stage's label is its number."""
    return facts if schedule.shares else {}


def _check_step(run: RunState, step: int) -> None:
    if run.training_steps is None or step < run.training_steps or step < run.ledger.begun:
        return
    last = max(run.training_steps, run.ledger.begun) - 1
    raise BadQuery(
        f"there is no step {step}: run {run.id} has {run.training_steps} training steps; ask for 0 to {last}"
    )


def _at_stage(run: RunState, at: MicrobatchPosition) -> Facts:
    """Return the state of a microbatch at one stage, when each action on it began and ended, and what was lost."""
    schedule = run.config.schedule
    entry, record = run.ledger.entry(at), run.store.record(at.stage, at.step)
    timed = timed_actions(record) if record else []
    own = [each for each in timed if each[0].microbatch == at.microbatch or each[0].kind in ONCE_PER_STEP]
    holder = None
    if entry.holder is not None:
        owner = run.registry.current(entry.holder.incarnation)  # None for a stale incarnation
        holder = {
            "name": entry.holder.name,
            "generation": owner.generation if owner else None,
            "incarnation": entry.holder.incarnation,
        }
    return {
        "stage": at.stage,
        **_labelled(schedule, label=schedule.label(at.stage)),
        "worker": schedule.owner(at.stage),
        "attempts": attempts_on(at, run.lost_work),  # those before
        "state": str(entry.state),
        "since": own[-1][2] if own else entry.since,
        "holder": holder,
        "actions": [{"action": schedule.name_of(action), "start": start, "end": end} for action, start, end in own],
    }


def _why(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return the reason why the run waits or is slow, or why the worker that owns a stage waits."""
    facts: Facts = {"run": run.id, "phase": str(run.phase), "slow": None, "recovery": None, "age": 0.0}
    owner = _owner(run.config.schedule, of)  # a stage that does not exist is refused in every phase
    if run.outcome is not None:
        over = "nothing: the run is over"
        facts |= _slowness(run, now)
        return {**facts, "text": run.outcome.reason, "chain": [], "root": None, "reports": [], "action": over}
    if run.fault:
        text = f"the broker {run.fault}. Until then it hears nothing of the workers, which train without it"
        return {**facts, "text": text, "chain": [], "root": None, "reports": [], "action": MEND}
    if awaited := waiting_for(run):
        action = _WHILE_PLACING[run.lifecycle.state]
        return {**facts, "text": awaited, "chain": [], "root": None, "reports": [], "action": action}
    found = why_waiting(run, now, owner)
    chain = found.chain
    if not chain.harmless:  # a loss or a stall goes first, and changes what limits the run after it
        run.slowness.forget()
    elif owner is None:
        facts |= _slowness(run, now)
    return {
        **facts,
        "text": found.text,
        "chain": [dataclasses.asdict(edge) for edge in chain.edges],
        "root": {"cause": str(chain.cause), "worker": None if chain.index is None else _worker(run, now, chain.index)},
        "reports": [_age(run, now, index) for index in _workers_of(chain) if index in run.registry.members],
        "action": found.action,
    }


def _slowness(run: RunState, now: float) -> Facts:
    """Return what limits the run and what it lost time to, and the age of that answer."""

    def compute() -> Facts:
        return {"slow": slow(run), "recovery": lost_time(run)}

    _, since = schedule_at(run, run.ledger.finished_floor)
    circumstances = (run.lifecycle.state, since, run.pauses.after, run.milestones.events)
    facts = run.slowness.given(circumstances, compute, now)
    if facts["slow"] is None:  # the next step may be the first of which there is something to say
        run.slowness.forget()
    return facts


def _workers_of(chain: WaitChain) -> list[int]:
    """Return the indexes of the workers whose reports make up the chain, in its order."""
    root = [] if chain.index is None else [chain.index]
    return list(dict.fromkeys([*(edge.index for edge in chain.edges), *root]))


def _age(run: RunState, now: float, index: int) -> Facts:
    """Return the seconds since a worker's last message. Reports in one answer may be of different ages."""
    member = run.registry.members[index]
    return {"worker": index, "name": member.name, "heard": max(0.0, now - member.last_seen)}


def _owner(schedule: Schedule, of: Mapping[str, str]) -> int | None:
    if "stage" not in of:
        return None
    stage = schedule.replicas.copy_of(of["stage"])
    if stage is None:
        numbered = "stage 0" if schedule.stages == 1 else f"stages 0 to {schedule.stages - 1}"
        copies = f", with replicas {schedule.copies} in all" if schedule.shares else ""
        raise BadQuery(f"there is no stage {of['stage']}: the plan has {numbered}{copies}")
    return schedule.owner(stage)


def _keys(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return the invitations, the keys that have enrolled, and the keys that knocked in vain."""
    facts = run.config.access.facts()
    if facts is None:
        raise BadQuery(NO_KEYS)
    return {"run": run.id, **facts}


def _peek(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Raise `BadQuery`: only a worker that runs can tell, and the coordinator asks it."""
    raise BadQuery(over(run) if run.outcome is not None else "no worker can be asked now: see `stageline why`")


def _of_process(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Raise `BadQuery`: only a worker that runs can tell its stack and its log, and the coordinator asks it."""
    raise BadQuery(f"no process of run {run.id} can be asked now: `stageline why` says what the records have")


_VERSIONS = {"queues": 2}  # of schemas that are not the first of their name
_ANSWERS: Mapping[str, Callable[[RunState, Mapping[str, str], float], Facts]] = {
    "status": _status,
    "queues": queues,
    "queue": queue,
    "peek": _peek,
    "export": _peek,
    "stack": _of_process,
    "log": _of_process,
    "microbatches": microbatches,
    "story": _story,
    "why": _why,
    "timetable": timetable,
    "history": history,
    "measures": measures,
    "course": course,
    "join": _join,
    "keys": _keys,
}
