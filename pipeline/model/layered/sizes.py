"""Sizes of a dimension for which a traced graph computes what the model does.

torch.export leaves a size open, and keeps as a guard what the forward asks of it:

    if x.shape[0] < 64                    2 to 63
    torch.zeros(len(x))                   the size of the example, which Python has been told
    if x.shape[0] % 2                     the size of the example, too: no such sizes lie between two bounds
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a dimension may have.

    Attributes:
        least: The smallest size.
        most: The largest size; None if there is none.
    """

    least: int
    most: int | None = None

    def has(self, size: int) -> bool:
        """Return True if the dimension may have `size`."""
        return self.least <= size and (self.most is None or size <= self.most)

    @property
    def is_one(self) -> bool:
        """True if there is only one size."""
        return self.least == self.most

    def within(self, other: "Sizes") -> "Sizes":
        """Return the sizes that are in `other`, too."""
        both = [most for most in (self.most, other.most) if most is not None]
        return Sizes(max(self.least, other.least), min(both, default=None))

    def of(self, things: str) -> str:
        """Return the sizes as text, such as "2 to 63 rows"."""
        least = f"{self.least} {things.removesuffix('s') if self.least == 1 else things}"
        if self.is_one:
            return least
        return f"{least} or more" if self.most is None else f"{self.least} to {self.most} {things}"


def open_sizes(given: Sequence[torch.Tensor], dimension: int, here: int) -> Sizes:
    """Return the sizes that `dimension` of all inputs may have in a traced graph: all those that it takes for alike.

    Args:
        given: torch.export's stand-ins for the inputs, with open sizes.
        dimension: The dimension. Inputs with fewer do not count.
        here: Its size in the example.
    """
    found: list[Any] = [each.shape[dimension] for each in given if each.dim() > dimension]
    symbols = _symbols(found)
    if not symbols or any(isinstance(size, int) or not size.node.expr.is_Symbol for size in found):
        return Sizes(here, here)
    shapes, one = found[0].node.shape_env, next(iter(symbols))
    sizes = Sizes(2)
    for guard in shapes.guards:
        asked = shapes.replace(guard.expr)
        if asked.free_symbols & symbols:
            sizes = sizes.within(_asked(asked.subs(dict.fromkeys(symbols, one)), one) or Sizes(here, here))
    return sizes


def depend(given: Sequence[torch.Tensor], first: int, second: int) -> bool:
    """Return True if a traced graph asks something of the sizes of two dimensions of the inputs at once.

    Args:
        given: torch.export's stand-ins for the inputs, with open sizes.
        first: The first dimension.
        second: The second one.
    """
    found: list[list[Any]] = [[each.shape[at] for each in given if each.dim() > at] for at in (first, second)]
    one, other = map(_symbols, found)
    if not one or not other:
        return False
    shapes = next(size.node.shape_env for size in found[0] if not isinstance(size, int))
    asked = [shapes.replace(guard.expr).free_symbols for guard in shapes.guards]
    return bool(one & other) or any(each & one and each & other for each in asked)


def _symbols(sizes: Sequence[Any]) -> set[Any]:
    return {symbol for size in sizes if not isinstance(size, int) for symbol in size.node.expr.free_symbols}


def _asked(asked: Any, symbol: Any) -> Sizes | None:
    """Return the sizes of which a guard is true, if they lie between two bounds; None if it is another guard."""
    if asked == True:  # noqa: E712  # sympy's
        return Sizes(0)
    if not getattr(asked, "is_Relational", False):
        return None
    asked = asked if asked.lhs == symbol else asked.reversed
    if asked.lhs != symbol or not asked.rhs.is_Integer:
        return None
    bound = int(asked.rhs)
    match asked.rel_op:
        case "<":
            return Sizes(0, bound - 1)
        case "<=":
            return Sizes(0, bound)
        case ">":
            return Sizes(bound + 1)
        case ">=":
            return Sizes(bound)
    return Sizes(0) if asked.rel_op == "!=" and bound < 2 else None
