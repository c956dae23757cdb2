"""Decisions at which step each stage starts when a run is resumed, or when the broker's records are lost.

RECONNECTING          does any worker still run? One lease; then it goes on, or is restarted as a whole
RECONCILING           what do the workers and the disks know? See `Reconciliation`
CHOOSING_CHECKPOINT   of which checkpoint can all snapshots be read? See `CheckpointPoll`

Reads `config`, `standby`. Writes `search`, `lifecycle`, and as a restart goes back: `registry`, `replacements`,
`ledger`, `checkpoints`, `digests`, `orders`.
"""

from typing import Literal

from stageline.broker.control.messages import Hello
from stageline.broker.ledger.losses import Replacement, losses
from stageline.broker.ledger.member import worker_label
from stageline.broker.ledger.milestones import Milestone
from stageline.broker.ledger.recovery import ReconciledState, ResumePoint
from stageline.pipeline.errors import ExitCode

from . import records
from .run import RESUMED, Resumption
from .script_place import place_of
from .state import Life, RunEvent, RunState

RECONCILE_RESUMED = 600.0  # seconds that a resumed run without records waits for the workers with its snapshots


def missing(run: RunState) -> list[int]:
    """Return the indexes of workers that the run waits for."""
    if run.lifecycle.state is Life.CHOOSING_CHECKPOINT:
        return run.search.poll.absent(_candidates(run))
    return run.registry.missing


def waiting_for(run: RunState) -> str:
    """Return, for people, what has to happen before places are given; "" if nothing has to."""
    match run.lifecycle.state:
        case Life.RECONCILING if run.search.reconciliation.resumed:
            return "the broker has no records of this run and asks all workers whether and how far it has run"
        case Life.RECONCILING:
            return "the broker has lost its records and asks the workers, which keep training, how far the run is"
        case Life.RECONNECTING:
            leases, complete = run.config.leases, run.checkpoints.complete
            return (
                f"broker restarted: waiting up to {leases.silence:g} s for running workers to reconnect "
                f"({leases.loading:g} s if they were loading); if none does, all begin at checkpoint {complete}"
            )
        case Life.CHOOSING_CHECKPOINT:
            absent = _labels(run, missing(run))
            return (
                f"the run continues when all workers have verified their snapshots of step {run.search.poll.step}"
                f"{f'; it waits for {absent}' if absent else ''}"
            )
        case _:
            return ""


def begin(run: RunState, how: Resumption | None, now: float) -> None:
    """Begin the run at the broker's start.

    Args:
        run: The state.
        how: The way in which the run is resumed; None if the broker only restarts.
        now: Seconds since the epoch.
    """
    if run.registry.members:
        what: Literal["broker", "resume"] = "broker" if how in (None, Resumption.UNLESS_AT_WORK) else "resume"
        run.milestones.append(Milestone(what, now, run.ledger.finished_floor))
    below = run.checkpoints.complete < _floor(run)
    if (below or how is Resumption.FROM_SNAPSHOTS) and run.config.restarts:
        lose_records(run, f"there are no records of run {run.id} here", now, resumed=True)
    elif how is Resumption.UNLESS_AT_WORK and run.registry.members:
        run.lifecycle.move(RunEvent.BROKER_RESTARTED)
    elif how is not None:
        _resume(run, now)
    else:
        _open(run)


def lose_records(run: RunState, why: str, now: float, *, resumed: bool = False) -> None:
    """Begin to collect what the workers and the disks know, since the records are lost or stale.

    Does nothing if the run's state does not allow it.

    Args:
        run: The state.
        why: How the loss was noticed, for the log; "" if nothing is lost, and nothing is to be done.
        now: Seconds since the epoch.
        resumed: True for a run that is resumed without records, which is no cause for a warning.
    """
    if not why or not run.lifecycle.allows(RunEvent.RECORDS_LOST):
        return
    run.lifecycle.move(RunEvent.RECORDS_LOST)
    lines = run.events.infos if resumed else run.events.warnings
    lines.append(f"{why}: asking all workers how far the run is")
    run.search.collect(run.config.lease, now, resumed=resumed)


def reconnect(run: RunState, now: float) -> None:
    """Continue a RECONNECTING run if its workers still run; restart it as a whole if none does."""
    at_work = _workers_at_work(run, now)
    if at_work:
        run.store.put(RESUMED, {})
        run.events.infos.append(f"run {run.id} continues: its workers are still running")
        run.lifecycle.move(RunEvent.START_KNOWN)
    elif at_work is not None:
        _resume(run, now)


def reconcile(run: RunState, now: float) -> bool:
    """End RECONCILING once the run's state is known; end the run if its state cannot become known.

    Returns True if the run's state is known now.
    """
    config, collected = run.config, run.search.reconciliation
    patience = RECONCILE_RESUMED if collected.resumed else max(config.patience, config.lease)
    if now - collected.began >= patience and collected.unknown:
        run.fail(
            "the broker's records are lost, and no worker joined that knows which snapshots exist of "
            f"{_labels(run, collected.unknown)}; start a worker where they are",
            ExitCode.NO_WORKER,
        )
        return False
    found = collected.result(now)
    if found is None:
        return False
    if found.step < _floor(run):
        _refuse(run, collected.lacking(_floor(run)))
        return False
    if collected.resumed and not found.kept:
        _restart_all_at(run, found.step)
        run.events.infos.append(f"the run is at checkpoint {found.step}")
        _open(run)
    else:
        _apply(run, found, now)
        workers = len(found.kept.keys() - {config.script})
        run.events.infos.append(f"the run is at checkpoint {found.step}; {workers} workers keep running")
        run.lifecycle.move(RunEvent.START_KNOWN)
    run.store.put(RESUMED, {})
    return True


