"""Inputs are like the example, but for their rows, or refused by name."""

import pytest
import torch

from stageline import DataError, ModelRefused
from stageline.pipeline.model.layered.example import Example

IDS, MASK = torch.ones(2, 4, dtype=torch.long), torch.ones(2, 1, 4)


def test_a_microbatch_with_other_rows_is_taken_in_the_examples_order():
    ids, mask = torch.ones(5, 4, dtype=torch.long), torch.ones(5, 1, 4)
    assert Example({"ids": IDS, "mask": MASK, "causal": True}).taken({"mask": mask, "causal": True, "ids": ids}) == (
        ids,
        mask,
    )
    assert Example((IDS, None)).taken((ids, None)) == (ids,)
    assert Example(IDS).taken(ids) == (ids,)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (
            {"ids": IDS, "mask": MASK[..., :3]},
            r"input mask has 3 in dimension 2 \(float32 \[2, 1, 3\]\).* with 4 there",
        ),
        (
            {"ids": IDS.int(), "mask": MASK},
            r"input ids is int32 \[2, 4\], and the model was traced with int64 \[2, 4\]",
        ),
        ({"ids": IDS, "mask": MASK[0]}, r"input mask is float32 \[1, 4\], .* with float32 \[2, 1, 4\]"),
        (
            {"ids": IDS, "mask": None},
            r"input mask is None, .* traced with float32 .*constants of the graph.*as a tensor",
        ),
        ({"ids": IDS}, r"inputs of a batch are \{ids: int64 \[2, 4\]\}, and the model was traced with \{ids: .*mask: "),
        (IDS, r"inputs of a batch are int64 \[2, 4\], and .* rows must be as in the example.*stageline.Layers"),
    ],
    ids=range(6),
)
def test_what_deviates_is_named(inputs, reason):
    with pytest.raises(DataError, match=reason):
        Example({"ids": IDS, "mask": MASK}).taken(inputs)


@pytest.mark.parametrize(
    ("example", "taken", "rows", "reason"),
    [
        (2, 8, 5, r"input ids has 1 row in a microbatch \(5 rows in 4 microbatches\), .* microbatches of 2 rows or"),
        (3, 11, 4, r"\(4 rows in 4 .* fewer .*drop_last=True of stageline.Loader.*data.drop_last = true .*an example"),
        (2, 8, 3, r"input ids has 1 row in a microbatch \(3 rows in 4 microbatches\)"),
        (1, 3, 5, r"input ids has 2 rows in a microbatch .* for microbatches of 1 row, since its example, .* has 1"),
        (1, 4, 5, r"input ids has 2 rows in a microbatch .*Begin with 2 rows or more"),
        (2, 0, 4, "input ids has 1 row"),  # without rows, nothing is computed
    ],
)
def test_microbatches_are_of_a_number_of_rows_that_the_graph_is_for(example, taken, rows, reason):
    ids = torch.ones(20, 4)
    model = Example({"ids": ids[:example]})
    model.check({"ids": ids[:taken]}, 4)
    with pytest.raises(DataError, match=reason):
        model.check({"ids": ids[:rows]}, 4)


def test_plain_values_are_those_of_the_example():
    with pytest.raises(DataError, match="input 1 is False, and the model was traced with True"):
        Example((IDS, True)).taken((IDS, False))


@pytest.mark.parametrize("inputs", [torch.ones(()), torch.ones(0, 4), (torch.ones(2), torch.ones(3)), 3])
def test_an_example_has_rows(inputs):
    with pytest.raises(ModelRefused, match="the example that the model is traced with"):
        Example(inputs)
