"""A process that frees large memory between small, and says how much of it the system has not got back."""

import sys
from pathlib import Path

from stageline.workers.disk.memory import give_back_memory

PIECES, SIZE = 50, 1 << 21


def main(gives_back: str) -> None:
    """Prints the bytes that it still has of those that it has freed."""
    bytearray(30 << 20)  # freed at once: glibc keeps memory of up to this size from here on
    if gives_back == "yes":
        give_back_memory()
    before = _anonymous()
    pieces = [(bytearray(SIZE), bytearray(5000)) for _ in range(PIECES)]
    small = [each for _, each in pieces]
    del pieces
    print(_anonymous() - before - sum(map(len, small)))


def _anonymous() -> int:
    """Of this process, in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main(sys.argv[1])
