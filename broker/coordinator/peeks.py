"""Looks into a worker: a question is passed on to it, and its answer to who asked.

    command --Ask peek---> broker --Peek--------> worker     the worker's control thread reads its log,
    command --Ask stack--> broker --ShowStacks--> worker     or the stacks of its threads,
    command --Ask log----> broker --ShowLog-----> worker     or the lines that it has logged
    command <--Answer----- broker <--Peeked------

The broker keeps nothing of what passes. A worker that does not answer in time is named.

Reads `registry`, `lifecycle`. Writes `peeks`.
"""

from collections.abc import Mapping

import msgspec

from stageline.broker.control.answers import StackFacts, WorkerStacks
from stageline.broker.control.log_answer import WorkerLog
from stageline.broker.control.messages import Answer, Ask, FromBroker, Refused
from stageline.broker.control.peek import Look, Peek, Peeked, ShowLog, ShowStacks
from stageline.broker.ledger.member import Member
from stageline.pipeline.errors import ExitCode

from .pacing import number
from .queue_queries import BadQuery, named_queue
from .state import PendingPeek, RunState

KINDS = ("peek", "export", "stack", "log")
PATIENCE = 2.5  # seconds that a worker gets to answer: less than a command waits for the broker
MOST_PENDING = 32
MOST_OF_ONE = 2  # that wait for one worker: its reports wait for them
MOST_MESSAGES = 64  # in one look


def pass_on(run: RunState, sender: bytes, ask: Ask, now: float) -> None:
    """Pass a question of `sender` on to the worker that can answer it, or refuse it."""
    try:
        member, peek = _request(run, ask, now)
    except BadQuery as error:
        run.outgoing.append((sender, Refused(f"{ask.what}: {error}", code=ExitCode.USAGE)))
        return
    run.peeks[peek.id] = PendingPeek(sender, ask.what, member.incarnation, member.label, now + PATIENCE)
    run.outgoing.append((member.sender, peek))


def note_answer(run: RunState, member: Member, peeked: Peeked) -> None:
    """Pass the answer of a worker on to who asked. One that is not waited for, or not of that worker, is dropped."""
    pending = run.peeks.get(peeked.id)
    if pending is None or pending.incarnation != member.incarnation:
        run.events.count("unasked", f"{member.label} answers a look that was not asked of it, or too late")
        return
    del run.peeks[peeked.id]
    run.outgoing.append((pending.sender, _answer(pending.what, run, member, peeked)))


def expire(run: RunState, now: float) -> None:
    """Refuse the questions whose workers have not answered in time."""
    for request, pending in list(run.peeks.items()):
        if now >= pending.until:
            del run.peeks[request]
            reason = (
                f"{pending.what}: {pending.label} has not answered within {PATIENCE:g} s: see `stageline status`, and "
                "ask again"
            )
            run.outgoing.append((pending.sender, Refused(reason, code=ExitCode.FAILED)))


def _request(run: RunState, ask: Ask, now: float) -> tuple[Member, Look]:
    """Return the worker that can answer, and what to ask it. Raises `BadQuery`."""
    request = max([*run.peeks, int(now * 1e6)]) + 1  # above those of a broker before this one
    of = ask.of
    if ask.what == "stack":
        return _asked(run, number(of, "worker"), "whose stacks are asked for"), ShowStacks(request)
    if ask.what == "log":
        worker = _asked(run, number(of, "worker"), "whose log is asked for")
        return worker, ShowLog(request, number(of, "start", 0))
    if run.lifecycle.over:
        raise BadQuery(over(run))
    found = named_queue(run, of)
    member = _asked(run, found.producer, f"which retains the messages of {found.name}")
    count = min(number(of, "count", 1), MOST_MESSAGES)
    return member, Peek(request, found.name, count, _optional(of, "at"), _optional(of, "offset"))


def _asked(run: RunState, worker: int, role: str) -> Member:
    """Return the member that has a place. Raises `BadQuery` if none has, or others wait for it already."""
    member = run.registry.members.get(worker)
    if member is None or not member.sender:
        raise BadQuery(f"worker {worker}, {role}, is not there")
    of_one = sum(each.incarnation == member.incarnation for each in run.peeks.values())
    if of_one >= MOST_OF_ONE or len(run.peeks) >= MOST_PENDING:
        raise BadQuery(f"{of_one or len(run.peeks)} looks wait for {member.label} already: ask again in a moment")
    return member


def over(run: RunState) -> str:
    """Return why the messages of a run that is over cannot be looked at, and what can be."""
    return (
        f"run {run.id} is over, and its messages went with its processes. What stages took is in the run's folder if "
        'recovery.record was "all": `stageline replay` uses that'
    )


def _optional(of: Mapping[str, str], name: str) -> int | None:
    return number(of, name) if name in of else None


def _answer(what: str, run: RunState, member: Member, peeked: Peeked) -> FromBroker:
    if peeked.refusal:
        return Refused(f"{what}: {peeked.refusal}", code=ExitCode.USAGE)
    if peeked.threads is not None:
        stacks = WorkerStacks(worker=member.index, name=member.name, missing="", threads=peeked.threads)
        return Answer(f"{what}/1", msgspec.to_builtins(StackFacts(run=run.id, workers=[stacks])))
    if peeked.log is not None:
        log = WorkerLog(run=run.id, worker=member.index, name=member.name, kept=peeked.log)
        return Answer(f"{what}/1", msgspec.to_builtins(log))
    if peeked.facts is not None:
        return Answer(f"{what}/1", msgspec.to_builtins(peeked.facts))
    return Answer(f"{what}/1", {"piece": peeked.piece, "sizes": peeked.sizes})
