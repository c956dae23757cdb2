"""The pause of a run: all workers stop before one step, until a person ends it.

`broker/ledger/pauses.py` has the states. A worker answers in its reports. A stop that comes during a pause takes effect
at the step of the pause; before that step is known, it ends the pause.

Reads `config`, `registry`, `ledger`, `lifecycle`, `stopping`, `outcome`. Writes `pauses`, and begins
`pace` again.
"""

from stageline.broker.control.messages import Answer, Peers, Refused, Report
from stageline.broker.control.pauses import NOT_HELD, HeldBack, PauseRun
from stageline.broker.ledger.member import MemberStatus
from stageline.broker.ledger.pauses import Pause
from stageline.pipeline.errors import ExitCode

from .state import RunState

AGAIN = 0.25  # seconds after which a worker that has not answered is told again

Facts = dict[str, object]


def request(run: RunState, sender: bytes, asked: PauseRun, now: float) -> None:
    """Pause the run, or have it go on, and answer. What is so already stays, and the answer says so.

    Args:
        run: The state.
        sender: The sender's address on the channel.
        asked: The request.
        now: Seconds since the epoch.
    """
    if why := _refusal(run, asked):
        run.outgoing.append((sender, Refused(why, code=ExitCode.USAGE)))
        return
    found = run.pauses.present
    changes = (found is None or found.leaving) is not asked.resumes
    if changes and asked.resumes:
        end(run, asked.by, now)
    elif changes:
        run.pauses.begin(asked.by, asked.reason, run.ledger.begun, now)
        _tell(run, f"{asked.by} pauses the run{_because(asked.reason)}: it stops before another step")
    run.outgoing.append((sender, Answer("pause/1", {"run": run.id, "changed": changes, "paused": told(run)})))


def note(run: RunState, report: Report, now: float) -> None:
    """Take over an order that a worker knows and the records do not: these were lost, or are old.

    Args:
        run: The state.
        report: The worker's report.
        now: Seconds since the epoch.
    """
    held = report.held
    if held.number > run.pauses.number and run.outcome is None:
        run.pauses.learn(held, now)
        run.pace.interrupted()
        run.store.put(*run.pauses.fact())
        run.events.infos.append("a worker knows an order about a pause that the records do not have")


def end(run: RunState, by: str, now: float) -> None:
    """Have the run go on. `by` says for people who or what ends the pause; `now` is in seconds since the epoch."""
    run.pauses.end(by, now)
    run.pace.interrupted()
    _tell(run, f"{by} has the run go on")


def begin_for_leaver(run: RunState, by: str, reason: str, now: float) -> None:
    """Pause the run until the workers that leave have left.

    Args:
        run: The state.
        by: The worker, for people.
        reason: Why it leaves.
        now: Seconds since the epoch.
    """
    run.pauses.begin(by, reason, run.ledger.begun, now, leaving=True)
    _tell(run, f"{by} leaves{_because(reason)}: the run stops before another step, for a checkpoint")


def tick(run: RunState, now: float) -> None:
    """Settle the step of a pause once every worker has closed one. `now` is in seconds since the epoch."""
    found = run.pauses.present
    if found is None or found.step is not None or not run.registry.begun:
        return
    answers = [_held(run, index) for index in _workers(run)]
    closed = [each.step for each in answers if each.number == run.pauses.number and each.step is not None]
    if len(closed) == len(answers):
        run.pauses.settle(closed, now)
        _tell(run, f"the run pauses before step {max(closed)}")


def tell_again(run: RunState) -> None:
    """Send the newest order again to workers whose reports do not show it yet. Call it every AGAIN seconds."""
    if not run.pauses.number:
        return
    for member in run.registry.reachable_workers():
        report = member.report
        if report is not None and member.sender and report.held.number < run.pauses.number:
            run.outgoing.append((member.sender, run.pauses.order))


def tell_before_peers(run: RunState) -> None:
    """Put the newest order before each message about peers: a worker that hears of these begins its steps."""
    if run.pauses.present is not None:
        order, outgoing = run.pauses.order, list(run.outgoing)
        run.outgoing[:] = [
            each
            for to, message in outgoing
            for each in (((to, order), (to, message)) if isinstance(message, Peers) else ((to, message),))
        ]


def yield_to_stop(run: RunState, now: float) -> None:
    """End a pause whose step is not known yet, since the run is to stop at a step of its own."""
    found = run.pauses.present
    if found is not None and found.step is None:
        end(run, "the stop", now)


def end_with_run(run: RunState, now: float) -> None:
    """End the pause of a run that stops, in the records alone: no worker is to begin another step."""
    if run.pauses.present is not None:
        run.pauses.end("the stop", now)
        run.store.put(*run.pauses.fact())


def bounded(run: RunState, last_step: int) -> int:
    """Return the step after which a run stops that could stop after `last_step`: none begins beyond a pause."""
    found = run.pauses.present
    return last_step if found is None or found.step is None else min(last_step, found.step)


def in_effect(run: RunState) -> bool:
    """Return True if every worker stands before the step of the pause."""
    found = run.pauses.present
    return found is not None and found.step is not None and all(_stands(run, index) for index in _workers(run))


def told(run: RunState) -> Facts | None:
    """Return the facts of the pause that lasts; None if there is none."""
    found = run.pauses.present
    if found is None or run.outcome is not None:
        return None
    return {
        "by": found.by,
        "reason": found.reason,
        "since": found.since,
        "step": found.step,
        "in_effect": in_effect(run),
    }


def said(pause: Pause, now: float) -> str:
    """Return a pause for people: "was paused by ada 12 s ago, before step 7 (the machine is needed)"."""
    where = "" if pause.step is None else f", before step {pause.step}"
    why = f" ({pause.reason})" if pause.reason else ""
    return f"was paused by {pause.by} {max(0.0, now - pause.since):.0f} s ago{where}{why}"


def _refusal(run: RunState, asked: PauseRun) -> str:
    if run.outcome is not None:
        return f"run {run.id} is over: {run.outcome.reason}"
    if run.stopping.request is not None and not asked.resumes:
        return f"run {run.id} is to stop: {run.stopping.request.reason}"
    return ""


def _tell(run: RunState, info: str) -> None:
    run.store.put(*run.pauses.fact())
    run.events.infos.append(info)
    run.broadcast(run.pauses.order)


def _workers(run: RunState) -> range:
    return range(len(run.config.schedule.placement))


def _held(run: RunState, index: int) -> HeldBack:
    """Return what the worker of a place knows of the pause; nothing if it is lost, or has not reported."""
    member = run.registry.members.get(index)
    report = None if member is None or not member.reachable else member.report
    return NOT_HELD if report is None else report.held


def _stands(run: RunState, index: int) -> bool:
    held, member = _held(run, index), run.registry.members.get(index)
    there = member is not None and member.status is MemberStatus.PRESENT and member.exited is None
    return there and held.stands and held.number == run.pauses.number


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
