"""The choices of an audit, its findings, and its pictures as PNG files.

Pictures are written by the standard library alone. Format: W3C Recommendation PNG, third edition, 2025.
"""

import struct
import zlib
from dataclasses import dataclass

import msgspec
from torch import Tensor

EDGE = 2  # pixels between two images of a sheet


@dataclass(frozen=True, slots=True)
class AuditChoice:
    """`cuts`: the numbers of the layers that would begin the second part (none: all). `steps` of training come first;
    `sampled` rows are then looked at. `noise` is `AddNoise.share`; `clip` the part of the median norm of rows, before
    the training, that `ClipRows` leaves."""

    cuts: tuple[int, ...] = ()
    steps: int = 0
    sampled: int = 512
    defended: bool = False
    noise: float = 1.0
    clip: float = 0.5


class CutAudit(msgspec.Struct, frozen=True):
    """What one cut gives away. `layer` is the last before the cut, `features` the numbers of a row that cross it.

    `dependence` is the distance correlation, `by_chance` that of pairs that do not belong together; `linear` and
    `network` are R^2 of decoders; `by_norm` and `by_direction` areas under the ROC curve, None without classes. `score`
    is what the rows held out are measured by, after the training; None without any. `codec` is that of activations,
    `codec_back` that of gradients.
    """

    cut: int
    layer: str
    features: int
    defence: str
    dependence: float
    by_chance: float
    linear: float
    network: float
    by_norm: float | None
    by_direction: float | None
    score: float | None
    codec: str = "lossless"
    codec_back: str = "lossless"


class AuditReport(msgspec.Struct, frozen=True):
    """Of all cuts; decoders were trained on `trained` rows and measured on `tested`. `measure` names `CutAudit.score`,
    None if no rows are held out."""

    schema: str
    steps: int
    trained: int
    tested: int
    measure: str | None
    cuts: list[CutAudit]


def png(pixels: Tensor) -> bytes:
    """The file of an image, uint8 [height, width, 3] for red, green and blue."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + bytes(line.contiguous().flatten().tolist()) for line in pixels)  # 0: not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, three colours
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    )


def sheet(lines: list[Tensor], size: int = 64) -> Tensor:
    """Images in lines, each [images, 1 or 3 channels, height, width] from 0 to 1, as one: uint8 [height, width, 3],
    white between them. Each image is enlarged by the whole number that brings it nearest to `size` pixels."""
    count, _, height, width = lines[0].shape
    times = max(1, round(size / max(height, width)))
    tall, wide = height * times + EDGE, width * times + EDGE
    found = lines[0].new_full((tall * len(lines) + EDGE, wide * count + EDGE, 3), 255.0)
    for row, images in enumerate(lines):
        for column, image in enumerate(images):
            large = image.repeat_interleave(times, 1).repeat_interleave(times, 2).clamp(0, 1).expand(3, -1, -1)
            top, left = EDGE + row * tall, EDGE + column * wide
            found[top : top + tall - EDGE, left : left + wide - EDGE] = large.permute(1, 2, 0) * 255
    return found.round().byte()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
