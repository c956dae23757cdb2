"""Places of a file that a mutation applies to, found in its syntax tree and written over its text.

Only the text of the node changes, so all other lines are as they were. Left alone: annotations, decorators, patterns
of `match`, and text.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FLIPPED = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OFF_BY_ONE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_UNTOUCHED = {"annotation", "returns", "decorator_list", "pattern"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A node of a file, by its bytes, and the text in its stead."""

    file: str
    line: int
    start: int
    end: int
    operator: str
    was: str
    becomes: str
    statement: bool
    imported: bool  # runs during the import of its module

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.operator}: {_short(self.was)}  ->  {_short(self.becomes)}"


def places_in(file: str, source: bytes) -> Iterator[Mutation]:
    """Yield every mutation of `source`, the text of `file`."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, imported in _walked(ast.parse(source), imported=True):
        for operator, becomes in _mutations(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            statement = isinstance(node, ast.stmt)
            alone = not source[starts[node.lineno - 1] : start].strip()
            if alone or not statement:
                was = source[start:end].decode()
                written = becomes if statement else f"({becomes})"
                yield Mutation(file, node.lineno, start, end, operator, was, written, statement, imported)


def mutated(source: bytes, place: Mutation) -> bytes:
    return source[: place.start] + place.becomes.encode() + source[place.end :]


def noting(source: bytes, places: Sequence[tuple[int, Mutation]], module: str) -> bytes:
    """Return `source`, the text of one file, in which numbered places call `module.at` with their numbers."""
    inserted: list[tuple[int, int, int, bytes]] = []  # where, closing before opening, the wider one outside, what
    for number, place in places:
        call = f'__import__("{module}").at({number})'
        width = place.end - place.start
        if place.statement:
            line = source.rfind(b"\n", 0, place.start) + 1
            inserted.append((line, 1, -width, source[line : place.start] + call.encode() + b"\n"))
        else:
            inserted.append((place.start, 1, -width, f"({call} or (".encode()))
            inserted.append((place.end, 0, width, b"))"))
    for where, _, _, text in sorted(inserted, key=lambda each: each[:3], reverse=True):
        source = source[:where] + text + source[where:]
    return source


def _walked(node: ast.AST, imported: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, imported
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for name, value in ast.iter_fields(node):
        if name in _UNTOUCHED or isinstance(node, ast.JoinedStr) or (isinstance(node, ast.ClassDef) and name != "body"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _walked(each, imported and not (inside and name == "body"))


def _mutations(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left, [operator], [right]):
            for name, table in (("comparison flipped", _FLIPPED), ("off by one", _OFF_BY_ONE)):
                if type(operator) in table:
                    yield name, ast.unparse(ast.Compare(left, [table[type(operator)]()], [right]))
        case ast.BoolOp(operator, values):
            yield "and/or", ast.unparse(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(ast.Not(), operand):
            yield "not dropped", ast.unparse(operand)
        case ast.BinOp(left, operator, right) if type(operator) in _ARITHMETIC and not _text(left) and not _text(right):
            yield "plus/minus", ast.unparse(ast.BinOp(left, _ARITHMETIC[type(operator)](), right))
        case ast.Constant(bool(value)):
            yield "constant", str(not value)
        case ast.Constant(int(value) | float(value)):
            yield "constant", repr(value + 1)
        case ast.Call(function, [ast.expr() as one, ast.expr() as other, *rest], keywords) if not any(
            isinstance(each, ast.Starred) for each in (one, other)
        ):
            yield "arguments swapped", ast.unparse(ast.Call(function, [other, one, *rest], keywords))
        case ast.Return(ast.expr() as value) if ast.unparse(value) not in ("None", "False"):
            yield "return None", "return None"
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "statement deleted", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement deleted", "pass"
        case ast.Continue():
            yield "continue/break", "break"
        case ast.Break():
            yield "continue/break", "continue"


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:67]}..."
