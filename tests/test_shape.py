"""`make shape` traces a real run, at methods of the product that it names, and writes the tables of ARCHITECTURE.md."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def test_the_methods_that_make_shape_traces_are_there() -> None:
    from benchmarks.shape.sitecustomize import WATCHED

    assert WATCHED
    for module, (name, trace) in WATCHED.items():
        watched = getattr(import_module(module), name)
        copy = type(name, (watched,), {})  # the product's class stays as it is
        trace(copy)
        replaced = [method for method in vars(copy) if not method.startswith("__")]
        assert replaced
        assert all(vars(copy)[method] is not getattr(watched, method) for method in replaced)


def test_the_tables_of_the_architecture_are_those_of_the_code() -> None:
    from benchmarks.shape import page

    text = (ROOT / page.PAGE).read_text()
    listed = page.listed(text)
    assert listed.keys() == {"microbatch", "heartbeat"}
    assert all(listed.values())
    assert "| `pipeline/stage` * |" in text
    assert page.written(text, ROOT, listed) == text, "python -m benchmarks.shape --sentences rewrites the tables"


def test_a_table_is_made_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    from benchmarks.shape import page

    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_layering.py").write_text('TOP = "b"\nLADDER = {\n    "a": PURE,\n    TOP: DOING,\n}\n')
    for room, said in (("a", "Decides."), ("b", "Does.\n\nMore.")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f'"""{said}"""\n')
    text = "before\n<!-- shape: rooms -->\nold\n<!-- end -->\n<!-- shape: heartbeat -->\n<!-- end -->\nafter\n"
    written = page.written(text, tmp_path, {"heartbeat": ["b/__init__.py"]})
    rooms = "| room | |\n|---|---|\n| `b` | Does. |\n| `a` * | Decides. |\n"
    way = "| | file | |\n|---|---|---|\n| 1 | `b/__init__.py` | Does. |\n"
    marked = f"<!-- shape: rooms -->\n{rooms}<!-- end -->\n<!-- shape: heartbeat -->\n{way}<!-- end -->\n"
    assert written == f"before\n{marked}after\n"
    assert page.listed(written) == {"heartbeat": ["b/__init__.py"]}


def test_the_architecture_is_twelve_pages_at_most() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text) <= 480 * 100
    assert len(text.splitlines()) <= 480
    assert len(re.findall(r"\w\S*", text)) <= 5500


@pytest.mark.slow
def test_make_shape_finds_the_ways_that_the_architecture_lists_in_a_real_run() -> None:
    from benchmarks.shape import page
    from benchmarks.shape.ways import ways

    found = {way: {*files} for way, files in ways(ROOT).items()}
    listed = page.listed((ROOT / page.PAGE).read_text())
    assert {way: {*files} ^ found[way] for way, files in listed.items()} == {"microbatch": set(), "heartbeat": set()}
    takes, computes = {"workers/runtime/loop.py", "broker/queues/delivery.py"}, {"pipeline/stage/stage.py"}
    assert takes | computes <= found["microbatch"]
    worker = {"workers/control/control_thread.py", "workers/control/session.py"}
    broker = {"workers/process/broker_process.py", "broker/coordinator/coordinator.py"}
    assert worker | broker <= found["heartbeat"]
