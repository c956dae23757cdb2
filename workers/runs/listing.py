"""Rows of the runs in a folder, from their records alone: no broker is asked, and no plan is validated.

A row says why a run does not go on, and what can be done. `recorded_answer` answers questions to a run's broker by the
broker's own queries: the records are restored as a broker restores them, and its last observations are taken back;
nothing is decided on them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stageline.broker.control.messages import Answer, Ask, Refused
from stageline.broker.coordinator.gate import KEYS
from stageline.broker.coordinator.pausing import said
from stageline.broker.coordinator.queries import answer
from stageline.broker.coordinator.records import recall, restored
from stageline.broker.coordinator.run import RunConfig
from stageline.broker.coordinator.state import RunState
from stageline.broker.keys.access import OPEN, Access
from stageline.broker.keys.register import KeyRecord, KeyRegister
from stageline.broker.ledger.evaluations import record_of
from stageline.pipeline.addresses import Reach, transport_of
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import PlanRefused, from_mapping
from stageline.workers.runs import folder as runs

from .folder import PLAN, Facts
from .records import RecordedRun, RecordedState, RecordsDamaged, recorded_run


@dataclass(frozen=True, slots=True)
class Ending:
    """State of a run in words (`text`), and what the user can do (`action`). Without a full stop."""

    text: str
    action: str


def ending_of(run: RecordedRun) -> Ending:
    """Return the state of `run` in words, and what the user can do.

    The action names the command that resumes a run with snapshots, and the command that begins another one in place of
    a run without. The action on a finished run is nothing, on a running one to wait.
    """
    reason = run.outcome.reason if run.outcome is not None else ""
    match run.state:
        case RecordedState.FINISHED:
            return Ending(reason, f"nothing: `stageline status {run.folder}` shows the result")
        case RecordedState.STARTING:
            return Ending("the run is starting: its plan is tried, then its processes start", "wait")
        case RecordedState.RUNNING:
            return _running(run)
        case RecordedState.PAUSED:
            paused = run.pauses.pauses[-1]
            return Ending(
                f"the run {said(paused, run.observed_at)}", f"have it go on: stageline run resume {run.folder}"
            )
        case RecordedState.KILLED:
            return _killed(run)
        case _:
            return Ending(reason, _after_stop(run))


def _running(run: RecordedRun) -> Ending:
    if _in_memory(run):
        return Ending("the run is one process, which answers no questions", "nothing: its records are a second old")
    who = {True: "the script's launcher", False: "`train`"}[run.scripted]
    return Ending("its broker does not answer", f"wait: workers train without a broker, and {who} restarts it")


def _killed(run: RecordedRun) -> Ending:
    who = "the run's broker" if run.owner is not None and run.owner.command == "broker" else "the run"
    if not run.progress:
        again = f"begin another run: {_begin(run)}"
        return Ending(f"{who} was killed or lost its machine before it began", again)
    saved = f"checkpoint {run.complete} is complete" if run.complete else "no checkpoint is complete"
    total = "" if run.training_steps is None else f" of {run.training_steps}"
    return Ending(f"{who} was killed or lost its machine at step {run.steps}{total}; {saved}", _go_on(run))


def _after_stop(run: RecordedRun) -> str:
    code = run.outcome.code if run.outcome is not None else ExitCode.FAILED
    if code == ExitCode.REFUSED:
        return "correct the plan, the model or the data, and begin another run"
    if code in (ExitCode.SAVED, ExitCode.INTERRUPTED):
        return _go_on(run)
    if not run.complete and not run.steps:
        return f"correct the cause, and begin another run: {_begin(run)}"
    return f"correct the cause; then {_go_on(run)}"


def _go_on(run: RecordedRun) -> str:
    recovery = (run.plan or {}).get("recovery", {})
    if _in_memory(run) or not recovery.get("restarts") or not recovery.get("snapshot_every"):
        return f"begin another run, since without snapshots nothing is saved: {_begin(run)}"
    return f"go on with: {_commands(run)[1]}{'' if run.complete else ' (it begins at step 0)'}"


def _in_memory(run: RecordedRun) -> bool:
    return transport_of(str((run.plan or {}).get("queues", {}).get("url", ""))).reach is Reach.PROCESS


def _begin(run: RecordedRun) -> str:
    return _commands(run)[0]


def _commands(run: RecordedRun) -> tuple[str, str]:
    """Return how such a run is begun, and how this one is resumed."""
    if run.scripted:
        return "the script", f"Line.resume({str(run.folder)!r}, ...) in the script"
    if run.owner is None:
        return "stageline train CONFIG", f"stageline train CONFIG --resume {run.id}"
    return run.owner.begin, run.owner.resume(run.id)


class RunRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run in schema run-ls/1.

    Attributes:
        began: Seconds since the epoch.
        as_of: Time at which the row was true, in seconds since the epoch.
        state: One of `RecordedState`, or "damaged": then `reason` names the file.
        script: True if a script calls the run, which has no `total` before its end.
        steps: Finished steps of `total`; `loss` is the last one's.
        plan: Digest of the plan.
    """

    run: str
    folder: str
    name: str | None = None
    began: float | None = None
    as_of: float | None = None
    state: str = "damaged"
    steps: int = 0
    total: int | None = None
    script: bool = False
    loss: float | None = None
    checkpoint: int | None = None
    plan: str | None = None
    weights_sha256: str | None = None
    reason: str | None = None


