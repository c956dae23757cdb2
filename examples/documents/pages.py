"""Pages of invoices, drawn at random from a seed: words, where they stand, and what each of them is.

    Invoice 4711              17.03.2026        number, date
    Bolt          2            3.40             item, other, amount
    Hinge         1           12.00
                  Total       15.40             other, total

What a number is follows from where it stands as much as from itself, which is what LayoutLM looks at.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

LABELS = ("other", "number", "date", "item", "amount", "total")
WORDS = 64  # places for words on a page; those that are empty are masked
ITEMS = ("Bolt", "Hinge", "Lamp", "Cable", "Paint", "Brush", "Screw", "Plank", "Glue", "Tape")
SYMBOLS = ["", *"0123456789.", "Invoice", "Total", "Qty", *ITEMS]

Word = tuple[str, int, int, str]  # text, left, top (0 to 1000), label


class Pages(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """`count` pages; page i is always the same.

    Each is {"input_ids": int64 [64], "bbox": int64 [64, 4], "attention_mask": int64 [64]}, and labels int64 [64], -100
    where there is no word.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        self._count = count
        self._first = first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        words = list(_words(torch.Generator().manual_seed(self._first + index)))[:WORDS]
        empty = WORDS - len(words)
        ids = [_symbol(text) for text, *_ in words] + [0] * empty
        boxes = [[left, top, left + 40, top + 20] for _, left, top, _ in words] + [[0] * 4] * empty
        labels = [LABELS.index(label) for *_, label in words] + [-100] * empty
        page = {
            "input_ids": torch.tensor(ids),
            "bbox": torch.tensor(boxes),
            "attention_mask": torch.tensor([1] * len(words) + [0] * empty),
        }
        return page, torch.tensor(labels)


def _symbol(text: str) -> int:
    """A number is known by its first digit alone: what it is must follow from its place."""
    return SYMBOLS.index(text[0] if text[0].isdigit() else text)


def _words(chance: torch.Generator) -> Iterator[Word]:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=chance))

    left, top = draw(20, 200), draw(20, 120)
    yield "Invoice", left, top, "other"
    yield str(draw(1000, 9999)), left + 120, top, "number"
    yield f"{draw(1, 28):02}.{draw(1, 12):02}.2026", left + draw(400, 600), top, "date"
    for _ in range(draw(2, 9)):
        top += draw(40, 80)
        yield ITEMS[draw(0, len(ITEMS))], left, top, "item"
        yield str(draw(1, 20)), left + 300, top, "other"
        yield f"{draw(1, 99)}.{draw(10, 99)}", left + 600, top, "amount"
    top += draw(60, 90)
    yield "Total", left + 300, top, "other"
    yield f"{draw(1, 999)}.{draw(10, 99)}", left + 600, top, "total"
