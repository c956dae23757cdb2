"""Which stages recompute, and which offload, so that no worker takes more than its limit: `memory.limit`.

Imports nothing else of the product. Read `load.py`, what the process of a worker takes; `cost.py`, what less memory
costs in time; `option.py`; then `choosing.py`, which takes the cheapest combination that fits, and says for which
workers the limit is tight then. `refusal.py` is for where none does.
"""

from .choosing import cheapest, tight_workers
from .load import Moved, StageLoad, StageOption, Switches, WorkerRoom, added_nanoseconds, moved_bytes
from .refusal import Shortfall, shortfalls

__all__ = [
    "Moved",
    "Shortfall",
    "StageLoad",
    "StageOption",
    "Switches",
    "WorkerRoom",
    "added_nanoseconds",
    "cheapest",
    "moved_bytes",
    "shortfalls",
    "tight_workers",
]
