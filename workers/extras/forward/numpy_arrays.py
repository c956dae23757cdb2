"""numpy, which is imported by name only for files of its own and text."""

from importlib import import_module
from pathlib import Path
from typing import Any

from stageline.pipeline.errors import DataError


def numpy(path: Path) -> Any:
    """The module, wanted for the file at `path`. Raises `DataError` if it is not installed."""
    try:
        return import_module("numpy")
    except ImportError as error:
        raise DataError(
            f"a {path.suffix} file is read and written by numpy, which is not installed: pip install numpy, or use a "
            ".safetensors file"
        ) from error
