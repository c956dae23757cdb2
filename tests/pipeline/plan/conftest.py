"""The smallest plan as a file."""

from pathlib import Path

import pytest

from support.small_plans import SMALLEST


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "digits" / "stageline.toml"
    path.parent.mkdir()
    path.write_text(SMALLEST)
    return path
