"""Rows in CSV files, with a line of names or without, and predictions as columns."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stageline import DataError
from stageline.pipeline.tree import tensors
from stageline.workers.extras.forward.row_files import open_inputs, write_outputs


def read(path: Path, text: str) -> Tensor:
    path.write_bytes(text.encode())
    (batch,) = open_inputs(path).batches(100)
    (found,) = tensors(batch)
    assert found.dtype is torch.float32
    return found


@pytest.mark.parametrize(
    "text",
    [
        "1,2.5\n-3,4e1\n",
        "a,b\n1,2.5\n-3,4e1\n",
        '"age, in years",b\r\n1,2.5\r\n-3,4e1\r\n',
        "\ufeffa,2024\n\n1, 2.5\n\n-3,4e1",  # one name is a number
        '# from elsewhere\n"a","b"\n"1","2.5"\n-3,4e1 # the last\n',
        ",b\n1,2.5\n-3,4e1\n",  # a column without a name
    ],
)
def test_the_first_line_is_one_of_names_where_it_has_text(text: str, tmp_path: Path) -> None:
    assert read(tmp_path / "x.csv", text).tolist() == [[1.0, 2.5], [-3.0, 40.0]]


def test_one_column_or_no_row_under_names_is_a_table_too(tmp_path: Path) -> None:
    assert read(tmp_path / "x.csv", "1\n2\n").tolist() == [[1.0], [2.0]]
    assert read(tmp_path / "x.csv", "a\n1\n").tolist() == [[1.0]]
    assert tuple(read(tmp_path / "x.csv", "a,b\n").shape) == (0, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n3,x\n", 'row 2 (line 3), column 2 ("b"): "x" is no number'),
        ("1,2\n3,x\n", 'row 2 (line 2), column 2: "x" is no number'),
        ("1,NA\n3,4\n", 'row 1 (line 1), column 2: "NA" is no number'),
        (",2\n3,4\n", "row 1 (line 1), column 1: there is no number"),
        ("a,b\n\n1,\n", 'row 1 (line 3), column 2 ("b"): there is no number'),
        ("a,b\n1,2\n3,4,5\n", "row 2 (line 3) has 3 columns, and the line of names has 2"),
        ("a,b\n1\n2\n", "row 1 (line 2) has 1 column, and the line of names has 2"),
        ("1,2\n3\n", "row 2 (line 2) has 1 column, and the first row has 2"),
        ("", "it has no row"),
        ("# nothing\n", "it has no row"),
        ("a;b\n1;2\n", 'row 1 (line 2), column 1 ("a;b"): "1;2" is no number; columns are separated by commas'),
    ],
)
def test_a_cell_that_is_no_number_is_named_by_its_row_and_column(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path / "x.csv", text)
    assert f"x.csv cannot be read: {said}" in str(refused.value)


def test_predictions_are_columns_whose_numbers_read_back_to_the_bit(tmp_path: Path) -> None:
    logits = torch.randn(5, 3) / 3
    file = tmp_path / "y.csv"
    write_outputs(file, {"logits": logits, "label": logits.argmax(1), "more.sure": logits.amax(1) > 0})
    assert file.read_text().splitlines()[0] == "logits.0,logits.1,logits.2,label,more.sure"
    (batch,) = open_inputs(file).batches(5)
    (back,) = tensors(batch)
    assert torch.equal(back[:, :3], logits)
    assert torch.equal(back[:, 3].long(), logits.argmax(1))
    assert torch.equal(back[:, 4].bool(), logits.amax(1) > 0)
    write_outputs(tmp_path / "alone.csv", {"output": torch.tensor([0.1, 1e-9], dtype=torch.bfloat16)})
    assert (tmp_path / "alone.csv").read_text().split()[0] == "output"
    write_outputs(tmp_path / "none.csv", {"output": torch.zeros(0, 2), "label": torch.zeros(0)})  # it was a traceback
    assert (tmp_path / "none.csv").read_text() == "output.0,output.1,label\n"


def test_what_has_no_columns_is_refused_and_no_file_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hidden is float32 \[5, 2, 3\]: write a \.safetensors file"):
        write_outputs(tmp_path / "y.csv", {"hidden": torch.zeros(5, 2, 3)})
    assert list(tmp_path.iterdir()) == []
