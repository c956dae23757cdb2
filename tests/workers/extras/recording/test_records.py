"""Records come back to the bit; those that are cut off are left out, and damaged ones are found."""

from pathlib import Path

import pytest
import torch

from stageline.broker.codec.message import Message, encode, fingerprint, read_header
from stageline.workers.extras.recording.records import Direction, RecordDamaged, read_entries, write_entry


def message(microbatch: int) -> Message:
    payload = (torch.arange(12.0).reshape(3, 4).t() + microbatch, {"mask": torch.ones(0, dtype=torch.bool)}, "word")
    return Message("run", "forward-2", 28 + microbatch, 1, payload)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step-0000000007.1"
    with path.open("wb") as out:
        write_entry(out, Direction.TAKEN, encode(message(0)))
        write_entry(out, Direction.GIVEN, encode(message(1))[:1])
    return path


def test_a_message_comes_back_to_the_bit(file):
    taken, given = read_entries(file)
    assert taken.direction is Direction.TAKEN
    tensor, tree, word = taken.load().payload
    assert torch.equal(tensor, message(0).payload[0])
    assert tensor.stride() == message(0).payload[0].stride()
    assert (tree["mask"].dtype, word) == (torch.bool, "word")
    assert given.direction is Direction.GIVEN


def test_the_header_of_a_result_identifies_its_bits(file):
    _, given = read_entries(file)
    again, other = encode(message(1)), encode(message(2))
    assert fingerprint(given.header) == fingerprint(read_header(again[0]))
    assert fingerprint(given.header) != fingerprint(read_header(other[0]))
    with pytest.raises(RecordDamaged, match="tensor frames"):
        given.load()


def test_an_entry_that_is_cut_off_anywhere_is_left_out(file):
    whole = file.read_bytes()
    ends = {len(whole): 2}
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        ends[length] = len(list(read_entries(file)))
    assert set(ends.values()) == {0, 1, 2}
    assert [ends[length] for length in sorted(ends)] == sorted(ends.values())


def test_a_flipped_bit_anywhere_is_found(file):
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(RecordDamaged, match=file.name):
            [entry.load() for entry in read_entries(file) if entry.direction is Direction.TAKEN]
