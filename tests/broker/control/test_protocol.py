"""Control messages survive the wire; what is damaged, forged or of another version is told apart."""

import itertools

import pytest

from stageline.broker.control.messages import CONTROL_VERSION, Assigned, Exited, Report, Stop
from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.control.protocol import (
    RunKeys,
    Serials,
    decode_from_broker,
    decode_to_broker,
    encode,
    opened,
    sealed,
)
from stageline.broker.errors import BadMessage, ForeignMessage

PLACE = Assigned("run-1", 0, 7, 20, secret=b"secret", keys=PlaceKeys(0, (b"", b"secret too"), b"secret three"))
KEYS = RunKeys("run-1", b"k" * 32)


@pytest.mark.parametrize("message", [Exited(1, 101, -9), Report(3, 40, "1F3 of step 7", since=1.5, idle=0.25)], ids=str)
def test_a_message_to_the_broker_arrives_as_it_was(message: Exited | Report):
    assert decode_to_broker(encode(message)).message == message


@pytest.mark.parametrize("message", [PLACE, Stop("interrupted", 75, at_step_end=True, step=9)], ids=str)
def test_a_message_from_the_broker_arrives_as_it_was(message: Assigned | Stop):
    assert decode_from_broker(encode(message)).message == message


def test_each_flipped_bit_makes_a_message_bad():
    frame = encode(Exited(1, 101, -9))
    for place in range(len(frame)):
        damaged = bytearray(frame)
        damaged[place] ^= 1
        with pytest.raises(BadMessage, match="damaged"):
            decode_to_broker(bytes(damaged))


@pytest.mark.parametrize("length", range(29))
def test_a_frame_shorter_than_a_message_is_damaged(length: int):
    with pytest.raises(BadMessage, match="damaged"):
        decode_to_broker(encode(Exited(1, 101, -9))[:length])


@pytest.mark.parametrize("body", [b"", b"\x80", encode(Stop("", 0))[28:]], ids=["empty", "no tag", "from the broker"])
def test_an_intact_frame_that_is_no_message_is_foreign(body: bytes):
    with pytest.raises(ForeignMessage, match=f"control protocol version {CONTROL_VERSION}"):
        decode_to_broker(sealed(body))


def test_no_log_shows_the_secrets_of_a_place():
    assert "Assigned(run='run-1', index=0, incarnation=7, step=20" in repr(PLACE)
    assert "secret" not in repr(PLACE)
    assert "secret" not in f"{PLACE}"


def test_a_worker_waits_while_it_has_nothing_to_compute():
    assert Report(1, 0, "waits for forward-1 message 40", since=0.0, idle=1.0).waiting
    assert not Report(1, 0, "1F3 of step 7", since=0.0, idle=0.0).waiting


def test_a_sealed_message_arrives_and_proves_who_sent_it() -> None:
    body, seal = opened(sealed(b"body", KEYS.of_control, serial=7))
    assert (body, seal.serial) == (b"body", 7)
    assert seal.is_of(KEYS.of_control)
    assert not seal.is_of(KEYS.of_link(0, 1))


@pytest.mark.parametrize("other", [RunKeys("run-2", KEYS.key), RunKeys("run-1", b"l" * 32)], ids=["run", "key"])
def test_another_run_or_key_has_other_secrets(other: RunKeys) -> None:
    def of(keys: RunKeys) -> list[bytes]:
        numbers = 1, 2, 12
        links = [keys.of_link(0, 1), keys.of_link(1, 2), keys.of_link(0, 1, 1), keys.of_link(1, 12)]
        places = [*map(keys.of_place, numbers), keys.of_place(1, 1)]
        return [keys.of_control, keys.salt, *links, *places, *map(keys.of_incarnation, numbers)]

    secrets = of(KEYS) + of(other)
    assert len(set(secrets)) == len(secrets)
    assert {len(secret) for secret in secrets} == {32}


def test_an_unsealed_message_proves_nothing() -> None:
    body, seal = opened(sealed(b"body"))
    assert body == b"body"
    assert not seal.is_of(KEYS.of_control)


def test_without_a_key_nothing_can_be_proven() -> None:
    none = RunKeys("run-1")
    assert none.of_control == none.of_link(0, 1) == none.of_place(0) == none.salt == none.of_incarnation(1) == b""
    assert not opened(sealed(b"body", b""))[1].is_of(none.of_control)


def test_a_seal_does_not_fit_another_body_or_serial() -> None:
    frame = sealed(b"body", KEYS.of_control, serial=7)
    _, other = opened(sealed(b"bodY", b"", serial=7))
    _, later = opened(sealed(b"body", b"", serial=8))
    tag = opened(frame)[1].tag
    for covered in (other.covered, later.covered):
        assert not type(other)(tag, 0, covered).is_of(KEYS.of_control)


def test_what_is_damaged_is_told_from_what_is_forged() -> None:
    frame = sealed(b"body", KEYS.of_control, serial=7)
    for place in range(len(frame)):
        damaged = bytearray(frame)
        damaged[place] ^= 1
        with pytest.raises(BadMessage, match="damaged"):
            opened(bytes(damaged))
    for length in range(len(frame)):
        with pytest.raises(BadMessage, match="damaged"):
            opened(frame[:length])


def test_a_key_is_not_shown() -> None:
    assert "kkk" not in repr(KEYS)
    assert repr(KEYS.of_control) not in repr(opened(sealed(b"", KEYS.of_control)))


def test_a_serial_counts_once_and_they_only_rise() -> None:
    serials = Serials()
    assert [serials.is_new(each) for each in (5, 5, 6, 5, 4, 9, 8)] == [True, False, True, False, False, True, False]


@pytest.mark.parametrize("order", list(itertools.permutations((3, 4, 5))))
def test_serials_of_several_processes_come_in_any_order_once_each(order: tuple[int, ...]) -> None:
    serials = Serials(recent=4)
    assert [serials.is_new(each) for each in (*order, *order)] == [True] * 3 + [False] * 3


def test_no_more_serials_are_remembered_than_asked() -> None:
    serials = Serials(recent=3)
    assert all(serials.is_new(each) for each in range(10, 20))
    assert not any(serials.is_new(each) for each in range(20))
