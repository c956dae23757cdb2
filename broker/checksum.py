"""The CRC-32 of zlib and gzip, from zlib-ng: ten times the speed of most zlibs (docs/decisions/zlib-ng.md)."""

from zlib_ng.zlib_ng import crc32

__all__ = ["crc32"]
