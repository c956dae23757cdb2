"""Where messages lie in shared memory, and the memory itself."""

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.errors import BadMessage
from stageline.broker.transports.sockets.shm_memory import Places, SharedMemory, new_descriptor

SIZE = 100
NAMED = "/dev/shm"  # noqa: S108  # where memory with a name would be

#        0         10        20        30
# a      aaaaaaaaaa                        then b, c, and a is freed: d goes to the front, after it there is no room
PICTURE = [("take", 10, 0), ("take", 10, 10), ("take", 10, 20), ("free", 1, None), ("take", 8, 0), ("take", 3, None)]


def test_messages_lie_one_after_the_other_and_begin_again_at_the_front() -> None:
    places = Places(30)
    for word, number, place in PICTURE:
        assert (places.take(number) if word == "take" else places.free(number)) == place


operations = st.lists(st.tuples(st.sampled_from(["take", "take", "back", "free"]), st.integers(1, SIZE + 5)))


@given(operations)
def test_live_messages_never_overlap_and_room_is_found_wherever_there_is_some(
    operations: list[tuple[str, int]],
) -> None:
    places = Places(SIZE)
    live: list[range] = []  # the oldest first
    for word, number in operations:
        if word == "take":
            place = places.take(number)
            assert (place is not None) == (number <= largest_room(live))
            if place is not None:
                live.append(range(place, place + number))
        elif word == "back" and live:
            places.take_back()
            live.pop()
        elif word == "free":
            places.free(min(number, len(live)))
            del live[:number]
        taken = [byte for region in live for byte in region]
        assert len(set(taken)) == len(taken), "two messages overlap"
        assert set(taken) <= set(range(SIZE))
        assert len(places) == len(live)


def largest_room(live: list[range]) -> int:
    """The longest region behind the newest message, or at the front before the oldest."""
    if not live:
        return SIZE
    oldest, newest = live[0], live[-1]
    if newest.start < oldest.start:
        return oldest.start - newest.stop
    return max(SIZE - newest.stop, oldest.start)


def open_files() -> set[str]:
    return {f"{number} {os.readlink(f'/proc/self/fd/{number}')}" for number in own_descriptors()}


def own_descriptors() -> list[str]:
    return [number for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")]


def test_what_one_end_writes_the_other_reads() -> None:
    descriptor = new_descriptor(1000)
    producer, consumer = SharedMemory(descriptor, 1000), SharedMemory.received(descriptor, 1000)
    os.close(descriptor)
    producer.write(990, [b"12345", memoryview(b"67890")])
    assert consumer.read(990, 10) == b"1234567890"
    producer.close()
    assert consumer.read(995, 5) == b"67890", "it is there as long as one end has it"
    consumer.close()


def test_shared_memory_has_no_file_and_leaves_no_descriptor_open() -> None:
    files, shown = open_files(), sorted(os.listdir(NAMED))
    memory = SharedMemory((descriptor := new_descriptor(2**20)), 2**20)
    os.close(descriptor)
    memory.write(0, [b"x" * 2**20])
    assert sorted(os.listdir(NAMED)) == shown
    memory.close()
    assert open_files() == files


def test_a_view_that_is_still_used_keeps_its_bytes() -> None:
    memory = SharedMemory((descriptor := new_descriptor(100)), 100)
    os.close(descriptor)
    memory.write(0, [b"abc"])
    view = memory.read(0, 3)
    memory.close()
    assert view == b"abc"


@pytest.mark.parametrize("size", [0, 101, 2**63, 2**64 - 1])
def test_memory_that_is_smaller_than_announced_is_refused(size: int) -> None:
    descriptor = new_descriptor(100)
    with pytest.raises(BadMessage, match=f"announced with {size}"):
        SharedMemory.received(descriptor, size)
    os.close(descriptor)


@pytest.mark.parametrize(("place", "size"), [(100, 1), (99, 2), (0, 101), (2**64 - 1, 2**64 - 1)])
def test_bytes_beyond_the_memory_are_refused(place: int, size: int) -> None:
    memory = SharedMemory((descriptor := new_descriptor(100)), 100)
    os.close(descriptor)
    with pytest.raises(BadMessage, match="of shared memory that has 100"):
        memory.read(place, size)
    memory.close()


def test_memory_cannot_shrink_under_the_one_who_reads_it() -> None:
    """A read beyond the end of what became smaller would end the process with SIGBUS."""
    descriptor = new_descriptor(2 * mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, mmap.PAGESIZE)
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["memory that may shrink", "file", "folder", "pipe", "device"])
def test_a_descriptor_that_is_no_shared_memory_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    if kind == "memory that may shrink":
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, 5000)
    elif kind == "pipe":
        descriptor, other = os.pipe()
        os.close(other)
    else:
        paths = {"file": tmp_path / "file", "folder": tmp_path, "device": Path("/dev/zero")}
        descriptor = os.open(paths[kind], os.O_RDONLY)
    with pytest.raises(BadMessage, match="shared memory"):
        SharedMemory.received(descriptor, 10)
    os.close(descriptor)


def test_memory_that_the_system_does_not_map_is_refused() -> None:
    descriptor = new_descriptor(2**62)
    with pytest.raises(BadMessage, match="cannot be mapped: Cannot allocate memory"):
        SharedMemory.received(descriptor, 2**62)
    os.close(descriptor)


def test_a_size_that_the_system_refuses_leaves_no_descriptor_open() -> None:
    before = open_files()
    with pytest.raises(OverflowError):
        new_descriptor(2**63)
    assert open_files() == before
