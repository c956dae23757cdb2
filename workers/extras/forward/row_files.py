"""Files of rows: inputs of predictions, read without unpickling anything, and predictions, written whole or not at all.

Rows of inputs are dimension 0:

x.safetensors    one tensor, or several: a dict by their names; a tuple if those are 0, 1, ...
x.npy            one array; it is mapped, and read batch by batch, as tensors are
x.npz            one array, or several, likewise; arr_0, arr_1, ... are a tuple. It is read whole
x.csv            numbers, separated by commas, a row in each line: float32, as in csv_rows.py

Predictions have these names in a .safetensors file, and their columns in a .csv file begin with them:

a tensor                          output
{"logits": ..., "pooled": ...}    logits, pooled
(..., {"mask": ...})              0, 1.mask

numpy is imported only for files of its own and text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, describe
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish, sync
from stageline.workers.extras.exchange.export import require_absent, write_tensors

from .csv_rows import read_rows, write_columns

INPUTS = (".safetensors", ".npy", ".npz", ".csv")

Read = Callable[[int, int], torch.Tensor]  # the rows from one number up to another, in memory of their own
OUTPUTS = (".safetensors", ".npy", ".csv")
ALONE = "output"  # the name of a prediction that is one tensor


_Found = dict[str, tuple[Read, tuple[int, ...]]]  # by name, with the shape


def numpy(path: Path) -> Any:
    """Return the module numpy, to read or write the file at `path`. Raises `DataError` if it is not installed."""
    try:
        return import_module("numpy")
    except ImportError as error:
        raise DataError(
            f"a {path.suffix} file is read and written by numpy, which is not installed: pip install numpy, or use a "
            ".safetensors file"
        ) from error


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a file, all with `rows` rows: for each name, a function that reads some of its rows."""

    reads: Mapping[str, Read]
    rows: int

    def batches(self, size: int) -> Iterator[Tree]:
        """Return all rows in order, `size` in each batch, and the rest in the last.

        Without rows there is one empty batch.
        """
        return (self._batch(low, high) for low, high in self._ranges(size))

    def sizes(self, size: int) -> Iterator[int]:
        """Return how many rows each batch of `batches(size)` has."""
        return (high - low for low, high in self._ranges(size))

    def _ranges(self, size: int) -> Iterator[tuple[int, int]]:
        return ((low, min(low + size, self.rows)) for low in range(0, max(self.rows, 1), size))

    def _batch(self, low: int, high: int) -> Tree:
        tensors = {name: read(low, high) for name, read in self.reads.items()}
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        places = [f"{place}" for place in range(len(tensors))]
        for start in ("", "arr_"):
            if all(f"{start}{place}" in tensors for place in places):
                return tuple(tensors[f"{start}{place}"] for place in places)
        return dict(tensors)


