"""(seed, step) -> batch -> microbatches, the same on every machine.

Imports the files of `pipeline` alone. Read `source.py`, then `batch.py`; for datasets `loader.py`, then `samples.py`.
"""

from .batch import Batch, Microbatch, cut, cut_step, rows, split_batch
from .feed import Feed
from .loader import Loader
from .memory import Rows
from .numbering import Numbering
from .order import Order
from .source import NumberedSource, Source
from .stream import StreamLoader

__all__ = [
    "Batch",
    "Feed",
    "Loader",
    "Microbatch",
    "NumberedSource",
    "Numbering",
    "Order",
    "Rows",
    "Source",
    "StreamLoader",
    "cut",
    "cut_step",
    "rows",
    "split_batch",
]
