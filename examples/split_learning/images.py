"""Images of digits in seven segments, by a formula: nothing is downloaded, and each machine can draw the same ones.

 aaa        Image n shows digit n mod 10. From n come, with its own generator: where the digit is (up to a tenth of
f   b       the image to each side), how wide it is (0.35 to 0.5 of the image, twice as high as wide, at most), the
 ggg        colour of its segments (0.6 to 1 in each channel), that of the background (0 to 0.3), and the waves in
e   c       that: 0.05 * sin(2 pi (p x + q y)), p and q from 1 to 6.
 ddd
"""

import math

import torch
from torch import Tensor

SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgecd", "abc", "abcdefg", "abcdfg")  # of digits 0 to 9
THICK = 0.16  # of a segment, in widths of the digit
# Of each segment: from x, to x, in widths of the digit; from y, to y, in heights.
PLACES = {
    "a": (0.0, 1.0, 0.0, THICK / 2),
    "b": (1 - THICK, 1.0, 0.0, 0.5),
    "c": (1 - THICK, 1.0, 0.5, 1.0),
    "d": (0.0, 1.0, 1 - THICK / 2, 1.0),
    "e": (0.0, THICK, 0.5, 1.0),
    "f": (0.0, THICK, 0.0, 0.5),
    "g": (0.0, 1.0, 0.5 - THICK / 4, 0.5 + THICK / 4),
}


def digits_of(numbers: Tensor) -> Tensor:
    """The digits that images of these numbers show: int64 [rows]."""
    return numbers % 10


def draw(numbers: Tensor, size: int) -> Tensor:
    """The images of these numbers, int64 [rows]: float32 [rows, 3, size, size] from 0 to 1."""
    drawn = torch.stack([_drawn(int(number)) for number in numbers]) if len(numbers) else torch.empty(0, 11)
    wide, left, top = 0.35 + 0.15 * drawn[:, 0], 0.2 * drawn[:, 1] - 0.1, 0.2 * drawn[:, 2] - 0.1
    front, back = 0.6 + 0.4 * drawn[:, 3:6], 0.3 * drawn[:, 6:9]
    waves = 1 + 5 * drawn[:, 9:11]
    place = (torch.arange(size) + 0.5) / size
    x = (place - 0.5 - left[:, None]) / wide[:, None] + 0.5  # [rows, size], in widths of the digit
    y = (place - 0.5 - top[:, None]) / (1.8 * wide[:, None]) + 0.5  # likewise, in heights
    lit = _lit(digits_of(numbers), x, y)[:, None]
    waved = torch.sin(2 * math.pi * (waves[:, 0, None, None] * place + waves[:, 1, None, None] * place[:, None]))
    ground = back[:, :, None, None] + 0.05 * waved[:, None]
    return torch.where(lit, front[:, :, None, None], ground).clamp(0, 1)


def _drawn(number: int) -> Tensor:
    """Random numbers of an image: float32 [11], from 0 to 1."""
    return torch.rand(11, generator=torch.Generator().manual_seed(number))


def _lit(digits: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Which pixels are in a segment of the digit: bool [rows, size, size]."""
    lit = torch.zeros(len(digits), y.shape[1], x.shape[1], dtype=torch.bool)
    for name, (x_from, x_to, y_from, y_to) in PLACES.items():
        has = torch.tensor([name in segments for segments in SEGMENTS])[digits]
        columns, rows = (x >= x_from) & (x <= x_to), (y >= y_from) & (y <= y_to)
        lit |= has[:, None, None] & columns[:, None, :] & rows[:, :, None]
    return lit
