"""Which files of a user's folder some of its modules need."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from stageline.workers.script.names import files_of

FILES = {
    "graph_model.py": "import torch\nfrom graph_parts import blocks\n\ndef build():\n    import graph_late\n",
    "graph_late.py": "",
    "graph_parts/__init__.py": "",
    "graph_parts/blocks.py": "from . import norms as n\nfrom .deep.attention import score",
    "graph_parts/norms.py": "",
    "graph_parts/unused.py": "",
    "graph_parts/deep/__init__.py": "",
    "graph_parts/deep/attention.py": "import graph_model\nscore = 1",
    "graph_data.py": "import graph_model",
}


def test_the_files_of_a_module_are_its_own_and_those_of_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    try:
        for name in ("graph_data", "graph_late", "graph_parts.unused"):
            import_module(name)
        unneeded = {"graph_data.py", "graph_parts/unused.py"}
        assert files_of(["graph_model"], tmp_path) == FILES.keys() - unneeded
    finally:
        for name in [name for name in sys.modules if name.startswith("graph_")]:
            del sys.modules[name]
