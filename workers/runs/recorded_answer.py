"""Answers what a run's broker would be asked from the run's records, by the broker's own queries.

The records are restored as a broker restores them, and what it last observed is taken back; nothing is decided on them.
"""

from collections.abc import Mapping
from typing import Any

from stageline.broker.control.messages import Answer, Ask, Refused
from stageline.broker.coordinator.queries import answer
from stageline.broker.coordinator.records import recall, restored
from stageline.broker.coordinator.run import RunConfig
from stageline.broker.coordinator.state import RunState
from stageline.broker.ledger.evaluations import record_of
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan, PlanRefused, from_mapping

from .folder import PLAN, Facts, Result
from .listing import ending_of
from .records import RecordedRun, RecordedState, RecordsDamaged


class QueryRefused(StagelineError):
    """The run has no such thing as was asked for; the text says what it has."""

    exit_code = ExitCode.USAGE


def recorded_answer(run: RecordedRun, what: str, of: Mapping[str, str]) -> Facts:
    """The answer under the same schema as a broker's. `phase` may also be "starting" and "killed".

    Raises `QueryRefused`. Records of a wrong shape raise what `records.explained` turns into `RecordsDamaged`.
    """
    facts = _unplanned(run, what) if run.plan is None else _asked(run, what, of)
    state = run.state
    if state in (RecordedState.STARTING, RecordedState.KILLED) and "phase" in facts:
        facts["phase"] = str(state)
    if what == "status" and state is not RecordedState.FINISHED:
        facts["reason"] = facts["reason"] or ending_of(run).text
    if what == "why":
        found = ending_of(run)
        if state is RecordedState.RUNNING and "text" in facts:
            facts |= {"text": f"{found.text}; when it last stored what it saw: {facts['text']}", "action": found.action}
        else:
            facts |= {"text": found.text, "action": found.action, "chain": [], "root": None, "reports": []}
    return facts


def _asked(run: RecordedRun, what: str, of: Mapping[str, str]) -> Facts:
    match answer(_state(run), Ask(what, dict(of)), run.as_of):
        case Answer(schema, facts):
            return {"schema": schema, **facts}
        case Refused(reason, _):
            raise QueryRefused(reason)


def _state(run: RecordedRun) -> RunState:
    plan = _plan(run)
    state = restored(run.id, RunConfig.of(plan, plan.make_schedule()), run.store, run.stored, run.as_of)
    recall(state, run.stored.facts)
    state.learn_end(run.outcome, run.training_steps)
    if run.result is not None:
        _add_result(state, run.result)
    return state


def _plan(run: RecordedRun) -> Plan:
    try:
        return from_mapping(run.plan or {})
    except PlanRefused as error:  # it was a plan when it was written
        raise RecordsDamaged(f"{run.folder / PLAN} is damaged: {error}") from error


def _add_result(state: RunState, result: Result) -> None:
    """Of a finished run it is enough, also if the broker's records were deleted."""
    stages = range(state.config.schedule.copies)
    finished = {stage: max(result.steps, state.ledger.finished[stage]) for stage in stages}
    losses = {int(step): loss for step, loss in result.losses.items()}
    state.ledger.restore(finished, {**losses, result.steps - 1: result.loss})
    for each in result.evaluations:
        state.evaluations.add(record_of(each))


def _unplanned(run: RecordedRun, what: str) -> Facts:
    """Before a run's plan is known to work, there is little to tell."""
    if what not in ("status", "why"):
        raise QueryRefused(f"{what}: run {run.id} has not begun: {ending_of(run).text}")
    nothing: dict[str, Any] = {
        "status": {
            "name": run.owner.name if run.owner is not None else run.id,
            "plan": None, "missing": [], "reason": None, "code": None, "weights_sha256": None, "training_steps": None,
            "finished": [], "finished_floor": 0, "last_loss": None, "finished_loss": None, "losses": {}, "metrics": {},
            "evaluations": [], "last_evaluation": None, "best": None, "stopped_early": None,
            "checkpoint": None, "listening": False, "recollecting": False, "damaged": [], "restarts": 0,
            "recovering": [], "spares": [], "oddities": {}, "workers": [], "script": None,
        },
        "why": {},
    }  # fmt: skip
    return {"schema": f"{what}/1", "run": run.id, "phase": "", **nothing[what]}
