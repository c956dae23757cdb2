"""The template process imports only what a user's file imports itself, before it does anything else."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import read_plan
from stageline.workers.launch.template import imported_first, libraries_of
from support.paths import EXAMPLES
from support.workspace import Workspace


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("'''Doc.'''\n\nimport torch\nimport numpy as np, scipy.stats", ["torch", "numpy", "scipy.stats"]),
        ("from sklearn.datasets import load_digits\nfrom . import near\n", ["sklearn.datasets"]),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport numpy", ["os"]),
        ("try:\n    import numpy\nexcept ImportError:\n    pass", []),
        ("import numpy\nthis is no Python", []),
        ("import numpy\0", []),
    ],
)
def test_what_a_file_does_first_decides_how_its_libraries_are_imported(
    text: str, modules: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file.py").write_text(text)
    assert list(imported_first(tmp_path / "file.py")) == modules


def test_of_the_files_of_a_plan_only_libraries_that_a_fork_leaves_whole_are_named() -> None:
    assert libraries_of(read_plan(EXAMPLES / "digits")) == ["sklearn.datasets", "sklearn.model_selection"]


def test_a_file_that_cannot_be_read_names_nothing(workspace: Workspace) -> None:
    (workspace.folder / "data.py").unlink()
    (workspace.folder / "model.py").write_bytes(b"import numpy\n\xff")
    assert libraries_of(read_plan(workspace.folder)) == []
