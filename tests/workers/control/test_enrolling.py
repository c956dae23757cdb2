"""A machine that has a join line enrols its key with the broker, over real sockets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import time

import pytest
from structlog.testing import capture_logs

from stageline.broker.errors import BadJoinLine, ForeignMessage, NotEnrolled
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.enrolment import (
    LARGEST_ENROLMENT,
    Enrolment,
    answer_enrolment,
    encode_enrolment,
    enrolment_in,
)
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KeyPair, invite_pair, operator_pair
from stageline.broker.keys.register import Invitation, KeyRegister
from stageline.broker.transports.base import open_server
from stageline.pipeline.addresses import parted
from stageline.pipeline.errors import ExitCode
from stageline.workers.control import enrolling
from stageline.workers.control.client import BrokerUnreachable, KeyMissing, KeyRefused
from stageline.workers.control.enrolling import demand_key, enrol, entered, succeed
from stageline.workers.keys.keyring import own_pair
from support.redis_server import shared_server
from support.transports import broker_url, registered

SECRET = bytes(range(16))
MACHINE = KeyPair.of_secret(bytes(32))


@contextmanager
def broker(register: KeyRegister, pair: KeyPair | None, url: str = "tcp://127.0.0.1:0") -> Iterator[str]:
    """A broker that enrols, at the address that is returned; without keys if it has no pair."""
    channel = open_server(url, None if pair is None else ServerKeys(pair, register))
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            for sender, frame in channel.receive(0.05) or ():
                key = channel.key_of(sender)
                if register.invites(key) or register.enrolled(key):
                    with suppress(ForeignMessage):
                        asked = enrolment_in(frame or b"")
                        channel.send([(sender, encode_enrolment(answer_enrolment(register, key, asked, time())))])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield parted(channel.endpoint)[0]
    finally:
        ended.set()
        thread.join()
        channel.close()


def inviting(**more: object) -> KeyRegister:
    register = KeyRegister()
    register.invite(Invitation(invite_pair(SECRET).public.text, ends=time() + 3600, **more))  # type: ignore[arg-type]
    return register


@pytest.mark.parametrize("scheme", ["tcp", "redis"])
def test_a_machine_enrols_with_the_line_again_too_and_is_admitted_by_its_own_key(scheme: str) -> None:
    register, pair = inviting(name="lab"), KeyPair.generate()
    with broker(register, pair, broker_url(registered()[scheme])) as address:
        line = JoinLine.parse(JoinLine(address, pair.public, SECRET).text)
        for _ in range(2):
            enrol(line, MACHINE, "worker-0", patience=30)
    assert register.admits(MACHINE.public)
    assert [each.name for each in register.record.keys] == ["worker-0"]


def test_an_old_line_of_a_broker_at_redis_is_told_so_without_the_servers_password() -> None:
    pair, server = KeyPair.generate(), shared_server()
    url = server.tcp_url_of(server.own_number()).replace("://", "://default:s3cret@")
    with broker(inviting(), pair, url) as address:
        line = JoinLine(address, pair.public, bytes(16))
        with pytest.raises(NotEnrolled, match=r"redis://default@.*: the join line is old") as refused:
            enrol(line, MACHINE, "worker-0", patience=30)
    assert "s3cret" not in str(refused.value)


def test_a_line_that_another_machine_has_used_names_that_machine() -> None:
    register, pair = inviting(once=True), KeyPair.generate()
    with broker(register, pair) as address:
        line = JoinLine(address, pair.public, SECRET)
        enrol(line, MACHINE, "worker-0", patience=30)
        with pytest.raises(NotEnrolled, match=rf"{address}: .*for one machine, and worker-0 on host .* keys invite"):
            enrol(line, KeyPair.generate(), "worker-1", patience=30)


def test_an_old_line_one_of_another_broker_and_a_process_without_keys_are_told_apart() -> None:
    register, pair = inviting(), KeyPair.generate()
    with broker(register, pair) as address, broker(register, None) as open_address:
        right = JoinLine(address, pair.public, SECRET)
        for line, error, said in [
            (
                replace(right, secret=bytes(16)),
                NotEnrolled,
                f"the join line is old: .*keys admit {MACHINE.public.text}",
            ),
            (replace(right, broker=KeyPair.generate().public), KeyRefused, "has another key than the address says"),
            (replace(right, address=open_address), KeyRefused, "uses no keys"),
        ]:
            with pytest.raises(error, match=said) as raised:
                enrol(line, MACHINE, "worker-0", patience=30)
            assert line.address in str(raised.value)
            assert raised.value.exit_code == ExitCode.NOT_ADMITTED
    assert not register.admits(MACHINE.public)


def test_a_machine_that_has_enrolled_before_needs_no_invitation_that_goes_on() -> None:
    register, pair = inviting(), KeyPair.generate()
    with broker(register, pair) as address:
        line = JoinLine(address, pair.public, SECRET)
        enrol(line, MACHINE, "worker-0", patience=30)
        register.expire(time() + 4000)
        enrol(line, MACHINE, "worker-0", patience=30)
        register.revoke(MACHINE.public.text, time())
        with pytest.raises(NotEnrolled, match="has revoked the key of this machine"):
            enrol(line, MACHINE, "worker-0", patience=30)


@pytest.mark.parametrize("scheme", ["tcp", "redis"])
def test_a_line_that_was_revoked_is_told_from_an_old_one(scheme: str) -> None:
    register, pair = inviting(), KeyPair.generate()
    register.revoke(invite_pair(SECRET).public.text, time())
    register = KeyRegister(register.record)  # of a broker that was started again
    with broker(register, pair, broker_url(registered()[scheme])) as address:
        for secret, said in ((SECRET, "the join line was revoked;"), (bytes(16), "the join line is old:")):
            with pytest.raises(NotEnrolled, match=said):
                enrol(JoinLine(address, pair.public, secret), MACHINE, "worker-0", patience=30)


@pytest.mark.parametrize("scheme", ["tcp", "redis"])
def test_a_machine_has_another_key_admitted_in_the_place_of_its_own(scheme: str) -> None:
    register, pair, successor = inviting(), KeyPair.generate(), KeyPair.generate()
    with broker(register, pair, broker_url(registered()[scheme])) as address:
        enrol(JoinLine(address, pair.public, SECRET), MACHINE, "worker-0", patience=30)
        succeed(keyed(address, pair.public), MACHINE, successor.public, "stageline", patience=30)
        assert register.admits(successor.public)
        with pytest.raises(NotEnrolled, match="rotated before"):
            succeed(keyed(address, pair.public), MACHINE, KeyPair.generate().public, "thief", patience=30)


def test_where_nothing_answers_patience_ends_and_the_address_is_named() -> None:
    with broker(inviting(), None) as address:
        pass
    with pytest.raises(BrokerUnreachable, match=f"{address}: nothing answers there"):
        enrol(JoinLine(address, KeyPair.generate().public, SECRET), MACHINE, "worker-0", patience=0)


def test_a_wait_for_the_broker_is_told_with_its_cause_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolling, "SILENCE", 0.0)
    line = JoinLine("tcp://no-such-host.invalid:7000", KeyPair.generate().public, SECRET)
    with capture_logs() as logged, pytest.raises(BrokerUnreachable, match=r"'no-such-host\.invalid'"):
        enrol(line, MACHINE, "worker-0", patience=0.5)
    (said,) = logged
    assert "the name 'no-such-host.invalid' in tcp://no-such-host.invalid:7000 cannot be resolved" in said["event"]


def test_the_address_of_a_line_is_dialled_by_this_machines_key_and_by_the_operators_where_the_broker_has_it(
    tmp_path: Path,
) -> None:
    here, there = ({"XDG_CONFIG_HOME": str(tmp_path / name)} for name in ("here", "there"))
    register, pair = inviting(), own_pair(there)
    with broker(register, pair) as address:
        line = JoinLine(address, pair.public, SECRET).text
        url, found = entered(f" {line}\n", here, "worker-0", patience=30)
        assert (url, found) == (keyed(address, pair.public), own_pair(here))
        assert entered(url, here, "worker-0", patience=30) == (url, found)  # has enrolled
        assert entered(line, there, "worker-0", patience=30) == (url, operator_pair(pair))
    assert [each.key for each in register.record.keys] == [own_pair(here).public.text]
    assert entered("tcp://127.0.0.1:7000", here, "worker-0", patience=30) == ("tcp://127.0.0.1:7000", None)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (1, "no key part after #"),
        (3, "its broker's key has 0 characters"),
        (4, "its broker's key has 0 characters"),
        (20, "its broker's key has 16 characters"),
        (50, "its secret has 2 characters"),
        (75, "its check has 4 characters"),
    ],
)
def test_a_line_that_is_cut_off_anywhere_after_its_address_is_told_from_an_address(cut: int, said: str) -> None:
    address = "tcp://desk:7000"
    line = JoinLine(address, MACHINE.public, SECRET).text[: len(address) + cut]
    with pytest.raises(BadJoinLine, match=said):
        entered(line, {}, "worker-0", patience=30)


def test_an_address_of_another_machine_needs_a_key_unless_keys_are_renounced() -> None:
    line = JoinLine("tcp://desk:7000", MACHINE.public, SECRET)
    for url in ("tcp://127.0.0.1:7000", "ipc:///tmp/broker", keyed(line.address, line.broker), line.text):
        demand_key(url, insecure=False)
    demand_key("tcp://desk:7000", insecure=True)
    with pytest.raises(KeyMissing, match=r"tcp://desk:7000 has no key.*--join '.*broker.insecure = true"):
        demand_key("tcp://desk:7000", insecure=False)


@pytest.mark.parametrize("frame", [b"", b"\x80", b"x" * 2**20, encode_enrolment(Enrolment("k1.", "a", "b"))[:-1]])
def test_what_is_no_enrolment_is_not_taken_for_one(frame: bytes) -> None:
    with pytest.raises(ForeignMessage):
        enrolment_in(frame)


def test_an_enrolment_of_another_version_or_with_no_key_is_answered_with_the_reason() -> None:
    register, invitation = inviting(), invite_pair(SECRET).public.text
    other = Enrolment(MACHINE.public.text, "worker-0", "desk", version=2)
    assert "version 2, the broker by version 1" in answer_enrolment(register, invitation, other, time()).refusal
    spoilt = Enrolment("k1.short", "worker-0", "desk")
    assert "is not a public key" in answer_enrolment(register, invitation, spoilt, time()).refusal
    assert register.record.keys == ()
    assert len(encode_enrolment(other)) < LARGEST_ENROLMENT
