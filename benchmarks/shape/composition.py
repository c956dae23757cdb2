"""How the parts of the product are composed: conditionals on a feature, assignments to other objects' attributes."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .counts import PRODUCT, files

# Each feature: identifiers that name it, in lower case with underscores as spaces; paths of the feature's own files.
FEATURES = {
    "asynchronous": (r"\bmode\b|delays|stash weights|asynchron", r"versions"),
    "auto": (r"is auto|\borders?\b|ordered", r"order|choice"),
    "averages": (r"\bema\b|averag", r"average"),
    "clipping": (r"\bclip", r"clip"),
    "codecs": (r"codec", r"codec"),
    "evaluation": (r"evaluat|\brounds?\b|verdict|criterion", r"evaluat|rounds"),
    "freezing": (r"first trainable|frozen|\bahead\b", r"freez|trainable"),
    "groups": (r"\bmesh\b|\bgroup\b|leader|\bsplits?\b|\bshard\b", r"group|split"),
    "memory limit": (r"\btight\b|\blimit\b", r"memory|budget"),
    "offloading": (r"offload", r"offload"),
    "prefix cache": (r"prefix|replay", r"prefix|replays"),
    "recomputation": (r"recomput", r"recomput"),
    "recording": (r"\brecord(s|er|ing)\b", r"replay|record"),
    "replicas": (r"replica|\bshares\b|elastic|stand ins?\b", r"replica|stand_in"),
    "scripts": (r"\bscript", r"script"),
    "skipping": (r"\bskip", r"skip"),
    "staying data": (r"\bstays?\b|staying", r"staying"),
    "taps": (r"\btap(s|ped)?\b", r"taps|tapp"),
    "tied parameters": (r"\btie[sd]?\b", r"tied|ties"),
}


@dataclass(frozen=True, slots=True)
class Hit:
    """Place in the product that a count includes."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def conditionals(root: Path) -> list[Hit]:
    """Conditionals whose test names a feature, outside the files of that feature.

    A conditional is the test of an `if`, a `while`, a conditional expression or a comprehension, and a case of a
    `match`. One test that names two features counts for each of them.
    """
    return [hit for path, tree in _trees(root) for hit in _conditionals(str(path), tree)]


def foreign_assignments(root: Path) -> list[Hit]:
    """Assignments to an attribute of another object than `self` or `cls`.

    Calls of `setattr` and `object.__setattr__`, and methods that only assign an argument to an attribute, count too.
    """
    return [hit for path, tree in _trees(root) for node in ast.walk(tree) for hit in _assignments(str(path), node)]


def _trees(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in files(root, *PRODUCT):
        yield path.relative_to(root), ast.parse(path.read_text())


def _conditionals(path: str, tree: ast.Module) -> Iterator[Hit]:
    for node in ast.walk(tree):
        for test in _tests(node):
            words = " ".join(map(_words, _identifiers(test)))
            for feature, (named, own) in FEATURES.items():
                if re.search(named, words) and not re.search(own, path):
                    yield Hit(f"{path}:{test.lineno}", f"{feature}: {ast.unparse(test)}")


def _tests(node: ast.AST) -> list[ast.expr | ast.pattern]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return [test]
        case ast.comprehension(ifs=tests):
            return list(tests)
        case ast.match_case(pattern=pattern, guard=guard):
            return [pattern] if guard is None else [pattern, guard]
        case _:
            return []


def _identifiers(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _words(identifier: str) -> str:
    """`first_trainable`, `FIRST_TRAINABLE` and `FirstTrainable` as "first trainable"."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", identifier)
    return spaced.replace("_", " ").lower()


def _assignments(path: str, node: ast.AST) -> Iterator[Hit]:
    match node:
        case ast.Assign(targets=targets):
            yield from (_assigned(path, each) for target in targets for each in _foreign(target))
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield from (_assigned(path, each) for each in _foreign(target))
        case ast.Call(func=ast.Name(id="setattr") | ast.Attribute(attr="__setattr__")):
            yield Hit(f"{path}:{node.lineno}", ast.unparse(node))
        case ast.FunctionDef() if _is_setter(node):
            yield Hit(f"{path}:{node.lineno}", f"the method {node.name} assigns an argument")
        case _:
            pass


def _foreign(target: ast.expr) -> Iterator[ast.Attribute]:
    for each in ast.walk(target):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            owner = each.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield each


def _assigned(path: str, target: ast.Attribute) -> Hit:
    return Hit(f"{path}:{target.lineno}", f"assigns {ast.unparse(target)}")


def _is_setter(node: ast.FunctionDef) -> bool:
    names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
    if not names or names[0] != "self" or node.name == "__init__":
        return False
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    match body:
        case [ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"))], value=ast.Name(id=given))]:
            return given in names[1:]
        case _:
            return False
