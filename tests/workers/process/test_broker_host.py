"""Messages to and from a broker while its records cannot be written."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from stageline.broker.control.channel import Envelope, Received
from stageline.broker.control.messages import Ask, Exited, Failed, Goodbye, StopRun, ToBroker
from stageline.broker.control.protocol import RunKeys, encode
from stageline.broker.control.store import MemoryStore, StoreUnusable
from stageline.broker.coordinator.coordinator import QUESTIONS, Coordinator
from stageline.broker.coordinator.gate import OpenGate
from stageline.broker.coordinator.run import run_of
from stageline.pipeline.process.signals import Signals
from stageline.workers.process import broker_host
from stageline.workers.process.broker_host import MOST, StoreWait
from support.conversation import PLAN, TERMS

KEYS = RunKeys("run-1", b"k" * 32)
SCRIPT = len(TERMS.schedule.placement)  # its place in a scripted run


class Said:
    """A broker's channel on which all of `arrived` comes at once."""

    endpoint = "inproc://said"

    def __init__(self) -> None:
        self.arrived: list[Received] = []
        self.sent: list[Envelope] = []

    def say(self, sender: bytes, message: ToBroker, secret: bytes = b"") -> None:
        self.arrived.append((sender, encode(message, secret, len(self.arrived))))

    def receive(self, timeout: float) -> Sequence[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def key_of(self, sender: bytes) -> str:
        return ""

    def trust(self, sender: bytes) -> None:
        pass

    def send(self, envelopes: Iterable[Envelope]) -> None:
        self.sent += envelopes

    def close(self) -> None:
        pass


def waiting(*, scripted: bool = False) -> tuple[StoreWait, Said, Coordinator]:
    said, store = Said(), MemoryStore()
    with Signals() as signals:
        wait = StoreWait(said, signals)
    core = Coordinator(replace(TERMS, scripted=scripted), store, run_of(store, PLAN, "run-1", KEYS.key), 0.0)
    wait.serve(core, OpenGate())
    return wait, said, core


def test_what_a_worker_says_once_is_kept_though_strangers_say_the_same_before_it() -> None:
    wait, said, _ = waiting()
    for number in range(2 * MOST):
        said.say(b"stranger", Failed(number % 3, "so it is", 1))
    said.say(b"worker", Failed(1, "out of memory", 1), KEYS.of_incarnation(1))
    said.say(b"other worker", Goodbye(2, "left"), KEYS.of_incarnation(2))
    wait("waits for its disk")
    assert [sender for sender, _ in wait.over()] == [b"worker", b"other worker"]


def test_so_many_are_answered_once_each() -> None:
    wait, said, _ = waiting()
    for number in range(2 * QUESTIONS):
        for _ in range(2):
            said.say(b"stranger %d" % number, Ask("status"))
    wait("waits for its disk")
    assert [recipient for recipient, _ in said.sent] == [b"stranger %d" % number for number in range(QUESTIONS)]


def test_what_a_supervisor_says_once_is_kept_and_not_what_strangers_say_in_its_name() -> None:
    """A stop was lost: the run went on once the records could be written."""
    wait, said, _ = waiting()
    messages = StopRun("interrupted"), Exited(0, 17, 1)
    for message in messages:
        said.say(b"stranger", message)
        said.say(b"supervisor", message, KEYS.of_control)
    wait("waits for its disk")
    assert [sender for sender, _ in wait.over()] == 2 * [b"supervisor"]


def test_a_run_that_is_to_stop_waits_only_a_little_for_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited a minute."""
    wait, said, _ = waiting()
    monkeypatch.setattr(broker_host, "STOPPING", 0.0)
    said.say(b"stranger", StopRun("interrupted"))
    said.say(b"supervisor", StopRun("over", over=True), KEYS.of_control)
    for _ in range(2):
        wait("cannot write: full; tried for 3 s, gives up in 57 s")
    said.say(b"supervisor", StopRun("interrupted"), KEYS.of_control)
    wait("cannot write: full; tried for 3 s, gives up in 57 s")
    with pytest.raises(StoreUnusable, match=r"records: cannot write: full\. Mend that, and resume the run \[SL318\]$"):
        wait("cannot write: full; tried for 3 s, gives up in 57 s")


@pytest.mark.parametrize(
    ("before", "gives_up"),
    [(StopRun("interrupted"), True), (StopRun("over", over=True), False), (Exited(SCRIPT, 17, 1), False)],
    ids=["stopped", "over", "the script has ended"],
)
def test_a_run_that_was_stopped_before_its_records_failed_waits_only_a_little_too(
    before: ToBroker, gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, _, core = waiting(scripted=True)
    monkeypatch.setattr(broker_host, "STOPPING", 0.0)
    core.handle(b"", before, 0.0)
    assert core.stop_requested is not (isinstance(before, StopRun) and before.over)
    with pytest.raises(StoreUnusable, match=r"resume the run \[SL318\]$") if gives_up else nullcontext():
        wait("cannot write: full; tried for 0 s, gives up in 60 s")
