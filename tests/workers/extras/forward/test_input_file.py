"""Inputs of predictions, from files of each form."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stageline import DataError
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.extras.forward.row_files import open_inputs

ROWS = torch.arange(14, dtype=torch.float32).reshape(7, 2)


def whole(path: Path, size: int = 3) -> list[Tree]:
    return list(open_inputs(path).batches(size))


@pytest.mark.parametrize("form", ["safetensors", "npy", "npz", "csv"])
def test_the_rows_of_each_form_come_in_order_and_the_last_batch_has_the_rest(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"x.{form}"
    match form:
        case "safetensors":
            save_file({"any": ROWS}, path)
        case "npy":
            np.save(path, ROWS.numpy())
        case "npz":
            np.savez(path, any=ROWS.numpy())
        case _:
            np.savetxt(path, ROWS.numpy(), delimiter=",")
    assert [len(tensors(batch)[0]) for batch in whole(path)] == [3, 3, 1] == list(open_inputs(path).sizes(3))
    assert torch.equal(torch.cat([tensors(batch)[0] for batch in whole(path)]), ROWS)
    assert all(isinstance(batch, torch.Tensor) and batch.dtype == torch.float32 for batch in whole(path))


def test_several_tensors_are_a_dict_by_their_names_or_a_tuple_by_their_numbers(tmp_path: Path) -> None:
    ids = torch.arange(7)
    save_file({"ids": ids, "mask": ids > 2}, tmp_path / "named.safetensors")
    save_file({"0": ids, "1": ids > 2}, tmp_path / "numbered.safetensors")
    np.savez(tmp_path / "numbered.npz", ids.numpy(), (ids > 2).numpy())
    (named,) = whole(tmp_path / "named.safetensors", 7)
    assert isinstance(named, dict)
    assert torch.equal(tensors(named["mask"])[0], ids > 2)
    for name in ("numbered.safetensors", "numbered.npz"):
        (pair,) = whole(tmp_path / name, 7)
        assert isinstance(pair, tuple)
        assert [each.dtype for each in tensors(pair)] == [torch.int64, torch.bool]


def test_arrays_of_any_byte_order_and_order_of_dimensions_are_read_row_by_row(tmp_path: Path) -> None:
    np.save(tmp_path / "big.npy", ROWS.numpy().astype(">f8"))
    np.save(tmp_path / "columns.npy", np.asfortranarray(ROWS.numpy()))
    assert torch.equal(tensors(whole(tmp_path / "big.npy", 7))[0], ROWS.double())
    assert torch.equal(tensors(whole(tmp_path / "columns.npy", 7))[0], ROWS)


def test_a_file_without_rows_is_one_batch_of_none(tmp_path: Path) -> None:
    save_file({"x": ROWS[:0]}, tmp_path / "x.safetensors")
    assert [tuple(each.shape) for each in tensors(whole(tmp_path / "x.safetensors"))] == [(0, 2)]


def test_what_is_no_table_of_rows_is_refused_by_name_and_nothing_is_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "object.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    save_file({"x": ROWS, "y": ROWS[:3].clone()}, tmp_path / "rows.safetensors")
    save_file({"x": torch.tensor(1.0)}, tmp_path / "number.safetensors")
    save_file({}, tmp_path / "empty.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "empty.csv").write_text("")
    for name, reason in {
        "object.npy": "Python objects in dtype",
        "text.npy": "numbers of <U1, which torch does not have",
        "rows.safetensors": r"no common number of rows \(dimension 0\): x \[7, 2\], y \[3, 2\]",
        "number.safetensors": r"no common number of rows .*x \[\]",
        "empty.safetensors": "has no tensor",
        "cut.safetensors": "cannot be read",
        "empty.csv": "empty.csv cannot be read: it has no row",
        "none.npy": "there is no file",
        "x.pt": r"expected a file of \.safetensors, \.npy, \.npz, \.csv",
    }.items():
        with pytest.raises(DataError, match=reason):
            open_inputs(tmp_path / name)
