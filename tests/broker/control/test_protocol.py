"""Control messages survive the wire; what is damaged, or of another version, is told apart."""

import pytest

from stageline.broker.control.messages import CONTROL_VERSION, Assigned, Exited, Report, Stop
from stageline.broker.control.protocol import decode_from_broker, decode_to_broker, encode, sealed
from stageline.broker.errors import BadMessage, ForeignMessage

PLACE = Assigned("run-1", 0, 7, 20, secret=b"secret", queue_key=b"secret too")


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
