"""Workers' reports taken into the run's state.

Everything new is stored first, then the report is confirmed. A report of a genuine worker may contain what cannot be:
numbers that do not exist, snapshots that are not due. Such a report, or such a part of it, has no effect; it is
counted, and named in the log.

Reads `config`, `outcome`. Writes the member, `ledger`, `pace`, `digests`, `evaluations`, `checkpoints`, `milestones`,
`replacements`, `stopping`, and what workers report of the run's length; stores them.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from stageline.broker.control.messages import MOST_DIGESTS, MOST_QUEUES, MOST_ROUNDS, Confirmed, Report
from stageline.broker.control.protocol import is_full
from stageline.broker.control.records import EvaluationRecord, StepRecord
from stageline.broker.ledger.evaluations import EvaluationsDiffer, not_finite, told
from stageline.broker.ledger.ledger import Holder, IllegalTransition
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.milestones import Milestone
from stageline.pipeline.errors import ExitCode

from . import copying, records
from .script_calls import note_calls
from .shutdown import update_outcome
from .state import RunState

_HIGHEST = 2**50  # number of an order about a pause: milliseconds since the epoch, and a few more
_DIFFERING = (
    "what was taken from {} in step {} is not what was put there: another client of the queues' server has replaced "
    "messages, or what computed them was not deterministic. Let only this run's processes use that server (a password, "
    "and TLS), and resume the run: it begins at its newest complete checkpoint, without those messages"
)


def ingest(run: RunState, member: Member, report: Report, now: float) -> Sequence[StepRecord]:
    """Take in a report of `member`. Return the steps that it has added.

    An implausible report is counted and has no effect.

    Args:
        run: The state.
        member: The sender.
        report: The report.
        now: Seconds since the epoch.
    """
    if wrong := implausible(report, member):
        run.events.count("implausible", f"{member.label} reports what cannot be: {wrong}")
        return ()
    member.note_report(report, now)
    run.counters.heard(now)
    run.counters.note_queues(member, report)
    before = run.ledger.finished_floor
    if report.digests and (place := run.digests.differing(report.digests)) is not None:
        run.fail(_DIFFERING.format(*place), ExitCode.FAILED)
    if run.config.scripted:
        note_calls(run, member, report)
    elif report.training_steps != run.told_steps:
        run.learn_steps(report.training_steps)
    holder = Holder(member.name, member.incarnation)
    found = run.ledger.ingest(report, member.stages, holder, counted=member.counted)
    if found.steps:
        run.store.append(found.steps, found.losses)
        ahead = None if report.clock is None else report.clock[0]
        run.counters.note_steps(run.pace.note(found.steps, ahead), run.config.schedule.copies - 1)
        run.counters.reached(before, run.ledger.finished_floor, now)
        run.pace.reached(run.ledger.finished_floor, now)
        member.counted.update(record.stage for record in found.steps)
    found.illegal.extend(_add_evaluations(run, report, member))
    copied = copying.note(run, member, report) if report.copies.states else False
    if report.snapshots or copied or (found.steps and run.checkpoints.awaits_steps):
        found.illegal.extend(record_snapshots(run, report, member, copied=copied))
        if run.outcome is not None:
            update_outcome(run, run.outcome)
    for error in found.illegal:
        run.events.count("illegal", f"{member.label} reports what cannot be: {error}")
    if member.resumes and member.index in run.replacements.pending:
        since = now - run.replacements.pending.pop(member.index).since
        run.counters.recovered(since)
        run.milestones.append(Milestone("return", now, run.checkpoints.complete, member.index, member.resumes))
        run.events.infos.append(f"{member.label} {member.resumes}, {since:.1f} s after its loss was detected")
    if report.number:
        run.outgoing.append((member.sender, Confirmed(report.number, now if report.timed else 0.0)))
    if run.outcome is not None:
        run.outgoing.append((member.sender, run.outcome.stop_message))
    return found.steps


def lacks_checkpoint(run: RunState, complete: int, member: Member | None) -> bool:
    """Return True if `member` was told of a newer checkpoint than the records have, so that they must be stale.

    Args:
        run: The state.
        complete: The newest checkpoint that was announced to the member.
        member: The member, or None if there is none; then returns False.
    """
    return run.config.restarts > 0 and member is not None and complete > run.checkpoints.complete


def newer_knowledge(run: RunState, report: Report, member: Member) -> str:
    """Return, for people, what a worker knows of the run that the records lack, so that they are stale; "" if nothing.

    Args:
        run: The state.
        report: The worker's report.
        member: The worker.
    """
    if lacks_checkpoint(run, report.complete, member):
        return f"a worker knows of checkpoint {report.complete}, the broker's records do not"
    if run.config.restarts and report.orders > len(run.orders.orders):
        return "a worker knows of a schedule that the broker's records do not have"
    return ""


def record_snapshots(run: RunState, report: Report, member: Member, *, copied: bool = False) -> list[IllegalTransition]:
    """Record the snapshots that a worker reports, and complete a checkpoint if possible. Return the illegal ones.

    Args:
        run: The state.
        report: The report.
        member: Its sender.
        copied: True if the report told of a new copy, which is recorded already.
    """
    told_of = [] if run.digests.differed else report.snapshots  # later ones contain what came of the difference too
    illegal = {each: wrong for each in told_of if (wrong := _wrong_with(run, each, report, member))}
    added = [run.checkpoints.add(*each) for each in told_of if each not in illegal]
    copying.choose_holders(run)  # a broker that has lost its records may not have done so yet
    completed = run.checkpoints.advance(run.ledger.finished_floor, copied=run.outcome is None)
    if completed:
        run.replacements.in_a_row.clear()
        run.milestones.append(Milestone("checkpoint", member.last_seen, run.checkpoints.complete))
    if completed or copied or any(added):
        records.save(run)
    return [IllegalTransition(wrong) for wrong in illegal.values()]


def implausible(report: Report, member: Member) -> str:
    """Return the first error in the numbers and names of a report, "" if there is none.

    `member` is the report's sender: digests must be of its own queues.
    """
    return next(_wrongs(report, member), "")


def is_due(step: int, every: int, ends: Iterable[int | None]) -> bool:
    """Return True if stages write a snapshot after `step`: one is due `every` so many steps, and after steps in `ends`.

    With `every` 0, which means unknown, each step counts as due.

    Args:
        step: The number of steps before the snapshot.
        every: Steps between two snapshots.
        ends: Steps that the run may end with.
    """
    return not every or step % every == 0 or step in ends


def _add_evaluations(run: RunState, report: Report, member: Member) -> Iterator[IllegalTransition]:
    """Store the results of rounds of evaluation, and yield the illegal ones.

    This comes before the snapshots of the same report are counted, so that the best round is known before a checkpoint
    lets go of its snapshots.
    """
    for record in report.evaluations:
        if run.config.schedule.stages - 1 not in member.stages:
            yield IllegalTransition(f"the evaluation after step {record.step} is not its own")
            continue
        try:
            new = records.add_evaluation(run, record)
            if new:
                _tell(run, record)
        except EvaluationsDiffer as error:
            run.fail(str(error), ExitCode.FAILED)
        except KeyError as error:
            yield IllegalTransition(f"the evaluation after step {record.step} has no {error}")


def _tell(run: RunState, record: EvaluationRecord) -> None:
    standing = run.evaluations.standing()
    best = ", the best so far" if standing is not None and standing.improved else ""
    run.events.infos.append(f"evaluation after step {record.step}: {told(record)}{best}")
    for name, value in not_finite(record).items():
        run.events.warnings.append(
            f"evaluation after step {record.step}: {name} is {value}, which is not better than any number"
        )


def _wrong_with(run: RunState, snapshot: tuple[int, int], report: Report, member: Member) -> str:
    """Return why the stage cannot have written that snapshot, "" if it can."""
    stage, step = snapshot
    if stage not in member.stages:
        return f"stage {stage} is not its own"
    config, rounds = run.config, run.rounds
    stopped = None if run.outcome is None else run.outcome.step
    ends = (run.training_steps or step, stopped, *run.pauses.steps)  # a script may end anywhere
    keeps = config.keeps_best or (config.criterion is not None and config.criterion.patience is not None)
    evaluated = keeps and (rounds is None or rounds.due(step))  # it may be the last step: the verdict comes later
    if not evaluated and not is_due(step, config.snapshot_every, ends):
        return f"stage {stage} writes no snapshot of step {step}"
    # If there are so many steps that they do not fit into one report, snapshots come before the rest of them.
    full = is_full(len(report.steps), sum(len(record.times) for record in report.steps))
    if stage in member.counted and not full and step > run.ledger.finished[stage]:
        return f"stage {stage} has not come to step {step}, of which it has a snapshot"
    return ""


def _wrongs(report: Report, member: Member) -> Iterator[str]:
    for name, number in (("since", report.since), ("troubled", report.troubled), ("counted", report.counted)):
        if not (isfinite(number) and number >= 0):
            yield f"{name} is {number}"
    if not 0 <= report.idle <= 1:
        yield f"idle is {report.idle}"
    if report.clock is not None and not all(map(isfinite, report.clock)):
        yield f"its clock is off by {report.clock[0]}, give or take {report.clock[1]}"
    if report.held.number > _HIGHEST:
        yield f"it knows order {report.held.number} about a pause"
    if report.retained_bytes < 0:
        yield f"it retains {report.retained_bytes} bytes"
    for name, depth in report.puts.items():
        if not depth.is_possible:
            yield f"queue {name} has the counts {depth}"
    for what, most, count in (
        ("queues", MOST_QUEUES, max(len(report.puts), len(report.takes))),
        ("evaluations", MOST_ROUNDS, len(report.evaluations)),
        ("digests of queues", MOST_DIGESTS, len(report.digests)),
    ):
        if count > most:
            yield f"it has {count} {what}"
    for name in {queue for queue, _, _ in report.digests}:
        if member.queue(name) is None:
            yield f"it has a digest of {name[:40]!r}, which is no queue of its own"
    if not all(isfinite(wait.since) for wait in report.waits):
        yield "a wait has no time"
