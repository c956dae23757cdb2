"""The broker over real sockets: conversations, garbage, a taken port, and kill -9 in the middle of a run."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, time
from typing import Any, Self

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Assigned,
    Confirmed,
    Exited,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Stop,
    StopRun,
)
from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.control.protocol import RunKeys, Sealer, decode_from_broker, encode, sealed
from stageline.broker.control.records import EvaluationRecord, Event, StepRecord, Wait
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.errors import BadMessage, EndpointTaken, ForeignMessage
from stageline.broker.ledger.losses import Leases
from stageline.broker.transports.base import open_server
from stageline.pipeline.evaluation import Criterion
from stageline.pipeline.schedule import Action, Kind, make_schedule
from stageline.workers.process import broker_process as module
from stageline.workers.process.broker_process import serve_channel
from support.conversation import Conversation, name
from support.packed import packed_times

PATIENCE = 10_000  # milliseconds after which a test gives up waiting
TIMES = packed_times([(Action(Kind.FORWARD, 0), 0.0, 1.0)])
KEYS = RunKeys("run-1", b"k" * 32)
TERMS = RunConfig("digits", "plan", {}, make_schedule("1f1b", ((0,), (1,)), 4), Leases(10.0, 10.0, 60.0), log_every=1)


def serve(core: Coordinator, url: str, on_bound: Callable[[str], None] = lambda endpoint: None, **options: Any) -> None:
    with closing(open_server(url)) as channel:
        on_bound(channel.endpoint)
        serve_channel(core, channel, **options)


class BrokerPeer:
    """A client's connection to the broker. It seals with the secret of the place that it was given, and with the run's
    control secret."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self._sealer = Sealer(time)
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, 20)
        self.socket.connect(endpoint)

    def say(self, *sentences: object) -> Self:
        for sentence in sentences:
            self.socket.send(
                self._sealer.sealed(sentence, KEYS.of_control)
                if isinstance(sentence, StopRun | Exited | Ask)
                else self._sealer.worker_message(sentence)
            )
        return self

    def hear(self) -> FromBroker:
        assert self.socket.poll(PATIENCE), "the broker is silent"
        heard = decode_from_broker(self.socket.recv()).message
        if isinstance(heard, Assigned):
            self._sealer.learn(heard)
        return heard

    def hear_of(self, kind: type[FromBroker]) -> FromBroker:
        while not isinstance(sentence := self.hear(), kind):
            continue
        return sentence


