"""Strangers who know the protocol, and all that was ever sent: none of what they say is believed, and the run ends as
if they had said nothing."""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from time import time_ns

import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Exited,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Stop,
    StopRun,
    ToBroker,
)
from stageline.broker.control.protocol import encode
from stageline.broker.control.records import StepRecord
from stageline.broker.queues.requests import CreditRequest, pack
from stageline.pipeline.program import Queue
from support.hostile import HostileClient, frame, frames_in
from support.run_under_attack import STEPS, RunUnderAttack, undisturbed_digest
from support.workspace import Workspace, wait_for

LARGEST = 2**53 - 1  # of the numbers in a message
AHEAD = 200_000_000  # of a forged serial, before those of the worker's next reports: nanoseconds


def lies(incarnation: int) -> Iterator[ToBroker]:
    """Messages that would end or change the run if they came from a worker or from the run's supervisor."""
    done = [StepRecord(0, step, b"", None) for step in range(STEPS)]
    yield StopRun("stop")
    yield StopRun("stop", at_step_end=True)
    yield StopRun("over", over=True)
    yield Exited(0, 1, 0)
    yield Report(incarnation, 10**6, "1F3", since=0.0, idle=0.0, steps=done, number=LARGEST, complete=STEPS)
    yield Report(incarnation, 10**6, "1F3", since=0.0, idle=0.0, snapshots=[(0, 4037)], number=LARGEST)
    yield Hello(CONTROL_VERSION, "d" * 64, "worker", "host", 1, "tcp://127.0.0.1:9", incarnation=incarnation)
    yield Failed(incarnation, "failed", 1)
    yield Goodbye(incarnation, "leaves")
    yield Finished(incarnation, {"0.weight": ("float32", (8, 4), "a" * 64)})


QUEUES = Queue(name="forward-1", producer=0, consumer=1), Queue(name="backward-0", producer=1, consumer=0)


def requests(run: str, incarnation: int) -> Iterator[CreditRequest]:
    """Requests that would take a queue away from its consumer."""
    for queue in ("forward-1", "backward-0"):
        for of in (incarnation, LARGEST):
            yield CreditRequest(run, queue, of, LARGEST, 0, 10**6, resend=True, ask=True)


def altered(message: bytes, dice: random.Random) -> bytes:
    """With a bit flipped, and a checksum that fits."""
    changed = bytearray(message)
    changed[dice.randrange(4, len(changed))] ^= 1 << dice.randrange(8)
    return zlib.crc32(changed[4:]).to_bytes(4, "little") + changed[4:]


def say(url: str, *messages: bytes) -> None:
    """Each over a connection of its own, so that each is read."""
    for message in messages:
        with HostileClient(url) as client:
            client.send(frame(message))


def test_what_strangers_say_to_the_broker_is_not_believed(workspace: Workspace) -> None:
    digest = undisturbed_digest(workspace)
    run = RunUnderAttack(workspace)
    for worker in run.status()["workers"]:
        for lie in lies(worker["incarnation"]):
            say(run.broker_url, encode(lie), encode(lie, b"a guess".ljust(32), LARGEST))
    assert run.status()["phase"] == "running"
    ended, logs = run.end()
    assert ended == digest
    for kind in ("StopRun", "Exited", "Report", "Hello", "Failed", "Goodbye", "Finished"):
        assert f"refused: {kind}" in logs["broker"], logs["broker"]


