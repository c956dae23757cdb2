"""Watches over the workers: empties a lost one's place for a replacement, or gives up the run, with the reason.

lost ──(may be replaced)──────────> its place is empty ──(no replacement in time)──> the run ends
  └──(replaced too often already, or it would fail again)──────────────────────────────^

A scripted run goes on for a lease if its script is gone:

    lost ──> its place is empty ──(another process takes it)──> the run goes on
    Goodbye        │
       │           └──(a lease has passed)──┐
       └────────────────────────────────────┴──> the run stops with its newest complete checkpoint

The workers carry out what it has called for, and save the state after that. The script is the user's program, which
nothing here starts again: its losses do not count in `recovery.restarts`. Without snapshots no other process could go
on where it was, and the run stops at once.
"""

from stageline.broker.control.messages import Exited, Failed, Goodbye, StopRun
from stageline.broker.diagnosis.explain import Diagnosis, diagnose, failure_report, how_lost
from stageline.broker.diagnosis.wait_graph import ClusterState, Starts
from stageline.broker.ledger.member import (
    PARTING,
    Member,
    MemberStatus,
    Standstill,
    WorkerLoss,
    describe_exit,
    worker_label,
)
from stageline.broker.ledger.registry import Replacement
from stageline.pipeline.errors import ExitCode, failure_code

from .records import RunRecords
from .run import RunConfig
from .shutdown import Shutdown

# Results of a process that would fail again if it were restarted, and those that are the run's exit code too.
_DELIBERATE = frozenset({ExitCode.USAGE, ExitCode.REFUSED})
_PASSED_ON = frozenset({ExitCode.USAGE, ExitCode.SAVED, ExitCode.REFUSED, ExitCode.INTERRUPTED})


