"""Predictions are joined by rows and written whole, or not at all."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stageline import DataError
from stageline.workers.extras.exchange.stored_weights import WeightsUnusable
from stageline.workers.extras.forward.row_files import JoinedOutputs, demand_writable, write_outputs


def joined(*outputs: tuple[object, int]) -> dict[str, torch.Tensor]:
    found = JoinedOutputs()
    for output, rows in outputs:
        found.add(output, rows)  # type: ignore[arg-type]  # a tree
    return found.joined()


def test_nested_outputs_have_dotted_names_and_values_that_are_no_tensors_are_left_out(tmp_path: Path) -> None:
    def output(rows: int) -> object:
        return {"logits": torch.ones(rows, 2), "more": (torch.zeros(rows), None, 3)}

    found = JoinedOutputs()
    for rows in (2, 1):
        found.add(output(rows), rows)  # type: ignore[arg-type]  # a tree
    assert found.left_out == {"more.2": "3"}
    write_outputs(tmp_path / "made/y.safetensors", found.joined())
    stored = load_file(tmp_path / "made/y.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {"logits": (3, 2), "more.0": (3,)}
    assert [each.name for each in (tmp_path / "made").iterdir()] == ["y.safetensors"]


def test_one_tensor_is_called_output_and_may_be_an_array_of_numpy(tmp_path: Path) -> None:
    found = joined((torch.ones(2, 2), 2), (torch.zeros(0, 2), 0))
    assert found.keys() == {"output"}
    write_outputs(tmp_path / "y.npy", found)
    assert np.array_equal(np.load(tmp_path / "y.npy"), np.ones((2, 2), dtype="float32"))


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([(torch.tensor(1.0), 3)], r"returned output, float32 \[\], for 3 rows: its dimension 0 does not count them"),
        ([(torch.ones(2, 5), 3)], r"float32 \[2, 5\], for 3 rows"),
        ([(torch.ones(3, 5), 3), (torch.ones(3, 4), 3)], r"float32 \[3, 5\] for one batch and as float32 \[3, 4\]"),
        ([((torch.ones(3),), 3), (torch.ones(3), 3)], "returned 0 for one batch, output for another"),
        ([(None, 3)], "returned no tensor, but None"),
    ],
)
def test_what_cannot_be_joined_by_rows_is_refused(outputs: list[tuple[object, int]], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        joined(*outputs)


def test_what_the_file_cannot_hold_leaves_none_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a \.npy file has one tensor, and there are 0, 1"):
        write_outputs(tmp_path / "y.npy", joined(((torch.ones(1), torch.ones(1)), 1)))
    with pytest.raises(DataError, match=r"numpy has no torch\.bfloat16"):
        write_outputs(tmp_path / "y.npy", joined((torch.ones(1, dtype=torch.bfloat16), 1)))
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"y\.txt: expected a file of \.safetensors, \.npy, \.csv"):
        demand_writable(tmp_path / "y.txt")
    (tmp_path / "y.npy").touch()
    with pytest.raises(WeightsUnusable, match="is there already"):
        demand_writable(tmp_path / "y.npy")


def test_a_place_where_no_file_can_be_made_is_found_before_anything_is_computed(tmp_path: Path) -> None:
    """Else all that was computed would be lost."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        demand_writable(tmp_path / "file/y.npy")
    demand_writable(tmp_path / "made/y.npy")
    assert list((tmp_path / "made").iterdir()) == []