@pytest.mark.slow
def test_an_end_that_is_forged_with_the_secrets_of_both_workers_is_not_believed(workspace: Workspace) -> None:
    """A listener ended the run as finished, with a result that told of steps which were never trained, or as failed,
    with a text of its own; or emptied a place."""
    digest = undisturbed_digest(workspace)
    run = RunUnderAttack(workspace, listened=True)
    places = [listener.assigned for listener in run.listeners]
    weights = {"0.weight": ("float32", (8, 4), "a" * 64)}
    forgeries: list[tuple[str, int, Callable[[int], ToBroker]]] = [
        ("unsupported", 2, lambda of: Finished(of, weights)),
        ("contradicted", 2, lambda of: Failed(of, "a text of its own", 1)),
        ("contradicted", 4, lambda of: Goodbye(of, "a text of its own")),
    ]
    for counted, times, forge in forgeries:
        for place in places:
            say(run.broker_url, encode(forge(place.incarnation), place.secret, time_ns() + AHEAD))
        wait_for(partial(lambda kind, count: run.status()["oddities"].get(kind) == count, counted, times))
    facts = run.status()
    assert (facts["phase"], facts["training_steps"]) == ("running", STEPS)
    ended, logs = run.end()
    assert ended == digest
    result = json.loads((workspace.folder / f"runs/{facts['run']}/result.json").read_bytes())
    assert (result["steps"], result["weights_sha256"]) == (STEPS, digest)
    for index in (0, 1):
        assert logs["broker"].count(f"refused: worker {index} (stage {index}) has not finished") == 1
        for kind in ("Failed", "Goodbye"):
            assert logs["broker"].count(f"refused: {kind} of worker {index} (stage {index}), which goes on") == 1


@pytest.mark.slow
def test_what_is_put_between_the_brokers_messages_is_not_believed(workspace: Workspace) -> None:
    """Two announcements deleted a stage's snapshots, an address diverted a queue, and a Stop ended a worker."""
    digest = undisturbed_digest(workspace)
    run = RunUnderAttack(workspace, listened=True)
    listener = run.listeners[0]
    nowhere = Peers(dict.fromkeys((0, 1), (LARGEST, "tcp://127.0.0.1:9")))
    lies = [nowhere, Trim(10**6), Trim(2 * 10**6), Stop("so it is", 0), Refused("so it is", 1)]
    for said in (map(encode, lies), (encode(lie, b"a guess".ljust(32), LARGEST) for lie in lies), listener.recorded):
        listener.inject(*said)
    ended, logs = run.end()
    assert ended == digest
    for kind in ("Peers", "Trim", "Stop", "Refused", "Assigned"):
        assert logs["worker 0"].count(f"{kind} that the broker has not sealed") == 1, logs["worker 0"]


def test_what_strangers_request_of_a_queue_is_not_believed(workspace: Workspace) -> None:
    digest = undisturbed_digest(workspace)
    run = RunUnderAttack(workspace)
    facts = run.status()
    for url in run.worker_urls:
        for worker in facts["workers"]:
            for request in requests(facts["run"], worker["incarnation"]):
                say(url, pack(request), pack(request, {request.queue: b"a guess".ljust(32)}))
    ended, logs = run.end()
    assert ended == digest
    for name in ("worker 0", "worker 1"):
        assert "from a process outside the run" in logs[name], logs[name]


def test_a_request_in_the_name_of_an_incarnation_that_the_broker_has_not_given_takes_no_queue(
    workspace: Workspace,
) -> None:
    """One packet with the run's queue key shut out a worker, and every replacement of it."""
    digest = undisturbed_digest(workspace)
    run = RunUnderAttack(workspace, listened=True)
    keys, facts = run.listeners[0].assigned.keys, run.status()
    for url in run.worker_urls:
        for request in requests(facts["run"], LARGEST):
            say(url, pack(request, keys.of_requests(QUEUES)))
    ended, _ = run.end()
    assert ended == digest


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda message, dice: message, altered], ids=["replayed", "altered"])
def test_what_was_said_before_is_not_believed_again(
    change: Callable[[bytes, random.Random], bytes], workspace: Workspace
) -> None:
    digest, dice = undisturbed_digest(workspace), random.Random(7)
    run = RunUnderAttack(workspace, recorded=True)
    wait_for(lambda: len(run.records) >= 3 and all(map(frames_in, run.records.values())))
    for _ in range(3):
        for url, said in run.records.items():
            recorded = frames_in(said)
            say(url, *(change(message, dice) for message in dice.sample(recorded, min(20, len(recorded)))))
    ended, logs = run.end()
    assert ended == digest
    assert "refused" in logs["broker"]
