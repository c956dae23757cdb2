"""Keys as texts that people copy, and pairs that are made again from their secrets."""

from base64 import urlsafe_b64encode

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from stageline.broker.errors import BadKey
from stageline.broker.keys.pairs import KeyPair, PublicKey, invitation_secret, invite_pair, operator_pair

SECRETS = st.binary(min_size=32, max_size=32)
KEY = KeyPair.of_secret(bytes(range(32))).public.text


def text_of(number: int) -> str:
    return "k1." + urlsafe_b64encode(number.to_bytes(32, "little")).decode().rstrip("=")


@given(SECRETS)
def test_a_key_is_read_from_the_text_that_shows_it(secret: bytes) -> None:
    key = KeyPair.of_secret(secret).public
    assert len(key.text) == 46
    assert key.text.startswith(key.short.removesuffix("..."))
    assert PublicKey.parse(key.text) == key


@given(SECRETS)
def test_a_pair_is_that_which_zeromq_makes_of_the_secret(secret: bytes) -> None:
    assert KeyPair.of_secret(secret).public.raw == z85.decode(zmq.curve_public(z85.encode(secret)))


def test_new_pairs_differ_and_are_made_again_from_their_secrets() -> None:
    first, second = KeyPair.generate(), KeyPair.generate()
    assert first.public != second.public
    assert KeyPair.of_secret(first.secret) == first


def test_a_secret_is_in_no_representation() -> None:
    pair = KeyPair.generate()
    shown = f"{pair} {pair!r} {[pair]}"
    assert pair.public.raw.hex() in shown or repr(pair.public.raw) in shown
    assert repr(pair.secret)[2:-1] not in shown
    assert pair.secret.hex() not in shown


def test_both_sides_derive_the_pair_of_an_invitation_and_no_other_secret_leads_to_it() -> None:
    assert invite_pair(bytes(16)) == invite_pair(bytes(16))
    assert invite_pair(bytes(16)) != invite_pair(bytes(15) + b"\1")
    assert invite_pair(bytes(32)).secret != bytes(32)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "''"),
        ("k2" + KEY[2:], "'k2'"),
        (KEY[3:], "k1"),
        (KEY[:-1], "42"),
        (KEY + "A", "44"),
        (KEY[:20] + "+" + KEY[21:], "'+'"),
        (KEY[:20] + " " + KEY[21:], "' '"),
        (KEY[:20] + "\u0661" + KEY[21:], "'\u0661'"),
        (KEY[:-1] + "B", "no secret key"),  # two bits that belong to no byte
        (text_of(0), "no secret key"),
        (text_of(1), "no secret key"),
        (text_of(2**255 - 20), "no secret key"),
        (text_of(2), "no secret key"),  # not on the curve
        (text_of(2**256 - 1), "no secret key"),
    ],
)
def test_what_is_wrong_with_a_key_is_named(text: str, fact: str) -> None:
    with pytest.raises(BadKey) as raised:
        PublicKey.parse(text)
    assert fact in str(raised.value)


def test_a_key_has_no_second_text() -> None:
    """ZeroMQ ignores the highest bit, so that one secret would have had two keys: one admitted, one revoked."""
    raw = PublicKey.parse(KEY).raw
    with pytest.raises(BadKey):
        PublicKey.parse(text_of(int.from_bytes(raw, "little") | 1 << 255))


def test_a_secret_that_is_taken_for_a_key_is_not_shown_whole() -> None:
    secret = "hunter2-and-much-more-that-is-secret"  # noqa: S105
    with pytest.raises(BadKey) as raised:
        PublicKey.parse(secret)
    assert secret[12:] not in str(raised.value)


@given(SECRETS)
def test_an_operator_has_another_key_than_the_broker_and_the_same_each_time(secret: bytes) -> None:
    own = KeyPair.of_secret(secret)
    assert operator_pair(own) == operator_pair(own)
    assert operator_pair(own).public != own.public


@given(SECRETS)
def test_an_invitations_secret_is_that_of_one_broker_one_run_and_one_number(secret: bytes) -> None:
    own, other = KeyPair.of_secret(secret), KeyPair.of_secret(bytes(each ^ 255 for each in secret))
    made = invitation_secret(own, "run", 0)
    assert (len(made), invitation_secret(own, "run", 0)) == (16, made)
    assert made not in (
        invitation_secret(own, "run", 1),
        invitation_secret(own, "run2", 0),
        invitation_secret(other, "run", 0),
    )


def test_two_pairs_agree_and_a_point_that_all_can_multiply_is_refused() -> None:
    one, other = KeyPair.generate(), KeyPair.generate()
    assert one.agreed(other.public.raw) == other.agreed(one.public.raw) != one.agreed(one.public.raw)
    with pytest.raises(ValueError, match="key"):
        one.agreed(bytes(32))


def test_a_key_that_was_sent_is_one_or_is_refused() -> None:
    key = KeyPair.generate().public
    assert PublicKey.received(key.raw) == key
    with pytest.raises(BadKey):
        PublicKey.received(bytes(32))