def open_inputs(path: Path) -> Inputs:
    """Return the inputs in the file at `path`.

    Raises:
        DataError: The file cannot be read, has no tensor, or has tensors without a common number of rows.
    """
    if path.suffix not in INPUTS:
        raise DataError(f"{path} cannot be read as inputs: expected a file of {', '.join(INPUTS)}")
    if not path.is_file():
        raise DataError(f"there is no file {path} to read inputs from")
    try:
        found = _tensors(path) if path.suffix == INPUTS[0] else _arrays(path)
    except (OSError, SafetensorError, ValueError, RuntimeError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not found:
        raise DataError(f"{path} has no tensor")
    return Inputs({name: read for name, (read, _) in found.items()}, _rows(path, found))


def _rows(path: Path, found: _Found) -> int:
    counts = {shape[0] for _, shape in found.values() if shape}
    if len(counts) != 1 or any(not shape for _, shape in found.values()):
        shapes = ", ".join(f"{name} {list(shape)}" for name, (_, shape) in found.items())
        raise DataError(f"the tensors of {path} have no common number of rows (dimension 0): {shapes}")
    return counts.pop()


def _tensors(path: Path) -> _Found:
    path.open("rb").close()  # safetensors takes any error for a missing file
    file: Any = safe_open(path, "pt")
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    return {name: (_of_slice(each), tuple(each.get_shape())) for name, each in slices.items()}


def _of_slice(stored: Any) -> Read:
    return lambda low, high: stored[low:high].clone()


def _arrays(path: Path) -> _Found:
    np = numpy(path)
    match path.suffix:
        case ".csv":
            found = {"csv": read_rows(path, np)}
        case ".npy":
            found = {"npy": np.load(path, mmap_mode="r", allow_pickle=False)}
        case _:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
    return {name: (_of_array(path, name, array), array.shape) for name, array in found.items()}


def _of_array(path: Path, name: str, array: Any) -> Read:
    np, native = numpy(path), array.dtype.newbyteorder("=")
    try:
        torch.from_numpy(np.empty(0, native))
    except TypeError as error:
        raise ValueError(f"{name} has numbers of {array.dtype}, which torch does not have") from error
    return lambda low, high: torch.from_numpy(np.array(array[low:high], dtype=native, order="C"))


def demand_writable(path: Path) -> None:
    """Check, before anything is computed, that predictions can be written to `path`; make its folder.

    Raises:
        DataError: The suffix is not supported, or needs a package that is not installed.
        WeightsUnusable: There is a file already.
        OSError: No file can be made there.
    """
    if path.suffix not in OUTPUTS:
        raise DataError(f"predictions are not written to {path}: expected a file of {', '.join(OUTPUTS)}")
    require_absent(path)
    if path.suffix != OUTPUTS[0]:
        numpy(path)
    make_folder(path.absolute().parent)
    draft = draft_of(path)
    draft.touch()
    draft.unlink()


def write_outputs(path: Path, outputs: Mapping[str, torch.Tensor]) -> None:
    """Write predictions to `path`, whole or not at all.

    Args:
        path: File to write; its suffix chooses the form.
        outputs: Row-major tensors by name.

    Raises:
        DataError: A .npy file cannot hold them: there are several, or numpy lacks the dtype. Or they are no columns
            of a .csv file.
        OSError: The file cannot be written.
    """
    make_folder(path.absolute().parent)
    draft = draft_of(path)
    try:
        match path.suffix:
            case ".npy":
                _write_array(draft, outputs)
            case ".csv":
                write_columns(draft, outputs)
            case _:
                write_tensors(draft, outputs)
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


class JoinedOutputs:
    """Outputs of the model for batch after batch, joined by rows, in memory."""

    def __init__(self) -> None:
        """Create an empty collection."""
        self._parts: dict[str, list[torch.Tensor]] = {}
        self.left_out: dict[str, str] = {}  # by name: values that are no tensors

    def add(self, output: Tree, rows: int) -> None:
        """Add the output for a batch of `rows` rows.

        Raises:
            DataError: The output has no tensor, or cannot be joined with earlier outputs.
        """
        tensors = dict(self._tensors(output))
        if not tensors:
            raise DataError(f"the model returned no tensor, but {describe(output)}: there is nothing to write")
        if self._parts and tensors.keys() != self._parts.keys():
            raise DataError(f"the model returned {_names(self._parts)} for one batch, {_names(tensors)} for another")
        for name, tensor in tensors.items():
            self._demand_rows(name, tensor, rows)
            self._parts.setdefault(name, []).append(tensor)

    def joined(self) -> dict[str, torch.Tensor]:
        """Return the joined outputs by name, row-major."""
        return {name: torch.cat(parts).contiguous() for name, parts in self._parts.items()}

    def _tensors(self, output: Tree) -> Iterator[tuple[str, torch.Tensor]]:
        for name, leaf in flattened(output):
            if isinstance(leaf, torch.Tensor):
                yield name, leaf.cpu()
            elif leaf is not None:
                self.left_out[name] = repr(leaf)

    def _demand_rows(self, name: str, tensor: torch.Tensor, rows: int) -> None:
        if tensor.shape[:1] != (rows,):
            raise DataError(
                f"the model returned {name}, {describe(tensor)}, for {rows} rows: its dimension 0 does not count them, "
                "so predictions cannot be joined"
            )
        before = self._parts.get(name, [tensor])[0]
        if (before.shape[1:], before.dtype) != (tensor.shape[1:], tensor.dtype):
            raise DataError(
                f"the model returned {name} as {describe(before)} for one batch and as {describe(tensor)} for another, "
                "which cannot be joined: predict with a --batch-size that takes all rows at once, or pad"
            )


def flattened(tree: Tree, name: str = "") -> Iterator[tuple[str, Tree]]:
    """Yield the leaves of `tree` by dotted names, which begin with `name`."""
    match tree:
        case dict():
            branches: Sequence[tuple[object, Tree]] = list(tree.items())
        case tuple() | list():
            branches = list(enumerate(tree))
        case _:
            yield name or ALONE, tree
            return
    for key, branch in branches:
        yield from flattened(branch, f"{name}.{key}" if name else f"{key}")


def _write_array(draft: Path, outputs: Mapping[str, torch.Tensor]) -> None:
    if len(outputs) > 1:
        raise DataError(f"a .npy file has one tensor, and there are {_names(outputs)}: write a .safetensors file")
    (tensor,) = outputs.values()
    try:
        array = tensor.numpy()
    except TypeError as error:
        raise DataError(f"numpy has no {tensor.dtype}: write a .safetensors file") from error
    with draft.open("xb") as file:
        numpy(draft).save(file, array, allow_pickle=False)
    sync(draft)


def _names(tensors: Mapping[str, object]) -> str:
    return ", ".join(tensors)
