"""Decoded state equals what was encoded, in value and type; JSON from any other source does no harm."""

from collections import Counter, OrderedDict, deque
from enum import StrEnum

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline.workers.disk.tensor_file import BadStateTree, Unsaveable, decode_state, encode_state
from support.states import difference

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["$tensor", "$dict"])
tensors = st.integers(0, 3).map(lambda size: torch.arange(float(size)))
keys = st.text() | st.integers() | st.tuples(st.integers()) | st.sampled_from(["$tensor", "$dict", "1", 1])
counters = st.dictionaries(keys, st.integers()).map(Counter)
values = st.recursive(
    scalars | tensors | counters,
    lambda each: st.lists(each) | st.lists(each).map(tuple) | st.dictionaries(keys, each),
    max_leaves=12,
)


@given(values)
def test_a_value_comes_back_through_json_equal_in_value_and_type(value):
    parts: dict[str, torch.Tensor] = {}
    encoded = msgspec.json.decode(msgspec.json.encode(encode_state(value, "top", parts)))
    assert not difference(decode_state(encoded, parts), value)


def test_the_encoded_of_an_optimizers_state_reads_like_it():
    state = {"lr": 0.1, "betas": (0.9, float("inf")), "state": {0: {"step": torch.ones(())}}, "more": OrderedDict(a=1)}
    parts: dict[str, torch.Tensor] = {}
    assert encode_state(state, "optimizer", parts) == {
        "lr": 0.1,
        "betas": {"$tuple": [0.9, {"$float": "inf"}]},
        "state": {"$dict": [[0, {"step": {"$tensor": "optimizer.state.0.step"}}]]},
        "more": {"a": 1},
    }
    assert list(parts) == ["optimizer.state.0.step"]


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize("odd", [object(), {1, 2}, deque([1]), Colour.RED, 1j, b"x", torch.float32, abs])
def test_a_value_without_a_form_is_refused_with_its_place(odd):
    with pytest.raises(Unsaveable, match=r"^top\.a\.1 is of type "):
        encode_state({"a": [0, odd]}, "top", {})


@pytest.mark.parametrize(
    "encoded",
    [
        {"$tensor": "missing"},
        {"$tensor": 1},
        {"$call": "os.system"},
        {"$float": "1.5"},
        {"$float": 1},
        {"$int": "one"},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": 5},
        {"$tuple": {}},
        {"$tuple": [], "more": 1},
        [{"$nothing": None}],
    ],
)
def test_a_encoded_that_stands_for_nothing_is_refused(encoded):
    with pytest.raises(BadStateTree):
        decode_state(encoded, {})
