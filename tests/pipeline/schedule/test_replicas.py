"""Which copies of stages there are, which microbatches each has, and what their queues are called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.schedule.replicas import Replicas, dealt

PICTURE = Replicas(((1,), (2, 1), (1,)), 6)  # that of the module


def test_copies_are_numbered_after_the_stages() -> None:
    assert PICTURE.places == ((0, 0), (1, 0), (2, 0), (1, 1))
    assert [PICTURE.label(copy) for copy in PICTURE.copies] == ["0", "1.0", "2", "1.1"]
    assert PICTURE.groups == ((0, 1, 2, 3, 4, 5), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5), (1, 4))


def test_a_copy_is_found_by_its_label_and_by_its_number() -> None:
    assert [PICTURE.copy_of(name) for name in ("0", "1.0", "2", "1.1")] == [0, 1, 2, 3]
    assert [PICTURE.copy_of(name) for name in ("1", "3", "4", "1.2", "2.0", "")] == [1, 3, None, None, None, None]


def test_there_is_a_queue_for_each_two_copies_that_have_some_microbatch() -> None:
    both = Replicas(((1, 1), (1, 1)), 4)
    assert both.between("forward", 0, 1) == {"forward-1.0-from-0.0": (0, 1), "forward-1.1-from-0.1": (2, 3)}
    assert PICTURE.between("forward", 1, 2) == {"forward-2-from-1.0": (1, 2), "forward-2-from-1.1": (3, 2)}
    assert PICTURE.between("backward", 1, 0) == {"backward-0-from-1.0": (1, 0), "backward-0-from-1.1": (3, 0)}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_every_microbatch_is_dealt_once_and_in_proportion(shares: list[int], microbatches: int) -> None:
    groups = dealt(shares, microbatches)
    assert sorted(each for group in groups for each in group) == list(range(microbatches))
    assert all(list(group) == sorted(group) for group in groups)
    exact = [share * microbatches / sum(shares) for share in shares]
    assert all(abs(len(group) - wanted) <= len(shares) for group, wanted in zip(groups, exact, strict=True))


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_no_two_queues_share_a_name(name: str) -> None:
    all_of = Replicas(((1, 1, 1), (1, 1), (1,)), 12)
    found = [queue for stage in (0, 1) for queue in all_of.between(name, stage, stage + 1)]
    assert len(found) == len({*found}) == 8