class Supervision:
    """Of the workers of one run. Times are seconds since the epoch."""

    def __init__(self, run: RunRecords, shutdown: Shutdown) -> None:
        self._run = run
        self._script = ScriptPlace(run, shutdown)
        self._standstill = Standstill(run.config.lease)

    def check(self, now: float) -> None:
        """Finds lost workers; the first loss that the run cannot survive ends it, once all have been recorded."""
        self.check_partings(now)
        found = [(self._lose(loss, now), loss.result) for loss in self._run.registry.losses(now)]
        reason, result = next((fatal for fatal in found if fatal[0]), ("", None))
        if reason:
            self._run.fail(reason, _code(result))
        else:
            self._check_standstill(now)

    def check_empty_places(self, now: float) -> None:
        """Ends the run if a place has been empty for too long."""
        missing, patience = self._run.registry.missing, self._run.config.patience
        for pending in self._run.replacements.pending.values():
            if pending.index not in missing:
                continue
            if pending.index == self._run.config.script:
                self._script.check_empty(pending, now)
            elif now - pending.awaited >= patience:
                self._run.fail(
                    f"no replacement joined within {now - pending.awaited:.0f} s for {self._label(pending.index)}: "
                    f"{self.diagnose(now, pending.index).text}",
                    ExitCode.NO_WORKER,
                )

    def mark_lost(self, now: float) -> None:
        """After the run, silent workers have left or are lost; nothing follows from it."""
        for loss in self._run.registry.losses(now):
            finished = loss.member.status is MemberStatus.FINISHED
            loss.member.status = MemberStatus.LEFT if finished else MemberStatus.LOST

    def note_parting(self, member: Member, message: Failed | Goodbye, now: float) -> None:
        """A worker says that it ends. It says nothing else from then on, and its process ends soon: see
        `check_partings`. The script makes no more calls, and may stay until the workers have carried out the last."""
        if member.is_script and isinstance(message, Goodbye):
            member.status = MemberStatus.LEFT
            self._script.leave(member, message, now)
        elif self._run.lifecycle.over:
            member.status = MemberStatus.LEFT
        else:
            member.parting = member.parting or (now, message)
            self.check_partings(now)

    def note_alive(self, member: Member) -> None:
        """A worker that goes on has not said that it ends: a process did that has read its secret."""
        if member.parting is not None:
            kind, member.parting = type(member.parting[1]).__name__, None
            self._run.events.count_once("contradicted", f"refused: {kind} of {member.label}, which goes on")

    def check_partings(self, now: float) -> None:
        """Believes the workers that said that they end, once their processes have ended, or they are silent."""
        parting = [(*member.parting, member) for member in self._run.registry.reachable() if member.parting is not None]
        for since, message, member in sorted(parting, key=lambda each: each[0]):
            if (member.exited is not None or now - since >= PARTING) and not self._run.lifecycle.over:
                self._part(member, message, now)

    def _part(self, member: Member, message: Failed | Goodbye, now: float) -> None:
        why, code = f"{member.label} failed: {message.reason}", int(ExitCode.FAILED)
        if isinstance(message, Failed):
            code = failure_code(message.code)
        else:
            why = self._lose(WorkerLoss(member, f"left: {message.reason}"), now)
        member.status = MemberStatus.LEFT
        if why:
            self._run.fail(why, code)

    def note_exit(self, exited: Exited, now: float) -> None:
        """A process ended. While the run lasts, its worker is lost once its last messages have had time to arrive."""
        registry = self._run.registry
        member, over = registry.members.get(exited.index), self._run.lifecycle.over
        if member is None and exited.index in registry.missing and not over:
            self._note_failed_start(exited, now)
        elif member is not None and member.pid == exited.pid:
            if over:
                member.status = MemberStatus.LEFT
            elif member.reachable:
                member.exited = now, exited
                self.check_partings(now)

    def diagnose(self, now: float, worker: int | None = None) -> Diagnosis:
        """Why the run waits, or why `worker` does."""
        config = self._run.config
        return diagnose(
            ClusterState(
                config.schedule,
                config.placement,
                config.script,
                self._run.registry.members,
                self._run.replacements.pending,
                self._run.ledger,
                now,
                config.leases,
                config.patience,
                replaces=config.restarts > 0,
                starts=_starts(config),
            ),
            worker,
        )

    def _lose(self, loss: WorkerLoss, now: float) -> str:
        """Why the run cannot survive the loss; "" if it can, and then the worker's place is empty.

        Before the run starts, a lost worker of which no exit is known only frees its place.
        """
        member = loss.member
        if member.is_script:
            self._script.lose(loss, now)
            return ""
        if not self._run.registry.begun and not loss.exited:
            self._run.registry.free(member)
            self._run.events.infos.append(f"{member.label} is free again: {member.process} {loss.why}")
            return ""
        why = failure_report(loss, self._run.ledger, now)
        if not self._may_replace(member.index, loss.result):
            found = self.diagnose(now)
            if found.chain.edges and not found.chain.harmless:
                why += f". {found.text[0].upper()}{found.text[1:]}"
            member.status = MemberStatus.LOST
            return why + self._times_replaced(member.index)
        self._run.registry.free(member)
        self._run.replacements.count(member.index)
        self._run.replacements.pending[member.index] = Replacement(
            member.index, now, why, member.pid, now, how_lost(loss), member.host
        )
        self._run.add_lost_work([member], loss.why, now)
        self._run.go_back(member.stages)
        self._run.events.infos.append(f"{why}. Its replacement begins at step {self._run.checkpoints.complete}")
        return ""

    def _note_failed_start(self, exited: Exited, now: float) -> None:
        """A process ended that was to take an empty place; unless it is the one whose loss has emptied it."""
        pending = self._run.replacements.pending.get(exited.index)
        if pending is not None and pending.pid == exited.pid:
            self._note_end_of_lost(pending, exited)
            return
        if exited.index == self._run.config.script:
            self._script.note_failed_start(exited, now)
            return
        comma = "," if exited.detail else ""
        what = f"{self._label(exited.index)} {describe_exit(exited)}{comma} before it joined; see its own output"
        if self._may_replace(exited.index, exited.result):
            self._run.replacements.count(exited.index)
            self._run.save()
            self._run.events.infos.append(what)
        else:
            self._run.fail(f"{what}{self._times_replaced(exited.index)}", _code(exited.result))

    def _note_end_of_lost(self, pending: Replacement, exited: Exited) -> None:
        """What the process of a worker that was lost before has told at its end."""
        if exited.detail and exited.detail not in pending.why:
            pending.why += f". It was {exited.detail}"
            self._run.events.infos.append(f"{self._label(pending.index)}, which was lost, was {exited.detail}")

    def _may_replace(self, index: int, result: int | None) -> bool:
        in_a_row = self._run.replacements.in_a_row[index]
        return result not in _DELIBERATE and in_a_row < self._run.config.restarts

    def _times_replaced(self, index: int) -> str:
        times, most = self._run.replacements.in_a_row[index], self._run.config.restarts
        since = self._run.checkpoints.complete
        return (
            f". It was replaced {times} times since checkpoint {since} (recovery.restarts is {most})" if times else ""
        )

    def _check_standstill(self, now: float) -> None:
        """Ends the run if all workers wait for each other: nothing will change that."""
        members = self._run.registry.reachable()
        lasts = self._standstill.lasts(members, now)
        if lasts >= self._standstill.bound and self._run.registry.complete:
            found = self.diagnose(now)
            places = ", ".join(f"{each.title} at {each.endpoint} on host {each.host}" for each in members)
            hint = f"Can they reach each other's queues? They are: {places}. See queues.url"
            if any(edge.room for edge in found.chain.edges):
                hint = f"{found.action[:1].upper()}{found.action[1:]}"
            self._run.fail(
                f"every worker has been waiting for another for {lasts:.0f} s: {found.text}. {hint}", ExitCode.FAILED
            )

    def _label(self, index: int) -> str:
        return worker_label(index, self._run.config.labels[index])


