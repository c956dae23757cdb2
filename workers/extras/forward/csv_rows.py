"""CSV files of rows: numbers separated by commas, a row in each line, under a line of names where the first has text.

x.csv    age,weight            read as float32 [rows, columns]; the names are for people, and for errors
         31,70.5
y.csv    output.0,output.1     each column of an output [rows, columns]; that of an output [rows] is called output
         0.1,0.9

Numbers are written with the digits that give them back in their dtype.
"""

import csv
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stageline.pipeline.errors import DataError
from stageline.workers.disk.atomic_file import sync

_MISSING = ("", "na", "n/a", "null", "none", "-", "?", ".")
_COMMENT = "#"  # text from here to the end of a line is left out, as numpy does


def read_rows(path: Path, numpy: Any) -> Any:
    """Return the numbers of a file as an array, float32 [rows, columns].

    Args:
        path: File to read.
        numpy: The module numpy.

    Raises:
        ValueError: A cell is no number, or a row has another number of cells; the text names the row and the column.
    """
    lines = _lines(path)
    number, first = next(lines, (0, []))
    if not first:
        raise ValueError("it has no row, so how many columns it has is not known; expected at least one row of numbers")
    names = first if any(map(_is_name, first)) else None
    try:
        with warnings.catch_warnings(action="ignore"):  # of a file without rows
            skip = {"skiprows": number if names else 0, "quotechar": '"', "encoding": "utf-8-sig"}
            found = numpy.loadtxt(path, delimiter=",", dtype="float32", ndmin=2, comments=_COMMENT, **skip)
    except ValueError as error:
        raise ValueError(_fault(path, names, len(first)) or str(error)) from error
    if found.size and found.shape[1] != len(first):
        raise ValueError(_fault(path, names, len(first)))
    return found if found.size else numpy.empty((0, len(first)), "float32")


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each line that has any, with the line's number in the file, from 1."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(line.partition(_COMMENT)[0] for line in file)
        for cells in reader:
            if "".join(cells).strip():
                yield reader.line_num, [cell.strip() for cell in cells]


def _is_name(cell: str) -> bool:
    """Return True for text, but for the signs of a missing number: a row that has one is no line of names."""
    return not _is_number(cell) and cell.lower() not in _MISSING


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _fault(path: Path, names: Sequence[str] | None, columns: int) -> str:
    """Return which row of a file has a wrong number of cells, or a cell that is no number; "" if none has.

    Args:
        path: File to read again.
        names: Names of the columns, if the first line has them.
        columns: Number of cells of the first line.
    """
    for row, (line, cells) in enumerate(_lines(path), 0 if names else 1):
        place = f"row {row} (line {line})"
        if len(cells) != columns:
            first = "the line of names" if names else "the first row"
            return f"{place} has {len(cells)} column{'s' * (len(cells) != 1)}, and {first} has {columns}"
        for column, cell in enumerate(cells) if row else ():
            if not _is_number(cell):
                named = f' ("{names[column]}")' if names else ""
                what = f'"{cell}" is no number' if cell else "there is no number"
                commas = "; columns are separated by commas" if {";", "\t"} & set(cell) else ""
                return f"{place}, column {column + 1}{named}: {what}{commas}"
    return ""


def write_columns(draft: Path, outputs: Mapping[str, torch.Tensor]) -> None:
    """Write predictions as columns under a line of names; once this returns, they are on the disk.

    Args:
        draft: File to write, which must not exist.
        outputs: Tensors [rows] or [rows, columns] by name.

    Raises:
        DataError: A tensor has other dimensions, or complex numbers.
        OSError: The file cannot be written.
    """
    names: list[str] = []
    columns: list[Sequence[str]] = []
    for name, tensor in outputs.items():
        if tensor.dim() not in (1, 2) or tensor.is_complex():
            raise DataError(
                f"a .csv file has columns of real numbers, and {name} is {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}: write a .safetensors file"
            )
        names += [name] if tensor.dim() == 1 else [f"{name}.{column}" for column in range(tensor.shape[1])]
        columns += [_written(column) for column in ([tensor] if tensor.dim() == 1 else tensor.unbind(1))]
    with draft.open("x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(zip(*columns, strict=True))
    sync(draft)


def _written(column: torch.Tensor) -> Sequence[str]:
    """Return the numbers of a column with the digits that give them back: of float32, 9 at most. Truth is 0 or 1."""
    if column.dtype is torch.bool or not column.is_floating_point():
        return [str(int(value)) for value in column.tolist()]
    exact = column if column.dtype is torch.float64 else column.float()
    found: Sequence[str] = exact.numpy().astype(str).tolist()
    return found
