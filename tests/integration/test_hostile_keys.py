"""Clients that mean harm at a broker with keys, over tcp and at a Redis server: without a key, with a key of another
role, with what they have recorded, and with it altered. The run ends as if they had not been there, within a bound of
memory, and the audit log names each refusal once."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import time

import pytest
import zmq

from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Ask,
    Declined,
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
from stageline.broker.errors import AddressUnusable
from stageline.broker.keys.box import SURPLUS
from stageline.broker.keys.changes import KeyChange
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KeyPair, invite_pair
from stageline.broker.transports.base import open_client
from stageline.workers.keys.key_file import new_pair
from support.byte_tap import ByteTap, recorded
from support.hostile import GREETING, READY, HostileClient, frame, peak_memory
from support.machines import GATED, broker_at, present
from support.redis_server import RedisServer
from support.workspace import Workspace, wait_for

BOUND = 100 * 2**20  # bytes that a process may grow by under attack: docs/reference/limits.md
SETS = ("--set", "recovery.lease=60", "--set", "recovery.action=600")
BITS = random.Random(34)


def every_message(incarnation: int) -> Iterator[ToBroker]:
    """One of each kind that a worker, a supervisor or a command says."""
    yield Hello(CONTROL_VERSION, "d" * 64, "thief", "lab", 1, "tcp://127.0.0.1:9")
    yield Hello(CONTROL_VERSION, "d" * 64, "thief", "lab", 1, "tcp://127.0.0.1:9", incarnation=incarnation)
    yield Report(incarnation, 10**6, "1F0", time(), 0.0, number=1)
    yield Failed(incarnation, "it failed", 1)
    yield Finished(incarnation, {})
    yield Goodbye(incarnation, "on notice")
    yield Declined("lab", 1, "no model")
    yield Exited(0, 1, -9)
    yield StopRun("enough", at_step_end=True)
    yield StopRun("over", over=True)
    yield Ask("why")
    yield Ask("keys")
    yield KeyChange("admit", KeyPair.generate().public.text)
    yield KeyChange("revoke", KeyPair.generate().public.text)


def altered(data: bytes) -> bytes:
    """The same with one bit flipped."""
    place = BITS.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << BITS.randrange(8)]) + data[place + 1 :]


@dataclass
class Siege:
    """A run whose two workers are in the middle of an action, and what its attackers know."""

    line: JoinLine
    server: RedisServer | None
    incarnations: list[int]
    recorded: list[bytes]

    @property
    def url(self) -> str:
        return keyed(self.line.address, self.line.broker)

    def say(self, pair: KeyPair | None, frames: list[bytes]) -> int:
        """Sends frames with the key of `pair`; the number of answers."""
        url = self.line.address if pair is None else self.url
        answers = 0
        with suppress(AddressUnusable), closing(open_client(url, pair, keeps=True)) as channel:
            for each in frames:
                channel.send(each)
                if channel.refusal:
                    break
                answers += channel.receive(0.3) is not None
        return answers


def without_a_key(siege: Siege) -> None:
    """Raw sockets and pyzmq without CURVE; a client of Redis."""
    frames = [encode(each) for each in every_message(siege.incarnations[0])]
    assert siege.say(None, frames) == 0
    if siege.server is None:
        for said in (GREETING + READY + b"".join(map(frame, frames)), b"GET / HTTP/1.1\r\n\r\n", bytes(300)):
            with HostileClient(siege.line.address, shaken=False) as client:
                client.send(said)
                with suppress(TimeoutError):
                    client.wait_until_closed()
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.connect(siege.line.address)
            for each in frames:
                dealer.send(each)
            assert not dealer.poll(300)
    else:
        with closing(siege.server.client()) as client:
            for each in (*frames, b"", bytes(SURPLUS), *(b"SLBX" + bytes([kind]) + bytes(100) for kind in range(9))):
                client.rpush("stageline:{desk}:to-broker", 16 * b"s" + each)


def with_keys_of_other_roles(siege: Siege, *pairs: KeyPair) -> None:
    """A stranger's, an invitation's, a guest's, and another worker's, which has stolen the incarnations."""
    messages = [each for incarnation in siege.incarnations for each in every_message(incarnation)]
    for pair in pairs:
        siege.say(pair, [encode(each, BITS.randbytes(32), 2**62) for each in messages])
        siege.say(pair, [altered(encode(each)) for each in messages] + [b"", bytes(64)])


def with_a_recorded_session(siege: Siege, change: Callable[[bytes], bytes]) -> None:
    """All that a worker has sent to the broker, or to the server, again."""
    for stream in siege.recorded:
        if siege.server is None:
            with HostileClient(siege.line.address, shaken=False) as client:
                client.send(change(stream))
                client.socket.settimeout(0.3)
                with suppress(OSError):
                    client.socket.recv(2**16)
        else:
            with closing(siege.server.client()) as client:
                for box in _boxes(stream):
                    client.rpush("stageline:{desk}:to-broker", box[:16] + change(box[16:]))


def _boxes(stream: bytes) -> Iterator[bytes]:
    """Message that a client has pushed for the broker, as Redis's protocol has it: the sender, then a box."""
    for part in stream.split(b"stageline:{desk}:to-broker\r\n$")[1:]:
        size, _, rest = part.partition(b"\r\n")
        if size.isdigit() and rest[16:20] == b"SLBX":
            yield rest[: int(size)]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tcp", "redis"])