def _starts(config: RunConfig) -> Starts:
    if config.code is not None:
        return Starts.BY_NAMES
    return Starts.BY_SUPERVISOR if config.supervised else Starts.BY_PLAN


def _code(result: int | None) -> int:
    return result if result in _PASSED_ON else ExitCode.FAILED


class ScriptPlace:
    """The script's place in one run. Times are seconds since the epoch."""

    def __init__(self, run: RunRecords, shutdown: Shutdown) -> None:
        self._run = run
        self._shutdown = shutdown

    def lose(self, loss: WorkerLoss, now: float) -> None:
        """Empties its place."""
        member, why = loss.member, failure_report(loss, self._run.ledger, now)
        self._run.registry.free(member)
        if not self._run.config.restarts:
            self._stop(why, now)
            return
        gap = Replacement(member.index, now, why, member.pid, now, host=member.host)
        self._run.replacements.pending[member.index] = gap
        self._run.save()
        lease = self._run.config.lease
        self._run.events.infos.append(f"{why}. The run stops in {lease:g} s unless another process takes its place")

    def leave(self, member: Member, goodbye: Goodbye, now: float) -> None:
        """It says that it will make no more calls."""
        self._shutdown.called_for = goodbye.training_steps
        self._stop(f"{member.label} left: {goodbye.reason}", now)

    def note_failed_start(self, exited: Exited, now: float) -> None:
        """The process that was to become the script has ended."""
        if exited.index not in self._run.replacements.pending:
            self._stop("the script has ended before it joined; see its own output", now)

    def check_empty(self, pending: Replacement, now: float) -> None:
        """Stops the run if the place has been empty for a lease."""
        if now - pending.awaited >= self._run.config.lease:
            self._stop(pending.why, now)

    def _stop(self, reason: str, now: float) -> None:
        """Not if a stop was requested before: its workers may have to finish a step first."""
        if self._shutdown.request is None and not self._run.lifecycle.over:
            self._shutdown.stop(StopRun(reason, at_step_end=self._run.config.snapshots), now)
