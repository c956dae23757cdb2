"""Imports go one way, and what decides does not do: `pipeline <- broker <- workers`, and pure modules stay pure."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "broker", "workers")  # each may import those before it

# What only the edge may touch: clocks, chance, the system, threads, sockets. `torch` counts too, but for messages.
DOING = {
    "asyncio",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "select",
    "socket",
    "sqlite3",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "zmq",
    "redis",
}
PURE = (
    "pipeline/plan",
    "pipeline/schedule",
    "pipeline/timetable",
    "broker/ledger",
    "broker/membership",
    "broker/recovery",
    "broker/diagnosis",
    "broker/control/protocol.py",
    "broker/coordinator/admission.py",
    "broker/coordinator/assignments.py",
    "broker/coordinator/coordinator.py",
    "broker/coordinator/events.py",
    "broker/coordinator/registration.py",
    "broker/coordinator/shutdown.py",
    "broker/coordinator/supervision.py",
    "workers/control/session.py",
    "workers/runtime/machine.py",
)
PURE_BUT_FOR_TORCH = ("broker/codec/message.py", "broker/codec/header.py", "broker/queues/base.py")


def modules(*places: str) -> Iterator[Path]:
    for place in places:
        path = ROOT / place
        yield from [path] if path.suffix == ".py" and path.exists() else path.rglob("*.py")


def imports(path: Path) -> Iterator[str]:
    """The absolute names that a module imports, wherever in it; relative ones stay inside the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def ours(path: Path) -> set[str]:
    """The packages of ours that a module imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("stageline.")}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_none_that_is_built_on_it(package):
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    files = [path for path in modules(package) if "api" not in path.parts]
    wrong = {str(path): sorted(ours(path) & above) for path in files if ours(path) & above}
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_imported_by_the_name_of_its_folder(package):
    wrong = [str(path) for path in modules(*PACKAGES, "tests", "examples", "benchmarks") if package in tops(path)]
    assert not wrong


def test_what_decides_has_no_clock_no_chance_and_no_system():
    wrong = {str(path): sorted(tops(path) & (DOING | {"torch"})) for path in modules(*PURE)}
    wrong |= {str(path): sorted(tops(path) & DOING) for path in modules(*PURE_BUT_FOR_TORCH)}
    assert not {path: names for path, names in wrong.items() if names}


def test_the_list_of_pure_modules_names_files_that_exist():
    assert len(list(modules(*PURE))) > 20
    assert all((ROOT / place).exists() for place in PURE_BUT_FOR_TORCH)


def test_nothing_received_is_unpickled_or_evaluated():
    forbidden = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
    for path in modules(*PACKAGES):
        assert not tops(path) & forbidden, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__"), f"{path}:{node.lineno}"
                assert not called.endswith(("recv_pyobj", "send_pyobj")), f"{path}:{node.lineno}"
                if called.endswith("torch.load"):
                    assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"
