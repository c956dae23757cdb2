"""Sockets need short paths."""

from pathlib import Path

import pytest

from stageline.workers.disk import owned_folder as module
from stageline.workers.disk.owned_folder import TooDeep, demand_short_socket_paths, longest_socket_path


def test_a_folder_for_temporary_files_that_is_too_deep_for_sockets_is_named(monkeypatch, tmp_path: Path) -> None:
    demand_short_socket_paths()
    deep = tmp_path / ("x" * 100)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(deep))
    with pytest.raises(TooDeep, match=f"paths of {longest_socket_path()} bytes, 107 are the most. Set TMPDIR"):
        demand_short_socket_paths()
