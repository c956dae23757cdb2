"""Imports go one way, and what decides does not do: `pipeline <- broker <- workers`, and pure modules stay pure."""

import ast
from collections.abc import Iterator
from importlib.metadata import packages_distributions
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
    "pipeline/check",
    "pipeline/timetable.py",
    "pipeline/timetable",
    "broker/ledger.py",
    "broker/registry.py",
    "broker/member.py",
    "broker/loss.py",
    "broker/exit.py",
    "broker/checkpoints.py",
    "broker/replacing.py",
    "broker/crew.py",
    "broker/spares.py",
    "broker/watch.py",
    "broker/election.py",
    "broker/waiting.py",
    "broker/obituary.py",
    "broker/stopping.py",
    "broker/journal.py",
    "broker/reception.py",
    "broker/diagnosis.py",
    "broker/control.py",
    "broker/core.py",
    "workers/correspondence.py",
    "workers/machine.py",
)
PURE_BUT_FOR_TORCH = ("broker/message.py", "broker/header.py", "broker/queue.py")


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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_none_that_is_built_on_it(package):
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    wrong = {str(path): sorted(tops(path) & above) for path in modules(package) if tops(path) & above}
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_itself_relatively(package):
    wrong = [str(path) for path in modules(package) if package in tops(path) and path.name != "__main__.py"]
    assert not wrong


def test_what_decides_has_no_clock_no_chance_and_no_system():
    wrong = {str(path): sorted(tops(path) & (DOING | {"torch"})) for path in modules(*PURE)}
    wrong |= {str(path): sorted(tops(path) & DOING) for path in modules(*PURE_BUT_FOR_TORCH)}
    assert not {path: names for path, names in wrong.items() if names}


def test_the_list_of_pure_modules_names_files_that_exist():
    assert len(list(modules(*PURE))) > 20
    assert all((ROOT / place).exists() for place in PURE_BUT_FOR_TORCH)


def test_the_generic_package_names_are_ours_alone():
    # A second distribution that brings a package of the same name would mix its modules with ours.
    for package in PACKAGES:
        assert set(packages_distributions()[package]) == {"stageline"}


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


def test_every_package_is_in_the_wheel() -> None:
    """A folder that setup.py does not name works from a checkout, and is missing where stageline is installed."""
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for top in PACKAGES for path in (ROOT / top).rglob("__init__.py")
    }
    named = ast.parse((ROOT / "setup.py").read_text())
    words = {node.value for node in ast.walk(named) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert found <= words
