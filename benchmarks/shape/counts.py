"""Facts that the files of a checkout tell: statements, class names, rooms, and which modules have a test."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("src", "pipeline", "broker", "workers")  # src has links to the others, which are not followed
ALL = (*PRODUCT, "tests", "benchmarks")

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def files(root: Path, *folders: str) -> Iterator[Path]:
    """The Python files of `folders`."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def lines(root: Path) -> int:
    """The number of lines of the product."""
    return sum(len(path.read_text().splitlines()) for path in files(root, *PRODUCT))


def statements(root: Path, *, without: tuple[str, ...] = ()) -> int:
    """The number of statements of the product, without docstrings, and without the folders `without`."""
    left_out = tuple(root / folder for folder in without)
    kept = (path for path in files(root, *PRODUCT) if not any(map(path.is_relative_to, left_out)))
    return sum(map(_statements, kept))


def _statements(path: Path) -> int:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    return sum(not _is_docstring(node) for node in nodes)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def ambiguous_classes(root: Path) -> dict[str, list[str]]:
    """The class names that are defined in more than one file of the project, with these files."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in files(root, *ALL):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path.relative_to(root)))
    return {name: sorted(found) for name, found in sorted(places.items()) if len(found) > 1}


def modules(root: Path) -> list[Path]:
    """The product's modules, without the `__init__` files."""
    return [path for path in files(root, *PRODUCT) if path.stem not in ("__init__", "__main__")]


def modules_with_tests(root: Path) -> list[Path]:
    """The modules that have a test of their name, in the mirrored folder where the tests have folders."""
    return [path for path in modules(root) if _has_test(root, path)]


def _has_test(root: Path, module: Path) -> bool:
    name, tests = f"test_{module.name}", root / "tests"
    return (tests / module.parent.relative_to(root) / name).exists() or (tests / name).exists()


def largest_folder(root: Path) -> tuple[str, int]:
    """The folder of the product with the most modules, and their number."""
    count: dict[str, int] = defaultdict(int)
    for path in modules(root):
        count[str(path.parent.relative_to(root))] += 1
    return max(count.items(), key=lambda item: item[1])


def rooms(root: Path) -> set[str]:
    """The folders of the product that hold Python files."""
    return {str(path.parent.relative_to(root)) for path in files(root, *PRODUCT)}


def longest_file(root: Path) -> tuple[str, int]:
    """The file of the product with the most lines, and their number."""
    sizes = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in files(root, *PRODUCT)}
    return max(sizes.items(), key=lambda item: item[1])


def function_lines(root: Path) -> list[int]:
    """The length of each function of the product in lines, docstrings included, in ascending order."""
    trees = (ast.parse(path.read_text()) for path in files(root, *PRODUCT))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, _FUNCTION))
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