Connect = Callable[[str], BrokerPeer]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes lines to an endpoint; they are closed after the test."""
    lines: list[BrokerPeer] = []
    with zmq.Context() as context:

        def connect(endpoint: str) -> BrokerPeer:
            lines.append(BrokerPeer(context, endpoint))
            return lines[-1]

        yield connect
        for line in lines:
            line.socket.close()


@contextmanager
def served(
    core: Coordinator, url: str = "tcp://127.0.0.1:*", linger: float = 60.0
) -> Iterator[tuple[str, threading.Thread]]:
    """A broker in a thread: its endpoint, and the thread, which has ended when the block is left."""
    bound, stop, endpoints = threading.Event(), threading.Event(), []

    def on_bound(endpoint: str) -> None:
        endpoints.append(endpoint)
        bound.set()

    options = {"stop": stop.is_set, "on_bound": on_bound, "linger": linger}
    thread = threading.Thread(target=serve, args=(core, url), kwargs=options)
    thread.start()
    try:
        assert bound.wait(PATIENCE / 1000)
        yield endpoints[0], thread
    finally:
        stop.set()
        thread.join(PATIENCE / 1000)
        assert not thread.is_alive()


def core(terms: RunConfig = TERMS) -> Coordinator:
    store = MemoryStore()
    return Coordinator(terms, store, run_of(store, terms.plan, KEYS.run, KEYS.key, new=True), time())


def assigned(index: int, *, step: int = 0, aware: bool = False) -> Assigned:
    """Messages to a worker; one that is `aware` has its secret."""
    secret = b"" if aware else KEYS.of_incarnation(index + 1)
    link = KEYS.of_link(0, 1)
    keys = PlaceKeys(index, (link, b"") if index else (b"", link))
    return Assigned(KEYS.run, index, index + 1, step, secret=secret, keys=keys)


def hello(index: int, incarnation: int = 0, plan: str = "plan") -> Hello:
    return Hello(CONTROL_VERSION, plan, f"worker-{index}", "desk", 100 + index, f"ipc://{index}", index, incarnation)


def finished(index: int) -> Finished:
    return Finished(index + 1, {f"{index}.weight": ("float32", (1,), "0" * 64)})


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_run_from_hello_to_goodbye(connect: Connect, transport: str, tmp_path: Path):
    url = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/broker"
    with served(core(), url) as (endpoint, thread):
        workers = [connect(endpoint) for _ in range(2)]
        for index, worker in enumerate(workers):
            assert worker.say(hello(index)).hear() == assigned(index)
            worker.say(hello(index, index + 1))
        for index, worker in enumerate(workers):
            assert worker.hear_of(Peers) == Peers({0: (1, "ipc://0"), 1: (2, "ipc://1")})
            records = [StepRecord(index, step, b"", 0.5) for step in range(3)]
            worker.say(Report(index + 1, 9, "waits", 0.0, 0.0, records, number=1))
            assert worker.hear_of(Confirmed) == Confirmed(1)
        for index, worker in enumerate(workers):
            worker.say(finished(index))
        for index, worker in enumerate(workers):
            assert worker.hear_of(Stop) == Stop("all steps are done", 0)
            worker.say(Goodbye(index + 1, "all steps are done"))
        command = connect(endpoint).say(Ask("status"))
        answer = command.hear()
        assert isinstance(answer, Answer)
        assert (answer.facts["phase"], answer.facts["finished"]) == ("finished", [3, 3])
        command.say(StopRun("read", over=True))
        thread.join(PATIENCE / 1000)  # everyone has left, and it was dismissed
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "words",
    [b"", b"garbage", b"\x81\xa2is\xa4none", b"\x82\xa2is\xa3ask\xa4what\xa1\xff", 2000 * b"\x91"],
    ids=["nothing", "no msgpack", "unknown sentence", "no UTF-8", "too deep"],
)
def test_what_is_whole_and_cannot_be_understood_is_answered_naming_the_version(connect: Connect, words: bytes):
    with served(core()) as (endpoint, _):
        line = connect(endpoint)
        line.socket.send(sealed(words))
        answer = line.hear()
        assert isinstance(answer, Refused)
        assert answer.reason.startswith(f"this is not a message of control protocol version {CONTROL_VERSION}")


def test_strangers_are_answered_within_a_bound_and_who_has_the_secret_always(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    """Questions of 60 bytes made the broker hold gigabytes of answers that no process read."""
    monkeypatch.setattr("stageline.workers.process.broker_process.ANSWERED", 1)
    with served(core()) as (endpoint, _):
        begun, answered = monotonic(), 0
        strangers = [connect(endpoint) for _ in range(2)]
        while answered < 2:
            for stranger in strangers:
                stranger.socket.send(encode(Ask("status")))
            assert isinstance(connect(endpoint).say(Ask("status")).hear(), Answer)
            answered += sum(isinstance(each.hear(), Answer) for each in strangers if each.socket.poll(50))
            assert answered < 2 or monotonic() - begun >= 1, "the second answer has to wait for the next second"


def test_what_arrives_damaged_is_not_answered_since_its_sender_says_it_again(connect: Connect):
    with served(core()) as (endpoint, _):
        line = connect(endpoint)
        whole = encode(Ask("status"))
        for frames in ([b""], [b"garbage"], [whole[:-1]], [whole[:9] + b"X" + whole[10:]], [whole, b""]):
            line.socket.send_multipart(frames)
        assert isinstance(line.say(Ask("queues")).hear(), Answer)
        status = line.say(Ask("status")).hear()
        assert isinstance(status, Answer)
        assert status.facts["oddities"] == {"damaged": 5}


@pytest.mark.parametrize("run", ["", "../evil", "/evil", "a/b", "{run}", "a\n", 201 * "a"])
def test_a_run_whose_id_is_no_name_is_not_heard_of(run: str):
    """It would be the name of a folder, and a part of keys."""
    with pytest.raises(ForeignMessage):
        decode_from_broker(encode(Assigned(run, 0, 1, 0)))


@given(st.binary(max_size=40), st.integers(0, 10), st.integers(0, 7))
def test_no_damaged_sentence_is_taken_for_another(words: bytes, place: int, bit: int):
    """A Trim to a later step, which one changed byte can make of another, would delete what is still wanted."""
    whole = bytearray(encode(Trim(20)))
    whole[place] ^= 1 << bit
    for damaged in (bytes(whole), words):
        with pytest.raises(BadMessage):
            decode_from_broker(damaged)


def test_no_garbage_stops_the_broker(connect: Connect):
    whole = encode(Report(1, 1, "1F3", 0.0, 0.5, [StepRecord(0, 1, TIMES, 0.5)], [Event(0, 1, 2, "done", 1.0)]))

    with served(core()) as (endpoint, _):
        line = connect(endpoint)

        bytes_ = st.binary(max_size=64)

        # All together stay below the bytes after which a connection without a genuine message is closed.
        @given(st.lists(bytes_, min_size=1, max_size=3), st.integers(0, len(whole) - 1), bytes_)
        @settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
        def throw(frames: list[bytes], place: int, patch: bytes) -> None:
            line.socket.send_multipart(frames)
            line.socket.send(whole[:place] + patch + whole[place + len(patch) :])

        throw()
        answer = line.say(Ask("status")).hear_of(Answer)
        assert isinstance(answer, Answer)
        assert answer.facts["phase"] == "waiting"


_NUMBERS = st.integers(0, 3) | st.integers(0, 2**53 - 1)
_WORDS = st.sampled_from(
    ["", "forward", "backward", "done", "waits", "status", "story", "queues", "why", "step", "microbatch"]
)
_FLOATS = st.floats()
_RECORDS = st.builds(
    StepRecord, _NUMBERS, _NUMBERS, st.sampled_from([b"", TIMES, 4 * TIMES, bytes(64)]), st.none() | _FLOATS
)
_EVENTS = st.builds(Event, _NUMBERS, _NUMBERS, _NUMBERS, _WORDS, _FLOATS)
_EVALUATIONS = st.builds(EvaluationRecord, _NUMBERS, _NUMBERS, st.none() | _FLOATS, st.dictionaries(_WORDS, _FLOATS))
_WAITS = st.builds(Wait, st.sampled_from(["forward-1", "backward-0", "x-9"]), _NUMBERS, _WORDS, _NUMBERS, _FLOATS)
_DIGESTS = st.dictionaries(_WORDS, st.just(("float32", (1,), "0" * 64)))
_SENTENCES = st.one_of(
    st.builds(hello, st.integers(0, 2), _NUMBERS, st.sampled_from(["plan", "plan", "other"])),
    st.builds(
        Report, st.integers(0, 3), _NUMBERS, _WORDS, _FLOATS, _FLOATS, st.lists(_RECORDS), st.lists(_EVENTS), _NUMBERS,
        st.dictionaries(_WORDS, st.lists(_FLOATS)), st.none() | _NUMBERS, _NUMBERS,
        evaluations=st.lists(_EVALUATIONS), snapshots=st.lists(st.tuples(_NUMBERS, _NUMBERS)), waits=st.lists(_WAITS),
        layer=_WORDS,
    ),
    st.builds(Failed, st.integers(0, 3), _WORDS, st.integers(-9, 130)),
    st.builds(Finished, st.integers(0, 3), _DIGESTS),
    st.builds(Goodbye, st.integers(0, 3), _WORDS),
    st.builds(Exited, st.integers(0, 3), st.integers(99, 103), st.integers(-70, 255), st.none() | st.integers(0, 130)),
    st.builds(Ask, _WORDS, st.dictionaries(_WORDS, _WORDS | st.just("3"))),
    st.builds(StopRun, _WORDS, st.booleans(), st.booleans()),
)  # fmt: skip


@pytest.mark.parametrize("restarts", [0, 2])
@given(talk=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), _SENTENCES, st.floats(0, 30)), max_size=30))
def test_no_order_of_sentences_stops_the_core_and_all_it_says_can_be_sent(
    restarts: int, talk: list[tuple[bytes, object, float]]
):
    terms = replace(TERMS, restarts=restarts, snapshots=restarts > 0, criterion=Criterion("done"))
    broker, now, phases = Coordinator(terms, MemoryStore(), "run-1", 0.0), 0.0, []
    for sender, sentence, passes in talk:
        now += passes
        for _, said in [*broker.handle(sender, sentence, now), *broker.tick(now)]:  # type: ignore[arg-type]
            assert decode_from_broker(encode(said)).message == said or "nan" in repr(said)
        phases.append(broker.run.phase)
    over = [phase for phase in phases if phase in ("finished", "failed")]
    assert len(set(over)) <= 1
    assert phases[len(phases) - len(over) :] == over


def test_a_taken_port_is_refused_naming_who_has_it():
    with served(core()) as (endpoint, _), pytest.raises(EndpointTaken, match=f"in use by pid {os.getpid()}; stop that"):
        serve(core(), endpoint)


def test_a_served_path_is_not_taken_away(tmp_path: Path):
    url = f"ipc://{tmp_path}/broker"
    with served(core(), url), pytest.raises(EndpointTaken, match=f"in use by pid {os.getpid()}"):
        serve(core(), url)


def test_a_path_that_a_dead_broker_left_behind_is_free(tmp_path: Path):
    url = f"ipc://{tmp_path}/broker"
    lines = ["import os, signal, zmq", f"zmq.Context().socket(zmq.ROUTER).bind({url!r})", "os.kill(os.getpid(), 9)"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False)
    assert (tmp_path / "broker").is_socket()
    with served(core(), url) as (endpoint, _):
        assert endpoint == url


def test_a_broker_that_leaves_takes_its_socket_file_with_it(tmp_path: Path):
    with served(core(), f"ipc://{tmp_path}/broker"):
        assert (tmp_path / "broker").is_socket()
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_leaves_lets_another_keep_the_path(tmp_path: Path, connect: Connect):
    url, path = f"ipc://{tmp_path}/broker", tmp_path / "broker"
    with ExitStack() as second, ExitStack() as first:
        first.enter_context(served(core(), url))
        path.unlink()  # by hand, say: the address seems to be free
        second.enter_context(served(core(), url))
        first.close()
        assert connect(url).say(Ask("status")).hear_of(Answer)
    assert not path.exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("tcp://192.0.2.1:5600", "this machine has no such address"),
        ("ipc:///no/such/folder/broker", "the folder does not exist"),
        (f"ipc:///tmp/{'x' * 120}", "a path may have 107 bytes at most"),
    ],
)
def test_an_address_that_cannot_be_had_is_refused_with_the_reason(url: str, words: str):
    with pytest.raises(EndpointTaken, match=words):
        serve(core(), url)


def test_a_broker_whose_run_is_over_leaves_by_itself():
    over = core()
    over.handle(b"train", StopRun("enough"), time())
    with served(over, linger=0.0) as (_, thread):
        thread.join(PATIENCE / 1000)
        assert not thread.is_alive()


def test_a_broker_that_was_started_again_after_the_end_tells_the_workers_before_it_leaves(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Conversation()
    for index in (0, 1):
        before.join(index)
        before.send(name(index), finished(index))
    again = Coordinator(TERMS, before.store, KEYS.run, time())
    again.handle(b"train", StopRun("over", over=True), time())
    monkeypatch.setattr(module, "LEAVING", PATIENCE / 1000)
    with served(again) as (endpoint, _):
        told = connect(endpoint).say(hello(0)).hear_of(Refused)
        assert isinstance(told, Refused)
        assert told.reason.startswith("the run is over")


@pytest.mark.slow
def test_a_broker_waits_for_workers_that_finish_their_step_and_no_longer(connect: Connect):
    stopped = core(replace(TERMS, restarts=1, snapshots=True))
    with served(stopped, linger=0.0) as (endpoint, thread):
        worker, train = connect(endpoint).say(hello(0)), connect(endpoint)
        worker.hear_of(Assigned)
        train.say(StopRun("interrupted", at_step_end=True))
        stop = worker.hear_of(Stop)
        assert isinstance(stop, Stop)
        assert stop.at_step_end
        assert train.say(Ask("status")).hear_of(Answer)
        worker.say(Goodbye(1, "stopped"))
        thread.join(PATIENCE / 1000)
        assert not thread.is_alive()


BROKER = """
import pathlib, sys
from time import time
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.transports.base import open_server
from stageline.broker.ledger.losses import (Leases)
from stageline.broker.control.sqlite_store import SqliteStore
from stageline.pipeline.schedule import Action, Kind, make_schedule
from stageline.workers.process.broker_process import serve_channel

