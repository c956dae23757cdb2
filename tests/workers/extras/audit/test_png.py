"""Pictures."""

import struct
import zlib

import torch

from stageline.workers.extras.audit.audit import png, sheet


def test_a_file_has_the_pixels_in_lines_without_a_filter_and_right_checksums() -> None:
    pixels = torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3)
    file = png(pixels)
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(file):
        (length,), kind = struct.unpack_from(">I", file, at), file[at + 4 : at + 8]
        content = file[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", file, at + 8 + length) == (zlib.crc32(kind + content),)
        chunks[kind], at = content, at + 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert chunks[b"IHDR"] == struct.pack(">IIBBBBB", 4, 2, 8, 2, 0, 0, 0)
    assert zlib.decompress(chunks[b"IDAT"]) == b"\0" + bytes(range(12)) + b"\0" + bytes(range(12, 24))


def test_a_sheet_has_each_image_in_its_place_enlarged_and_white_between() -> None:
    black, grey = torch.zeros(2, 1, 8, 8), torch.full((2, 1, 8, 8), 0.5)
    found = sheet([black, grey])
    assert found.shape == (2 * 66 + 2, 2 * 66 + 2, 3)
    assert found[2:66, 2:66].max() == 0
    assert (found[68:132, 68:132] == 128).all()
    assert (found[:2] == 255).all()
    assert sheet([torch.rand(1, 3, 224, 224)]).shape == (228, 228, 3)