class RunList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs in a folder, in the order in which they were begun or resumed."""

    folder: str
    runs: list[RunRow]


def run_rows(folder: Path) -> Iterator[RunRow]:
    """Return rows of the runs in `folder`, in the order in which they were begun or resumed."""
    return map(_row, runs.all_in(folder))


def _row(folder: Path) -> RunRow:
    try:
        with recorded_run(folder) as run:
            outcome, state, owner = run.outcome, run.state, run.owner
            named = (run.plan or {}).get("run", {}).get("name")
            digest = run.stored.facts.get("run", {}).get("plan")
            return RunRow(
                run=run.id,
                folder=str(run.folder),
                name=named or (None if owner is None else owner.name),
                began=None if owner is None else owner.began,
                as_of=run.as_of,
                state=str(state),
                steps=run.steps,
                total=run.training_steps,
                script=run.scripted,
                loss=run.stored.losses.get(run.steps - 1) if run.result is None else run.result.loss,
                checkpoint=run.complete if run.progress else None,
                plan=None if digest is None else str(digest),
                weights_sha256=outcome.weights_sha256 if outcome is not None else None,
                reason=None if state in (RecordedState.FINISHED, RecordedState.RUNNING) else ending_of(run).text,
            )
    except (StagelineError, OSError) as error:
        return RunRow(run=folder.name, folder=str(folder), reason=str(error))


class QueryRefused(StagelineError):
    """Error that a run lacks what was asked for.

    Mend: Ask for what the message says the run has.

    Example: queue: run a has not begun: it was stopped before
    """

    error_code = "SL505"
    exit_code = ExitCode.USAGE


def recorded_answer(run: RecordedRun, what: str, of: Mapping[str, str]) -> Facts:
    """Return the answer to a question from a run's records, under the schema of the broker's answers.

    `phase` may also be "starting" and "killed".

    Args:
        run: Records of the run.
        what: Question, such as "status".
        of: Parameters of the question.

    Raises:
        QueryRefused: The records have no answer. Records of a wrong shape raise errors that `records.explained` turns
            into `RecordsDamaged`.
    """
    facts = _unplanned(run, what) if run.plan is None else _asked(run, what, of)
    state = run.state
    if state in (RecordedState.STARTING, RecordedState.KILLED) and "phase" in facts:
        facts["phase"] = str(state)
    if what == "status" and state is not RecordedState.FINISHED:
        facts["reason"] = facts["reason"] or ending_of(run).text
    if what == "why":
        found = _running(run) if state is RecordedState.PAUSED else ending_of(run)
        if state in (RecordedState.RUNNING, RecordedState.PAUSED) and "text" in facts:
            facts |= {"text": f"{found.text}; when it last stored what it saw: {facts['text']}", "action": found.action}
        else:
            facts |= {"text": found.text, "action": found.action, "chain": [], "root": None, "reports": []}
    return facts


def _asked(run: RecordedRun, what: str, of: Mapping[str, str]) -> Facts:
    match answer(_state(run), Ask(what, dict(of)), run.observed_at):
        case Answer(schema, facts):
            return {"schema": schema, **facts}
        case Refused(reason, _):
            raise QueryRefused(reason)


def _state(run: RecordedRun) -> RunState:
    try:
        plan = from_mapping(run.plan or {})
    except PlanRefused as error:  # it was a plan when it was written
        raise RecordsDamaged(f"{run.folder / PLAN} is damaged: {error}") from error
    config = replace(RunConfig.of(plan, plan.make_schedule()), access=_access(run))
    state = restored(run.id, config, run.store, run.stored, run.observed_at)
    recall(state, run.stored.facts)
    state.learn_end(run.outcome, run.training_steps)
    if (result := run.result) is not None:  # of a finished run it is enough, also if the records were deleted
        finished = {
            stage: max(result.steps, state.ledger.finished[stage]) for stage in range(state.config.schedule.copies)
        }
        losses = {int(step): loss for step, loss in result.losses.items()}
        state.ledger.restore(finished, {**losses, result.steps - 1: result.loss})
        for each in result.evaluations:
            state.evaluations.add(record_of(each))
    return state


def _access(run: RecordedRun) -> Access:
    found = run.stored.facts.get(KEYS)
    return OPEN if found is None else Access(KeyRegister(msgspec.convert(found, KeyRecord)))


def _unplanned(run: RecordedRun, what: str) -> Facts:
    """Return the answer for a run whose plan is not yet known to work, about which little is known."""
    if what not in ("status", "why"):
        raise QueryRefused(f"{what}: run {run.id} has not begun: {ending_of(run).text}")
    nothing: dict[str, Any] = {
        "status": {
            "name": run.owner.name if run.owner is not None else run.id,
            "plan": None, "missing": [], "reason": None, "code": None, "weights_sha256": None, "training_steps": None,
            "finished": [], "finished_floor": 0, "last_loss": None, "finished_loss": None, "losses": {}, "metrics": {},
            "evaluations": [], "last_evaluation": None, "best": None, "stopped_early": None,
            "checkpoint": None, "listening": False, "recollecting": False, "damaged": [], "restarts": 0,
            "recovering": [], "spares": [], "oddities": {}, "workers": [], "script": None, "keys": None,
        },
        "why": {"slow": None},
    }  # fmt: skip
    return {"schema": f"{what}/1", "run": run.id, "phase": "", **nothing[what]}