def choose_checkpoint(run: RunState, now: float) -> None:
    """Decide where a CHOOSING_CHECKPOINT run begins, once all workers are there.

    Ends the run if no checkpoint can be used.
    """
    run.standby.prune(now)
    tried = run.search.poll
    found = tried.result(_candidates(run))
    if found is None:
        return
    run.events.warnings.extend(run.search.follow(found))
    if isinstance(found, ResumePoint):
        _begin_at(run, found)
    else:
        run.events.warnings.append(f"checkpoint {tried.step} cannot be used: checking checkpoint {found.step}")


def starts_at_checkpoint(run: RunState) -> bool:
    """Return True if a run that was running before starts again at a checkpoint, with no worker placed yet."""
    unplaced = not run.registry.begun and not run.registry.members
    return unplaced and run.config.snapshots and run.checkpoints.complete > 0


def _workers_at_work(run: RunState, now: float) -> bool | None:
    """Return True if workers of a restarted broker's run are still running, False if not, None if some may reconnect.

    If some workers are lost, the others are of use only if the lost ones can be replaced.
    """
    replaces, members = run.config.restarts > 0, run.registry.members.values()
    lost = len(losses(run.registry.reachable(), run.config.leases, now))
    reconnected = [member for member in members if member.sender]
    if len(reconnected) == len(members) or (reconnected and replaces):
        return True
    return False if lost == len(members) or (lost and not replaces) else None


def _resume(run: RunState, now: float) -> None:
    """Continue a run that was stopped, or whose processes are all gone, at its newest complete checkpoint."""
    lost = list(run.registry.members.values())
    run.registry.free_all()
    run.replacements.clear()
    for member in lost:
        run.checkpoints.lose_copies(member.index)
    records.go_back(run, lost, range(run.config.schedule.copies), "ended before the run was resumed", now)
    run.store.put(RESUMED, {})
    newest = run.checkpoints.complete
    run.events.infos.append(f"run {run.id} is resumed; its newest complete checkpoint is {newest}")
    _open(run)


def _restart_all_at(run: RunState, step: int) -> None:
    """Empty every place; all stages will begin at checkpoint `step`, whatever the records say."""
    stages = range(run.config.schedule.copies)
    run.registry.free_all()
    run.checkpoints.reset(step)
    run.ledger.reset(stages, step)
    run.store.go_back(stages, step)
    records.save(run)


def _apply(run: RunState, state: ReconciledState, now: float) -> None:
    """Replace the records by what workers and disks know."""
    known = run.registry.incarnation, run.search.reconciliation.incarnation
    run.registry.reset(state.kept, state.step, max(*known, records.unused_incarnation(now)), now, run.replacements.ever)
    run.digests.clear()
    memories = [kept.hello.memory for kept in state.kept.values()]
    if run.orders.learn(memory.orders for memory in memories if memory is not None):
        run.store.put(*run.orders.fact())
    run.checkpoints.reset(state.step)
    run.replacements.clear()
    for index in run.registry.missing:
        who = place_of(run, index).owner
        run.replacements.pending[index] = Replacement(index, now, f"{who} did not reconnect", 0, now)
    for index, stages in enumerate(run.config.placement):
        kept = state.kept.get(index)
        memory = kept.hello.memory if kept is not None else None
        run.ledger.reset(stages, memory.step if memory is not None else state.step)
    run.store.go_back(range(run.config.schedule.copies), state.step)
    records.save(run)


def _open(run: RunState) -> None:
    """Allow places to be given. If all stages start at a checkpoint, verify its snapshots first."""
    if run.checkpoints.complete < _floor(run):
        _refuse(run, [])
    elif starts_at_checkpoint(run):
        run.search.verify(run.checkpoints.complete, _floor(run), run.config.neighbours)
        run.lifecycle.move(RunEvent.CHECKPOINT_UNVERIFIED)
    else:
        run.lifecycle.move(RunEvent.START_KNOWN)


def _begin_at(run: RunState, point: ResumePoint) -> None:
    newest, earlier = run.checkpoints.complete, run.config.earlier
    if point.step is None:
        way_out = "Put the files back" if earlier is None else f"{earlier.remedy(run.config.placement)},"
        run.fail(
            f"checkpoint {newest} cannot be used, and there is no other one that can: "
            f"{'; '.join(point.damages)}. {way_out} and resume the run, or begin another",
            ExitCode.FAILED,
        )
        return
    if point.step != newest:
        _restart_all_at(run, point.step)
        instead = f"checkpoint {newest} cannot be used: the run begins at checkpoint {point.step} instead"
        run.search.note_damage(instead)
        run.events.warnings.append(instead)
    run.events.infos.append(f"run {run.id} continues; every stage begins at step {point.step}")
    run.lifecycle.move(RunEvent.START_KNOWN)


def _floor(run: RunState) -> int:
    """Return the step below which the run does not begin: 0, or the step at which it goes on from an earlier run."""
    return 0 if run.config.earlier is None else run.config.earlier.step


def _refuse(run: RunState, lacking: list[int]) -> None:
    if (earlier := run.config.earlier) is not None:
        run.fail(earlier.refusal(run.config.placement, lacking), ExitCode.FAILED)


def _candidates(run: RunState) -> list[Hello]:
    return [contact.hello for contact in run.standby.values() if not contact.hello.spare]


def _labels(run: RunState, indexes: list[int]) -> str:
    return " and ".join(worker_label(index, run.config.labels[index]) for index in indexes)
