"""(seed, step) -> batch -> microbatches, the same on every machine.

Imports the files of `pipeline` alone. Read `source.py`, then `batch.py`; `datasets` makes sources of torch's datasets.
"""

from .batch import Batch, Microbatch, cut, cut_step, rows, split_batch
from .feed import Feed
from .memory import Order, Rows
from .source import NumberedSource, Numbering, Source

__all__ = [
    "Batch",
    "Feed",
    "Microbatch",
    "NumberedSource",
    "Numbering",
    "Order",
    "Rows",
    "Source",
    "cut",
    "cut_step",
    "rows",
    "split_batch",
]
