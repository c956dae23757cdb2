"""Pictures as PNG files, by the standard library alone. The format: W3C Recommendation PNG, third edition, 2025."""

import struct
import zlib

from torch import Tensor

EDGE = 2  # pixels between two images of a sheet


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
