"""The random numbers that a sample is drawn with: they follow from a key, and those of the process stay as they are.

key "40/epoch 2/sample 17"  ──SHA-256──>  one part each for torch, numpy and `random`
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from typing import Any

import torch


def seed_generators(key: str) -> None:
    """Seeds the default generators of torch (on the CPU), of numpy, if it is there, and of `random`."""
    digest = sha256(key.encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(int.from_bytes(digest[8:16], "little"))
    if (numpy_random := _numpy_random()) is not None:
        numpy_random.seed(int.from_bytes(digest[16:20], "little"))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards, those generators go on as if nothing had been drawn or seeded within."""
    numpy_random = _numpy_random()
    before = torch.default_generator.get_state(), random.getstate()
    numpys = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        if numpy_random is not None:
            numpy_random.set_state(numpys)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, torch computes with one thread, as in a reader process: other numbers add in another order."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _numpy_random() -> Any:
    """numpy imports it when it is first used, which may be in the middle of a sample."""
    return import_module("numpy.random") if "numpy" in sys.modules else None
