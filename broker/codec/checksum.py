"""The CRC-32 of zlib and gzip, from zlib-ng: ten times the speed of most zlibs (docs/decisions/zlib-ng.md)."""

from zlib_ng.zlib_ng import crc32

__all__ = ["checked", "crc32", "sealed"]


def sealed(body: bytes) -> bytes:
    """`body` after its CRC-32, u32 little-endian."""
    return crc32(body).to_bytes(4, "little") + body


def checked(frame: bytes) -> bytes | None:
    """The body of a sealed frame; None if it is damaged."""
    body = frame[4:]
    return body if crc32(body) == int.from_bytes(frame[:4], "little") and len(frame) >= 4 else None