def test_a_run_ends_as_if_no_client_that_means_harm_had_been_at_its_broker(
    scheme: str, workspace: Workspace, tmp_path: Path
) -> None:
    """Refusals were not in the audit log: of a stolen incarnation, and, by their cause, of what no key has sealed."""
    workspace.write("model.py", GATED)
    wanted = json.loads(workspace.command("train", "--json", "--set", "run.dir=plain").stdout)["weights_sha256"]
    os.mkfifo(workspace.folder / "gate")
    (taps := tmp_path / "taps").mkdir()
    with RedisServer() as server:
        at = {"tcp": "tcp://0.0.0.0:0", "redis": f"redis://127.1:{server.port}/0#desk"}[scheme]
        sets = (*SETS, "--set", "queues.url=tcp://0.0.0.0:0")
        broker, line = broker_at(workspace, at, *sets)
        target = f"tcp://127.0.0.1:{server.port}" if scheme == "redis" else line.address
        with ByteTap(target, taps) as tap:
            port = tap.endpoint.rpartition(":")[2]
            tapped = {"tcp": f"tcp://127.0.0.1:{port}", "redis": f"redis://127.1:{port}/0#desk"}[scheme]
            workers = [
                workspace.start("worker", ".", "--join", each.text, *sets)
                for each in (replace(line, address=tapped), line)
            ]
            wait_for(lambda: len(present(workspace)) == 2)
            stranger, guest, thief = (
                new_pair(workspace.folder / f"{each}.key") for each in ("stranger", "guest", "thief")
            )
            for pair, right in ((guest, "look"), (thief, "work")):
                admitted = workspace.command("keys", "admit", pair.public.text, "--right", right)
                assert admitted.returncode == 0, admitted.stderr
            facts = json.loads(workspace.command("status", "--json").stdout)
            siege = Siege(
                line,
                server if scheme == "redis" else None,
                [each["incarnation"] for each in facts["workers"]],
                recorded(taps),
            )
            with peak_memory([broker.pid]) as peaks:
                (before,) = peaks.values()
                without_a_key(siege)
                with_keys_of_other_roles(siege, stranger, invite_pair(line.secret), guest, thief)
                with_a_recorded_session(siege, lambda stream: stream)
                for _ in range(5):
                    with_a_recorded_session(siege, altered)
            assert peaks[broker.pid] - before < BOUND
            (workspace.folder / "gate").write_text("")
            assert [each.wait() for each in workers] == [0, 0]
        broker.send_signal(signal.SIGTERM)
        broker.communicate()
    (folder,) = workspace.runs()
    assert json.loads((folder / "result.json").read_text())["weights_sha256"] == wanted
    check_log(folder / "keys.log", line, stranger, guest, thief)


def check_log(log: Path, line: JoinLine, stranger: KeyPair, guest: KeyPair, thief: KeyPair) -> None:
    """Each refusal is there, and once."""
    refusals = [each for each in map(json.loads, log.read_text().splitlines()) if each["what"] == "refused"]
    told = Counter((each["key"], each["detail"]) for each in refusals)
    assert set(told.values()) == {1}, told.most_common(3)
    for pair, details in (
        (stranger, ("not admitted",)),
        (invite_pair(line.secret), ("is that of an invitation",)),
        (guest, ("no right to work", "no right to stop", "'exited'", "'key-change'", "not a control message")),
        (
            thief,
            (
                *("no right to stop", "no right to look", "'exited'", "'key-change'", "not a control message"),
                *(f"{kind} of incarnation" for kind in ("Hello", "Report", "Failed", "Finished", "Goodbye")),
            ),
        ),
    ):
        mine = [detail for key, detail in told if key == pair.public.text]
        assert [each for each in details if not any(each in detail for detail in mine)] == [], mine
    keys = {each.public.text for each in (stranger, invite_pair(line.secret), guest, thief)}
    unsealed = [(key, detail) for key, detail in told if key not in keys]  # at a server alone: over tcp none is heard
    assert [key for key, _ in unsealed] == [""] * line.address.startswith("redis")
    assert all("no key has sealed" in detail for _, detail in unsealed)
