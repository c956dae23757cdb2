"""The end of a run: on request, with its exit code, reason and last step; or finished.

`StopPlan` knows the step after which a run can stop on request. The script of a scripted run is asked for the last step
that it has called for, and makes no more calls from then on.

A run has finished once every worker says so and the ledger says the same:

    Finished ──(all steps of the worker's stages are in the ledger)──> finished ──(all workers are)──> the run is over
         └──(some are not)──> nothing; said once if that stays so: its worker repeats Finished until the run is over

A worker sends Finished after the broker has confirmed all its steps. So one that comes earlier is not the worker's.

Reads `config`, `registry`, `ledger`, `checkpoints`, `training_steps`. Writes `stopping`, `unsupported`, `lifecycle`,
`outcome`.
"""

import msgspec

from stageline.broker.control.messages import Finished, Stop, StopRun
from stageline.broker.ledger.member import Member
from stageline.pipeline.digest import differing_copies, weights_sha256
from stageline.pipeline.errors import ExitCode

from . import records
from .pausing import bounded, end_with_run, yield_to_stop
from .run import RunOutcome, RunPhase
from .script_calls import callers, calls_on
from .state import Life, RunEvent, RunState

# Seconds until what supports an end may have come: from a replacement of the last stage's worker, which tells where a
# run ended early, or from the script, whose thread may have to wait for the user's code
GRACE = 5.0


def note_progress(run: RunState, now: float) -> None:
    """Note the pace of a running or stopping run."""
    if run.lifecycle.state in (Life.RUNNING, Life.STOPPING):
        run.stopping.note_progress(run.ledger.begun, now)


def stop(run: RunState, request: StopRun, now: float) -> None:
    """Stop the run. After its end: let its broker exit, and workers no longer finish the step.

    Args:
        run: The state.
        request: The request to stop. With `over` it only dismisses the broker; before the run's end it then changes
            nothing, and is counted as an anomaly.
        now: Seconds since the epoch.
    """
    outcome = run.outcome
    if request.over and outcome is None:
        run.events.count("too early", "the run has not ended, and its broker was told that it is over")
        return
    run.lifecycle.move(RunEvent.STOP_REQUESTED)
    yield_to_stop(run, now)
    if outcome is not None:
        ends = outcome if request.at_step_end else msgspec.structs.replace(outcome, at_step_end=False, step=None)
        run.stop_workers(ends)
        return
    if run.stopping.ask(request, run.ledger.begun, now) and _may_save(run, request):
        stop_calls = Stop(request.reason, ExitCode.SAVED, at_step_end=True)
        run.outgoing.extend((each.sender, stop_calls) for each in callers(run))  # an answer comes within a beat
    stop_if_due(run, now)


def stop_if_due(run: RunState, now: float) -> None:
    """End a run that is to stop, once the step after which all workers can stop is known."""
    plan, request, begun = run.stopping, run.stopping.request, run.ledger.begun
    if request is None or run.lifecycle.over:
        return
    waits = _may_save(run, request) and run.registry.begun
    if waits and not plan.knows_last_step(begun, now, asks_script=bool(callers(run))):
        return
    # If the workers are on other machines, the script alone knows which calls come before the state that they would
    # save; it has that on its disk when it says that it makes no more.
    saves = _may_save(run, request) and (run.config.code is None or plan.called_for is not None)
    last_step = bounded(run, plan.last_step(begun, run.training_steps, now)) if saves else None
    plan.decide()
    end_with_run(run, now)
    reason, code = _reason(run, request)
    run.end(RunEvent.STOP_DUE, RunOutcome(RunPhase.FAILED, reason, code, at_step_end=saves, step=last_step))


def update_outcome(run: RunState, outcome: RunOutcome) -> None:
    """Record a newer checkpoint in the outcome of a stopped run, once its workers have completed it."""
    request = run.stopping.request
    if request is None or not run.stopping.decided:
        return
    reason, code = _reason(run, request)
    updated = msgspec.structs.replace(outcome, reason=reason, code=code)
    if updated != outcome:
        run.record_outcome(updated)


def note_finished(run: RunState, member: Member, finished: Finished, now: float) -> None:
    """Note that `member` has finished, and end the run if it was the last one.

    A worker whose steps are not all in the ledger does not count as finished; see `check_finished`. A
    script that says so is counted as an anomaly. After the run's end, the sender is told again to stop.

    Args:
        run: The state.
        member: The sender.
        finished: The message, with the digests of the weights.
        now: Seconds since the epoch.
    """
    if run.outcome is not None:
        run.outgoing.append((member.sender, run.outcome.stop_message))
    elif why := member.unable_to_finish:
        run.events.count("illegal", f"{member.label} {why}")
    elif _lacking(run, member):
        run.unsupported.setdefault(member.incarnation, now)
    else:
        run.unsupported.pop(member.incarnation, None)
        member.finish(finished)
        _finish(run, now)


def check_finished(run: RunState, now: float) -> None:
    """Log the workers that have reported for GRACE seconds that they have finished although steps are missing."""
    for incarnation, since in list(run.unsupported.items()):
        member = run.registry.current(incarnation)
        if member is None:
            del run.unsupported[incarnation]
        elif now - since >= GRACE and (lacking := _lacking(run, member)):
            run.unsupported[incarnation] = float("inf")  # said once
            run.events.count_once("unsupported", f"refused: {member.label} has not finished: {lacking}")


def _may_save(run: RunState, request: StopRun) -> bool:
    return run.config.snapshots and request.at_step_end


def _reason(run: RunState, request: StopRun) -> tuple[str, int]:
    checkpoint = run.checkpoints.complete
    if not run.config.snapshots:
        return request.reason, ExitCode.INTERRUPTED
    if not checkpoint:
        return f"{request.reason}; nothing is saved yet", ExitCode.INTERRUPTED
    return f"{request.reason}; the state after {checkpoint} steps is saved", ExitCode.SAVED


def _lacking(run: RunState, member: Member) -> str:
    """Return why the ledger does not support the end of `member`, "" if it does."""
    if why := calls_on(run):
        return why
    config, finished, called = run.config, run.ledger.finished, run.stopping.called_for
    total = (run.training_steps if called is None else called) or 0
    behind = [stage for stage in member.stages if finished[stage] < total]
    return ", ".join(f"stage {config.schedule.label(s)} has trained {finished[s]} of {total} steps" for s in behind)


def _finish(run: RunState, now: float) -> None:
    """End the run if all workers have finished, with the digest of the weights that they have together."""
    members = run.registry.members.values()
    parts = [each.digests for each in members if each.digests is not None]
    if len(parts) < len(run.config.schedule.placement):
        return
    if why := differing_copies(parts, {name: first for each in members for name, first in each.copies.items()}):
        run.fail(why, ExitCode.FAILED)
        return
    digest = weights_sha256({name: digest for part in parts for name, digest in part.items()})
    early = run.early_end
    reason = "all steps are done" if early is None else early.reason
    outcome = RunOutcome(RunPhase.FINISHED, reason, ExitCode.OK, digest, early=early is not None)
    run.learn_steps(run.ledger.finished_floor)
    run.checkpoints.advance(run.ledger.finished_floor, copied=False)  # nothing is deleted any more
    records.keep_observation(run, now)  # first: records that say that the run has finished have its whole result
    run.end(RunEvent.ALL_FINISHED, outcome)
