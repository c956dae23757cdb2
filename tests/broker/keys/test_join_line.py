"""Join lines as people copy them: whole, cut off, mistyped, of another version, without a key or an address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.errors import BadJoinLine, BadKey
from stageline.broker.keys.join_line import JoinLine, keyed, split_key
from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.addresses import all_masked, masked

BROKER = KeyPair.of_secret(bytes(range(32))).public
LINE = JoinLine("tcp://desk:7000", BROKER, bytes(range(100, 116)))
KEY = BROKER.text.partition(".")[2]
SECRET = LINE.text.split(".")[2]


def refusal(text: str) -> str:
    with pytest.raises(BadJoinLine) as raised:
        JoinLine.parse(text)
    assert raised.value.error_code == "SL602"
    assert SECRET not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "address", ["tcp://desk:7000", "tcp://[::1]:7000", "ipc:///tmp/x", "redis://host/0#k1", "redis://host/0#k1a.b"]
)
@given(secret=st.binary(min_size=16, max_size=16))
def test_a_line_is_read_from_its_text(address: str, secret: bytes) -> None:
    line = JoinLine(address, BROKER, secret)
    assert line.text.startswith(f"{address}#{BROKER.text}.")
    assert JoinLine.parse(f" {line.text}\n") == line


def test_a_line_that_is_cut_off_anywhere_is_told_from_one_that_is_mistyped() -> None:
    begin = LINE.text.index("#k1") + 3
    for end in range(begin, len(LINE.text)):
        assert "cut off" in refusal(LINE.text[:end])
    assert "42 characters, expected 43" in refusal(LINE.text[: begin + 1 + 42])


@given(st.data())
def test_a_mistyped_character_is_found_wherever_it_is(data: st.DataObject) -> None:
    at = data.draw(st.integers(LINE.text.index("#k1.") + 4, len(LINE.text) - 1).filter(lambda at: LINE.text[at] != "."))
    wrong = data.draw(st.sampled_from("abcXYZ01289-_~ ").filter(lambda sign: sign != LINE.text[at]))
    text = LINE.text[:at] + wrong + LINE.text[at + 1 :]
    if not (at == len(LINE.text) - 1 and wrong.isspace()):  # which cuts it off
        assert "mistyped" in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        LINE.text.replace("desk:7000", "dusk:7000"),
        LINE.text.replace(KEY, KEY[1] + KEY[0] + KEY[2:]),
        LINE.text + "a",
        LINE.text + ".a",
        LINE.text.replace("#k1.", "#k1.A"),
    ],
)
def test_a_line_with_something_else_or_something_more_is_mistyped(text: str) -> None:
    assert "mistyped" in refusal(text)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("tcp://desk:7000", ["no key part", "tcp://desk:7000"]),
        (LINE.text.replace("#k1.", "#"), ["no key part", "tcp://desk:7000"]),
        (LINE.text.partition("#")[2], ["no key part"]),
        ("", ["no key part"]),
        (LINE.text.replace("#k1.", "#k2."), ["k2", "k1", "version", "tcp://desk:7000"]),
        (LINE.text.partition("#")[1] + LINE.text.partition("#")[2], ["no address"]),
        (LINE.text.replace("tcp://", ""), ["no address"]),
        (LINE.text.replace("desk:7000", "desk"), ["no address", "tcp://desk#"]),
    ],
)
def test_what_is_missing_from_a_line_is_named(text: str, facts: list[str]) -> None:
    told = refusal(text)
    assert all(fact in told for fact in facts)


def test_a_line_with_a_password_is_refused_without_showing_it() -> None:
    line = JoinLine("redis://trainer:open-sesame@host/0", BROKER, bytes(16)).text
    assert "open-sesame" not in refusal(line[:-1])


def test_the_secret_of_a_line_is_shown_nowhere() -> None:
    assert SECRET not in f"{LINE!r} {LINE}"
    assert masked(LINE.text) == "tcp://desk:7000#k1..."
    assert masked(masked(LINE.text)) == masked(LINE.text)
    assert all_masked(["worker", "--join", LINE.text]) == ["worker", "--join", masked(LINE.text)]
    assert masked(JoinLine("redis://a:b@host/0#run", BROKER, bytes(16)).text) == "redis://a@host/0#run#k1..."
    assert SECRET not in masked(f"worker --join '{LINE.text}' ended")


@pytest.mark.parametrize("address", ["tcp://desk:7000", "tcp://[::1]:7000", "redis://host/0#desk", "tcp://*:5600-5609"])
def test_an_address_with_a_key_is_parted_into_both(address: str) -> None:
    assert split_key(keyed(address, BROKER)) == (address, BROKER)
    assert split_key(address) == (address, None)


def test_a_join_line_is_no_address_and_its_secret_is_not_shown() -> None:
    with pytest.raises(BadKey, match=r"tcp://desk:7000#k1\.\.\. is a join line, .* --join") as raised:
        split_key(LINE.text)
    assert SECRET not in str(raised.value)
    assert "has no address" in refusal(JoinLine(keyed("tcp://desk:7000", BROKER), BROKER, bytes(16)).text)
