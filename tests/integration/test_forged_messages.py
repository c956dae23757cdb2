"""Strangers who know the protocol, and all that was ever sent: none of what they say is believed, and the run ends as
if they had said nothing."""

import random
import zlib
from collections.abc import Callable, Iterator

import pytest

from stageline.broker.codec.message import Flow
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Exited,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Report,
    StopRun,
    ToBroker,
)
from stageline.broker.control.protocol import encode
from stageline.broker.control.records import StepRecord
from stageline.broker.queues.requests import CreditRequest, pack
from support.hostile import HostileClient, frame, frames_in
from support.run_under_attack import STEPS, RunUnderAttack, undisturbed_digest
from support.workspace import Workspace, wait_for

LARGEST = 2**53 - 1  # of the numbers in a message


def lies(incarnation: int) -> Iterator[ToBroker]:
    """What would end the run or change it, if it came from a worker or from the run's supervisor."""
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


def requests(run: str, incarnation: int) -> Iterator[CreditRequest]:
    """What would take a queue away from its consumer."""
    for flow, stage in ((Flow.FORWARD, 1), (Flow.BACKWARD, 0)):
        for of in (incarnation, LARGEST):
            yield CreditRequest(run, flow, stage, of, LARGEST, 0, 10**6, resend=True, ask=True)


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


def test_what_strangers_request_of_a_queue_is_not_believed(workspace: Workspace) -> None:
    digest = undisturbed_digest(workspace)
    run = RunUnderAttack(workspace)
    facts = run.status()
    for url in run.worker_urls:
        for worker in facts["workers"]:
            for request in requests(facts["run"], worker["incarnation"]):
                say(url, pack(request), pack(request, b"a guess".ljust(32)))
    ended, logs = run.end()
    assert ended == digest
    for name in ("worker 0", "worker 1"):
        assert "from a process outside the run" in logs[name], logs[name]


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
