"""The table of a run's states: it is closed and reachable, and conversations with the coordinator take its ways."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from stageline.broker.control.messages import Exited, Failed, StopRun
from stageline.broker.control.records import WorkerRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.run import run_of
from stageline.broker.coordinator.state import OVER, TRANSITIONS, IllegalRunEvent, Life, RunEvent, RunLifecycle
from stageline.broker.ledger.losses import PARTING
from support.conversation import PLAN, SNAPSHOTS, Conversation, finished, having_read, hello, name, report, steps

S, E = Life, RunEvent
Step = tuple[Life, RunEvent]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The transitions that coordinators take, in their order."""
    taken: list[Step] = []
    move = RunLifecycle.move

    def recorded(lifecycle: RunLifecycle, event: RunEvent) -> None:
        taken.append((lifecycle.state, event))
        move(lifecycle, event)

    monkeypatch.setattr(RunLifecycle, "move", recorded)
    return taken


def running(store: MemoryStore | None = None, *, reported: int = 0) -> Conversation:
    """Both workers are there; with `reported` steps, checkpoint 20 is complete."""
    talk = Conversation(store, terms=SNAPSHOTS)
    for index in (0, 1):
        talk.join(index)
    for index in (0, 1) if reported else ():
        talk.send(name(index), report(index, steps=steps(index, *range(reported)), snapshots=[(index, 20)]))
    return talk


def restarted(talk: Conversation, **how: bool) -> Conversation:
    """Another broker on the same store, some seconds later."""
    run_of(talk.store, PLAN, "run-1", b"", **how)
    return Conversation(talk.store, now=talk.now + 5.0, terms=SNAPSHOTS)


def reconnecting() -> Conversation:
    return restarted(running(reported=25), resume=True)


def choosing() -> Conversation:
    return restarted(running(reported=25), resume=True, alone=True)


def lose_records(talk: Conversation) -> None:
    """A worker knows of a run that the records do not."""
    memory = WorkerRecord("run-1", 0, 60, 61)
    known = msgspec.structs.replace(hello(0), incarnation=10**9, memory=memory, snapshots=[(0, 60), (1, 60)])
    talk.send(name(0), known)


def show_newer_checkpoint(talk: Conversation) -> None:
    """A worker that the records know was told of a checkpoint that they do not know."""
    talk.send(name(0), report(0, complete=60))


def reconciling() -> Conversation:
    talk = running()
    show_newer_checkpoint(talk)
    return talk


def remember(talk: Conversation, index: int) -> None:
    """Worker `index` says how far it is, and which snapshots it has."""
    said = hello(index, incarnation=index + 1, endpoint=f"ipc://{index}")
    known = WorkerRecord("run-1", index, 60, 61)
    talk.send(name(index), msgspec.structs.replace(said, memory=known, snapshots=[(index, 60)]))


def reconcile(talk: Conversation) -> None:
    remember(talk, 0), remember(talk, 1)
    talk.after(11.0)


def stop(talk: Conversation, *, at_step_end: bool = False) -> None:
    talk.send(b"train", StopRun("enough", at_step_end=at_step_end))


def stopping() -> Conversation:
    talk = running()
    stop(talk, at_step_end=True)
    return talk


def finish(talk: Conversation) -> None:
    for index in (0, 1):
        talk.send(name(index), finished(index))


def fail(talk: Conversation) -> None:
    talk.send(name(1), Failed(2, "out of memory", 1)), talk.after(PARTING)


def end_worker_1(talk: Conversation) -> None:
    talk.send(b"supervisor", Exited(1, 101, 1, 1))


def refuse_to_start(talk: Conversation) -> None:
    """A process that was to take an empty place ends, as it always would."""
    talk.send(b"supervisor", Exited(1, 999, 78, 78))


def all_reconnect(talk: Conversation) -> None:
    for index in (0, 1):
        talk.send(name(index), hello(index, incarnation=index + 1, endpoint=f"ipc://{index}"))
    talk.after(0.2)


def none_reconnects(talk: Conversation) -> None:
    talk.after(11.0)


def verify(talk: Conversation) -> None:
    for index in (0, 1):
        talk.send(name(index), having_read(index, 20))
    talk.after(0.2)


def end_unintroduced() -> None:
    talk = Conversation(terms=SNAPSHOTS)
    for index in (0, 1):
        talk.send(name(index), hello(index))
    finish(talk)


