"""Supervision of the workers: a lost one's place is emptied for a replacement, or the run is given up with the reason.

lost ──(may be replaced)──────────> its place is empty ──(no replacement in time)──> the run ends
  └──(replaced too often already, or it would fail again)──────────────────────────────^

A scripted run goes on for a lease if its script is gone:

    lost ──> its place is empty ──(another process takes it)──> the run goes on
    Goodbye        │
       │           └──(a lease has passed)──┐
       └────────────────────────────────────┴──> the run stops with its newest complete checkpoint

The workers carry out what the script has called for, and save the state after that. The script is the user's program,
which nothing here starts again: its losses do not count in `recovery.restarts`. Without snapshots no other process
could go on where it was, and the run stops at once.

Reads `config`, `ledger`, `checkpoints`. Writes `registry` and its members, `replacements`, `standstill`; through
`shutdown` and `records`, what follows.
"""

from stageline.broker.control.messages import Exited, Failed, Goodbye, StopRun
from stageline.broker.ledger.explain import Diagnosis, diagnose, failure_report, how_lost
from stageline.broker.ledger.losses import PARTING, Replacement, WorkerLoss, describe_exit, losses
from stageline.broker.ledger.member import Member, MemberStatus, worker_label
from stageline.broker.ledger.wait_graph import ClusterState, Vacancy
from stageline.pipeline.errors import ExitCode, failure_code

from . import records
from .run import RunConfig
from .shutdown import stop
from .state import RunState

# Results of a process that would fail again if it were restarted, and those that are the run's exit code too.
_DELIBERATE = frozenset({ExitCode.USAGE, ExitCode.REFUSED})
_PASSED_ON = frozenset({ExitCode.USAGE, ExitCode.SAVED, ExitCode.REFUSED, ExitCode.INTERRUPTED})


def check(run: RunState, now: float) -> None:
    """Record lost workers, and end the run for the first loss that it cannot survive, or for a standstill.

    All losses are recorded before the run ends.
    """
    check_partings(run, now)
    lost = losses(run.registry.reachable(), run.config.leases, now)
    found = [(_lose(run, loss, now), loss.result) for loss in lost]
    reason, result = next((fatal for fatal in found if fatal[0]), ("", None))
    if reason:
        run.fail(reason, _code(result))
    else:
        _check_standstill(run, now)


def check_empty_places(run: RunState, now: float) -> None:
    """End the run if a place has been empty for too long; stop it if that is the script's place."""
    missing, patience = run.registry.missing, run.config.patience
    for pending in [each for each in run.replacements.pending.values() if each.index in missing]:
        empty = now - pending.awaited
        if pending.index == run.config.script:
            if empty >= run.config.lease:
                _stop_without_script(run, pending.why, now)
        elif empty >= patience:
            why = why_waiting(run, now, pending.index).text
            lacks = f"no replacement joined within {empty:.0f} s for {_label(run, pending.index)}: {why}"
            run.fail(lacks, ExitCode.NO_WORKER)


def mark_lost(run: RunState, now: float) -> None:
    """Mark silent workers of a run that is over as left or lost. Nothing follows from it."""
    for loss in losses(run.registry.reachable(), run.config.leases, now):
        if loss.member.status is MemberStatus.FINISHED:
            loss.member.leave()
        else:
            loss.member.lose()


def note_parting(run: RunState, member: Member, message: Failed | Goodbye, now: float) -> None:
    """Note a worker's message that it ends.

    The worker sends nothing else from then on, and its process ends soon: see `check_partings`. The script makes no
    more calls, and may stay until the workers have carried out the last.

    Args:
        run: The state.
        member: The sender.
        message: Its last message.
        now: Seconds since the epoch.
    """
    if member.is_script and isinstance(message, Goodbye):
        run.stopping.note_calls(message.training_steps, present=True)
        member.leave()
        _stop_without_script(run, f"{member.label} left: {message.reason}", now)
    elif run.lifecycle.over:
        member.leave()
    else:
        member.part(message, now)
        check_partings(run, now)


def note_alive(run: RunState, member: Member) -> None:
    """Drop a worker's message that it ends: the worker goes on, so a process that has read its secret sent that."""
    if (said := member.take_parting()) is not None:
        kind = type(said).__name__
        run.events.count_once("contradicted", f"refused: {kind} of {member.label}, which goes on")


def check_partings(run: RunState, now: float) -> None:
    """Accept the ends that workers have announced, once their processes have ended or they have been silent."""
    parting = [(*member.parting, member) for member in run.registry.reachable() if member.parting is not None]
    for since, message, member in sorted(parting, key=lambda each: each[0]):
        if (member.exited is not None or now - since >= PARTING) and not run.lifecycle.over:
            _part(run, member, message, now)


def note_exit(run: RunState, exited: Exited, now: float) -> None:
    """Note the end of a process. Its worker is lost once its last messages have had time to arrive.

    Args:
        run: The state.
        exited: The process's end.
        now: Seconds since the epoch.
    """
    member, over = run.registry.members.get(exited.index), run.lifecycle.over
    if member is None and exited.index in run.registry.missing and not over:
        _note_failed_start(run, exited, now)
    elif member is not None and member.pid == exited.pid:
        if over:
            member.leave()
        elif member.reachable:
            member.note_exit(exited, now)
            check_partings(run, now)


