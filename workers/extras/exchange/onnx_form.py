"""A run's model as an ONNX file, written by torch's exporter: the unsplit model in evaluation mode, for any rows.

inputs      input, or the names of a dict's tensors, or 0, 1, ... of a tuple's
outputs     output, logits, more.0: as `stageline predict` names them

Dimension 0 of each tensor is called rows. Weights above 1.5 GB are in a second file, x.onnx.data.
"""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from stageline.pipeline.data import rows
from stageline.pipeline.tree import Tree, describe, leaves, map_leaves, map_tensors
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish

from .export import require_absent
from .stored_weights import WeightsUnusable

SUFFIX = ".onnx"
_PACKAGES = ("onnx", "onnxscript")
_ROWS = "rows"
LEAST = 2  # rows of an example: torch.export takes the number 1 for a constant


def require_onnx() -> None:
    """Raise `WeightsUnusable`, which has the command that installs them, without the packages that torch exports by."""
    for package in _PACKAGES:
        try:
            import_module(package)
        except ImportError as error:
            raise WeightsUnusable(
                f"--format onnx is written by the package {package}, which is not installed, or not whole ({error}); "
                'install it with: pip install "stageline[onnx]"'
            ) from error


def export_onnx(model: torch.nn.Module, inputs: Tree, target: Path) -> None:
    """Write `model` as the ONNX file `target`, whole or not at all.

    Args:
        model: Module in evaluation mode, on the CPU.
        inputs: Example of its inputs: tensors with 2 rows or more, of which the numbers are not used.
        target: File, which must not exist.

    Raises:
        WeightsUnusable: There is a file already, or torch cannot export the model.
        OSError: The file cannot be written.
    """
    require_absent(target)
    program = _program(model, inputs)
    make_folder(target.absolute().parent)
    draft = draft_of(target)
    draft.mkdir()
    try:
        program.save(draft / target.name)
        for file in sorted(draft.iterdir(), key=lambda each: each.name == target.name):  # the model last
            publish(file, target.with_name(file.name))
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _program(model: torch.nn.Module, inputs: Tree) -> Any:
    """Return the model as torch's `ONNXProgram`. Raises `WeightsUnusable`."""
    varying = torch.export.Dim(_ROWS)
    given, named = _arguments(model, inputs)
    shapes = tuple(_sizes(each, varying) for each in (*given, *named.values()))
    try:
        with warnings.catch_warnings(action="ignore"), _only_errors_logged(), torch.no_grad():
            outputs = model(*given, **named)
            exported = torch.export.export(model, given, named, dynamic_shapes=shapes, strict=False)
            names = {"input_names": _names(inputs, "input"), "output_names": _names(outputs, "output")}
            return torch.onnx.export(exported, dynamo=True, verbose=False, dynamic_shapes=shapes, **names)
    except Exception as error:  # the exporter runs the user's forward, which raises errors of any class
        cause = error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0]
        raise WeightsUnusable(
            f"torch cannot export the model as ONNX for inputs {describe(inputs)} with any number of rows: "
            f"{type(cause).__name__}: {reason}. Its forward must be one that torch.export takes"
        ) from error


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Return a context in which torch's exporter does not log that other packages are not installed."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _arguments(model: torch.nn.Module, inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the unsplit model's call for a batch's inputs, as a plain loop would give them."""
    match inputs:
        case dict() if not isinstance(model, torch.nn.Sequential):
            return (), inputs
        case tuple() | list() if not isinstance(model, torch.nn.Sequential):
            return tuple(inputs), {}
    return (inputs,), {}


def _sizes(tree: Tree, varying: Any) -> Any:
    """Return which dimensions of the tensors in `tree` vary: the first. Other leaves have none."""
    sizes: Any = lambda leaf: {0: varying} if isinstance(leaf, torch.Tensor) else None  # noqa: E731 - no leaf of a tree
    return map_leaves(sizes, tree)


def _names(tree: Tree, alone: str) -> list[str]:
    """Return a dotted name for each tensor of `tree`; a tree that is one tensor is called `alone`."""
    paths = (path for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
    return [path.replace("[", ".").translate({ord(sign): None for sign in "]'"}).strip(".") or alone for path in paths]


def example_of(batch: Tree) -> Tree:
    """Return the first 2 rows of a batch's inputs, an example for `export_onnx`. Raises `WeightsUnusable` without 2."""
    if rows(batch) < LEAST:
        raise WeightsUnusable(
            f"the example of the inputs has {rows(batch)} row: torch.export needs {LEAST} or more to find out that "
            "their number varies; name a file with more by --input"
        )
    return map_tensors(lambda tensor: tensor[:LEAST], batch)