store = SqliteStore(pathlib.Path(sys.argv[1]))
terms = RunConfig("digits", "plan", {}, make_schedule("1f1b", ((0,), (1,)), 4), Leases(10.0, 10.0, 60.0), 1)
core = Coordinator(terms, store, run_of(store, "plan", sys.argv[3], b"k" * 32), time())
assert "torch" not in sys.modules
channel = open_server(sys.argv[2])
print(channel.endpoint, "bound", file=sys.stderr, flush=True)
serve_channel(core, channel)
"""


@contextmanager
def broker_process(store: Path, url: str, fresh: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", BROKER, str(store), url, fresh],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stderr is not None
            assert "bound" in process.stderr.readline()
            yield process
        finally:
            process.kill()


def test_a_killed_broker_is_taken_over_by_the_next_and_the_workers_lose_nothing(connect: Connect, tmp_path: Path):
    url, store = f"ipc://{tmp_path}/broker", tmp_path / "broker.sqlite"
    workers = [connect(url) for _ in range(2)]
    with broker_process(store, url, "run-1") as process:
        for index, worker in enumerate(workers):
            assert worker.say(hello(index)).hear() == assigned(index)
            worker.say(hello(index, index + 1))
            records = [StepRecord(index, step, 9 * TIMES, 0.5) for step in range(4)]
            worker.say(Report(index + 1, 9, "waits", 0.0, 0.0, records, number=1))
            assert worker.hear_of(Confirmed) == Confirmed(1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with broker_process(store, url, "run-2"):
        for index, worker in enumerate(workers):
            worker.say(hello(index, index + 1))
            assert worker.hear_of(Assigned) == assigned(index, step=4, aware=True)
        answer = connect(url).say(Ask("status")).hear()
        assert isinstance(answer, Answer)
        assert (answer.facts["run"], answer.facts["phase"]) == ("run-1", "running")
        assert answer.facts["losses"] == {str(step): 0.5 for step in range(4)}
