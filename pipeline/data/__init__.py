"""(seed, step) -> batch -> microbatches, the same on every machine.

May import `process`, and the files of `pipeline` itself. Read `source.py`, then `batch.py`; `loader.py`
and `readers.py` make sources of torch's datasets, in which each sample has random numbers of its own.
"""

from .batch import Batch, Microbatch, Order, Rows, cut, cut_step, joined_outputs, rows, split_batch
from .feed import Feed
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
    "joined_outputs",
    "rows",
    "split_batch",
]
