"""Writes predictions to a file, which is there whole or not at all.

a tensor                          output
{"logits": ..., "pooled": ...}    logits, pooled
(..., {"mask": ...})              0, 1.mask
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, describe
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish, sync
from stageline.workers.extras.exchange.export import require_absent, write_tensors

from .numpy_arrays import numpy

OUTPUTS = (".safetensors", ".npy")
ALONE = "output"  # the name of a prediction that is one tensor


def demand_writable(path: Path) -> None:
    """Before anything is computed. Raises `DataError` for another form, or one that needs what is not installed, and
    `WeightsUnusable` for a file that is there, `OSError` where no file can be made; its folder is made."""
    if path.suffix not in OUTPUTS:
        raise DataError(f"predictions are not written to {path}: expected a file of {' or '.join(OUTPUTS)}")
    require_absent(path)
    if path.suffix == ".npy":
        numpy(path)
    make_folder(path.absolute().parent)
    draft = draft_of(path)
    draft.touch()
    draft.unlink()


def write_outputs(path: Path, outputs: Mapping[str, torch.Tensor]) -> None:
    """Raises `DataError` if a .npy file cannot hold them, `OSError`."""
    make_folder(path.absolute().parent)
    draft = draft_of(path)
    try:
        if path.suffix == ".npy":
            _write_array(draft, outputs)
        else:
            write_tensors(draft, outputs)
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


class JoinedOutputs:
    """What the model returned for batch after batch, joined by rows. It is in memory."""

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {}
        self.left_out: dict[str, str] = {}  # by name: values that are no tensors

    def add(self, output: Tree, rows: int) -> None:
        """The `output` for a batch of so many rows. Raises `DataError` if it cannot be joined with those before."""
        tensors = dict(self._tensors(output))
        if not tensors:
            raise DataError(f"the model returned no tensor, but {describe(output)}: there is nothing to write")
        if self._parts and tensors.keys() != self._parts.keys():
            raise DataError(f"the model returned {_names(self._parts)} for one batch, {_names(tensors)} for another")
        for name, tensor in tensors.items():
            self._demand_rows(name, tensor, rows)
            self._parts.setdefault(name, []).append(tensor)

    def joined(self) -> dict[str, torch.Tensor]:
        """Row-major, by names."""
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
    """The leaves of a tree by dotted names."""
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