def resume_without_records() -> None:
    """Nothing is known, and the disks have checkpoint 20."""
    store = MemoryStore()
    run_of(store, PLAN, "run-1", b"", resume=True)
    talk = Conversation(store, now=100.0, terms=SNAPSHOTS)
    for index in (0, 1):
        talk.send(name(index), msgspec.structs.replace(hello(index), snapshots=[(index, 20)]))
    talk.after(0.2)


def ends(ended: Conversation) -> None:
    """The end is stored; then the broker is dismissed, twice."""
    restarted(ended)
    stop(ended), stop(ended)


CONVERSATIONS: dict[str, Callable[[], object]] = {
    "a run finishes": lambda: (talk := running(), finish(talk), ends(talk)),
    "a run fails": lambda: (talk := running(), fail(talk), ends(talk)),
    "a run is stopped": lambda: (talk := running(), stop(talk), ends(talk)),
    "a stop waits for the step's end": lambda: (talk := stopping(), stop(talk, at_step_end=True), talk.after(2.0)),
    "a run finishes before its stop is due": lambda: finish(stopping()),
    "a run fails before its stop is due": lambda: fail(stopping()),
    "records are lost before a stop is due": lambda: (talk := stopping(), show_newer_checkpoint(talk), reconcile(talk)),
    "a run is stopped before it began": lambda: stop(Conversation(terms=SNAPSHOTS)),
    "a process cannot start": lambda: refuse_to_start(Conversation(terms=SNAPSHOTS)),
    "workers without endpoints finish": end_unintroduced,
    "records are lost before all have joined": lambda: lose_records(Conversation(terms=SNAPSHOTS)),
    "lost records are reconciled": lambda: reconcile(reconciling()),
    "a run is stopped while it is reconciled": lambda: stop(reconciling()),
    "no worker knows the other snapshots": lambda: (talk := reconciling(), remember(talk, 0), talk.after(61.0)),
    "a run without records is resumed": resume_without_records,
    "workers reconnect": lambda: all_reconnect(reconnecting()),
    "no worker reconnects": lambda: none_reconnects(reconnecting()),
    "a run is stopped while workers reconnect": lambda: stop(reconnecting()),
    "workers finish while they reconnect": lambda: finish(reconnecting()),
    "a worker fails while it reconnects": lambda: (talk := reconnecting(), end_worker_1(talk), fail(talk)),
    "records are lost while workers reconnect": lambda: lose_records(reconnecting()),
    "snapshots are verified": lambda: verify(choosing()),
    "a run is stopped while snapshots are verified": lambda: stop(choosing()),
    "a process cannot start while snapshots are verified": lambda: refuse_to_start(choosing()),
    "records are lost while snapshots are verified": lambda: lose_records(choosing()),
}


def reached(start: Life) -> Iterator[Life]:
    found, new = {start}, {start}
    while new:
        new = {after for (state, _), after in TRANSITIONS.items() if state in new} - found
        found |= new
    yield from found


def test_every_state_is_reached_from_the_start():
    assert set(reached(S.STARTING)) == set(Life)


def test_every_state_but_the_last_leads_to_each_end():
    for state in set(Life) - OVER - {S.STARTING}:
        assert set(reached(state)) >= OVER


def test_a_run_that_is_over_does_not_begin_again():
    for state in OVER:
        assert set(reached(state)) <= OVER


def test_an_event_that_cannot_happen_is_an_error_and_changes_nothing():
    lifecycle = RunLifecycle()
    with pytest.raises(IllegalRunEvent, match="stop due cannot happen to a run that is starting"):
        lifecycle.move(E.STOP_DUE)
    assert lifecycle.state is S.STARTING


def test_conversations_take_every_transition_of_the_table(taken: list[Step]):
    for conversation in CONVERSATIONS.values():
        conversation()
    assert set(TRANSITIONS) - set(taken) == set()


def test_a_stop_that_was_requested_before_the_records_were_lost_is_not_forgotten(taken: list[Step]):
    talk = stopping()
    show_newer_checkpoint(talk)
    assert talk.core.run.lifecycle.state is S.RECONCILING
    reconcile(talk)
    assert talk.core.run.lifecycle.state is S.STOPPED
    assert taken[-3:] == [(S.WAITING, E.ALL_PRESENT), (S.RUNNING, E.STOP_REQUESTED), (S.STOPPING, E.STOP_DUE)]


def test_records_cannot_be_lost_after_the_end():
    talk = Conversation(terms=replace(SNAPSHOTS, restarts=2))
    stop(talk)
    lose_records(talk)
    assert talk.core.run.lifecycle.state is S.STOPPED
