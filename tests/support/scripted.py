"""Conversations about a scripted run: workers 0 and 1, and the script, whose place is the third."""

from dataclasses import replace

import msgspec

from stageline.broker.control.messages import Hello, Report
from stageline.broker.control.records import Wait, WorkerRecord
from stageline.broker.control.store import Store
from support.conversation import SNAPSHOTS, Conversation, hello, name, report, steps

SCRIPT = 2
SCRIPTED = replace(SNAPSHOTS, scripted=True, snapshot_every=20)
OWN_CODE = "runs its own code"


def scripted(store: Store | None = None, terms: object = SCRIPTED) -> Conversation:
    """A run that has just begun: workers and script are there, under incarnations 1, 2 and 3."""
    talk = Conversation(store, terms=terms)  # type: ignore[arg-type]
    talk.join(0), talk.join(1)
    join_script(talk)
    return talk


def join_script(talk: Conversation, pid: int = 102) -> int:
    """Takes the script's place with a new process; returns the step that it begins at."""
    assigned = talk.assigned(name(SCRIPT), script_hello(pid=pid))
    assert assigned.index == SCRIPT
    talk.send(name(SCRIPT), script_hello(assigned.incarnation, pid=pid, queues=talk.queues(SCRIPT)))
    return assigned.step


def script_hello(incarnation: int = 0, *, pid: int = 102, host: str = "desk", **more: object) -> Hello:
    endpoint = "ipc://script" if incarnation else ""
    said = hello(SCRIPT, incarnation=incarnation, endpoint=endpoint)
    return msgspec.structs.replace(said, name="script", pid=pid, host=host, **more)


def script_says(now: str = OWN_CODE, *waits: Wait, calls: int = 0, incarnation: int = 3, **more: object) -> Report:
    """`calls`: the number of its next one."""
    return Report(incarnation, calls, now, since=0.0, idle=0.0, waits=list(waits), **more)  # type: ignore[arg-type]


def knows(index: int, *, complete: int, step: int) -> WorkerRecord:
    return WorkerRecord("run-1", index, complete, step)


def reach(talk: Conversation, step: int) -> None:
    """Both stages have finished the steps before `step`, and have a snapshot of it."""
    for stage in (0, 1):
        done = steps(stage, *range(talk.core.run.ledger.finished[stage], step), loss=0.5)
        talk.send(name(stage), report(stage, actions=step, now="computes", steps=done, snapshots=[(stage, step)]))


def heartbeats(talk: Conversation, seconds: float, *indexes: int) -> list[tuple[bytes, object]]:
    """Time passes, in which only these report."""
    sends: list[tuple[bytes, object]] = []
    for _ in range(round(seconds * 2)):
        for index in indexes:
            said = script_says() if index == SCRIPT else report(index, now="waits for call-0 to run call 7")
            sends += talk.send(name(index), said)
        sends += talk.after(0.5)
    return sends