def why_waiting(run: RunState, now: float, worker: int | None = None) -> Diagnosis:
    """Return why the run waits, or why one of its workers does.

    Args:
        run: The state.
        now: Seconds since the epoch.
        worker: The worker's index; None for the whole run.
    """
    config = run.config
    return diagnose(
        ClusterState(
            config.schedule,
            config.placement,
            run.registry.members,
            run.replacements.pending,
            run.ledger,
            now,
            config.leases,
            [_vacancy(config, index) for index in range(len(config.placement))],
        ),
        worker,
    )


def _part(run: RunState, member: Member, message: Failed | Goodbye, now: float) -> None:
    if isinstance(message, Failed):
        why, code = f"{member.label} failed: {message.reason}", int(failure_code(message.code))
    else:
        why, code = _lose(run, WorkerLoss(member, f"left: {message.reason}"), now), int(ExitCode.FAILED)
    member.leave()
    if why:
        run.fail(why, code)


def _lose(run: RunState, loss: WorkerLoss, now: float) -> str:
    """Empty the place of a lost worker. Return why the run cannot survive the loss, "" if it can.

    Before the run starts, a lost worker only frees its place, unless its exit is known.
    """
    member = loss.member
    if member.is_script:
        return _lose_script(run, loss, now)
    if not (run.registry.begun or loss.exited):
        run.registry.free(member)
        run.events.infos.append(f"{member.label} is free again: {member.process} {loss.why}")
        return ""
    why = failure_report(loss, run.ledger, now)
    if not _may_replace(run, member.index, loss.result):
        found = why_waiting(run, now)
        if found.chain.edges and not found.chain.harmless:
            why += f". {found.text[0].upper()}{found.text[1:]}"
        member.lose()
        return why + _times_replaced(run, member.index)
    run.registry.free(member)
    run.replacements.count(member.index)
    run.replacements.pending[member.index] = Replacement(
        member.index, now, why, member.pid, now, how_lost(loss), member.host
    )
    records.go_back(run, [member], member.stages, loss.why, now)
    run.events.infos.append(f"{why}. Its replacement begins at step {run.checkpoints.complete}")
    return ""


def _lose_script(run: RunState, loss: WorkerLoss, now: float) -> str:
    member, why = loss.member, failure_report(loss, run.ledger, now)
    run.registry.free(member)
    if not run.config.restarts:
        _stop_without_script(run, why, now)
        return ""
    run.replacements.pending[member.index] = Replacement(member.index, now, why, member.pid, now, host=member.host)
    records.save(run)
    run.events.infos.append(f"{why}. The run stops in {run.config.lease:g} s unless another process takes its place")
    return ""


def _stop_without_script(run: RunState, reason: str, now: float) -> None:
    """Stop the run, unless a stop was requested before: its workers may have to finish a step first."""
    if run.stopping.request is None and not run.lifecycle.over:
        stop(run, StopRun(reason, at_step_end=run.config.snapshots), now)


def _note_failed_start(run: RunState, exited: Exited, now: float) -> None:
    """Note the end of a process that was to take an empty place, or of the process whose loss has emptied it."""
    index = exited.index
    pending, label = run.replacements.pending.get(index), _label(run, index)
    if pending is not None and pending.pid == exited.pid:
        if run.replacements.explain(index, exited.detail):
            run.events.infos.append(f"{label}, which was lost, was {exited.detail}")
    elif index == run.config.script:
        if pending is None:
            _stop_without_script(run, "the script has ended before it joined; see its own output", now)
    else:
        comma = "," if exited.detail else ""
        what = f"{label} {describe_exit(exited)}{comma} before it joined; see its own output"
        if _may_replace(run, index, exited.result):
            run.replacements.count(index)
            records.save(run)
            run.events.infos.append(what)
        else:
            run.fail(f"{what}{_times_replaced(run, index)}", _code(exited.result))


def _may_replace(run: RunState, index: int, result: int | None) -> bool:
    return result not in _DELIBERATE and run.replacements.in_a_row[index] < run.config.restarts


def _times_replaced(run: RunState, index: int) -> str:
    times, most, since = run.replacements.in_a_row[index], run.config.restarts, run.checkpoints.complete
    return f". It was replaced {times} times since checkpoint {since} (recovery.restarts is {most})" if times else ""


def _check_standstill(run: RunState, now: float) -> None:
    """End the run if all workers wait for each other: nothing will change that."""
    members = run.registry.reachable()
    lasts = run.standstill.lasts(members, now)
    if lasts >= run.standstill.bound and run.registry.complete:
        found = why_waiting(run, now)
        places = ", ".join(f"{each.title} at {each.endpoint} on host {each.host}" for each in members)
        hint = f"Can they reach each other's queues? They are: {places}. See queues.url"
        if any(edge.room for edge in found.chain.edges):
            hint = f"{found.action[:1].upper()}{found.action[1:]}"
        reason = f"every worker has been waiting for another for {lasts:.0f} s: {found.text}. {hint}"
        run.fail(reason, ExitCode.FAILED)


def _label(run: RunState, index: int) -> str:
    return worker_label(index, run.config.labels[index])


def _vacancy(config: RunConfig, index: int) -> Vacancy:
    if index == config.script:
        again = "start the script again, with Line.resume, so that it resumes the run"
        return Vacancy("start the script", again, config.leases.silence, "stops", replaced=False)
    start = f"start `stageline worker CONFIG --broker URL --index {index}`"
    if config.code is not None:
        command = f"stageline worker --join URL --index {index}"
        start = f"on its machine, in the folder with your code, start `{command}`"
    elif config.supervised:
        start = "wait: the process that started the broker starts a worker there"
    return Vacancy(start, start, config.patience, "is given up", replaced=config.restarts > 0)


def _code(result: int | None) -> int:
    return result if result in _PASSED_ON else ExitCode.FAILED
