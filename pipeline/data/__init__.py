"""(seed, step) -> batch -> microbatches, the same on every machine.

Imports the files of `pipeline` alone. Read `source.py`, then `batch.py`.
"""

from .batch import Batch, Microbatch, cut, rows, split_batch
from .feed import Feed
from .memory import Rows
from .source import Source

__all__ = ["Batch", "Feed", "Microbatch", "Rows", "Source", "cut", "rows", "split_batch"]
