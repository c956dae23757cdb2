"""Schedules of torch.distributed.pipelining as the files that torch writes of them."""

from pathlib import Path
from typing import Any

TORCHS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV", "ScheduleInterleaved1F1B")
_TURNS = 2  # stages of a worker


def dumped(name: str, workers: int, microbatches: int, file: Path) -> Path:
    """`file`, with the compute-only lists of torch's class `name`, of two stages for each worker."""
    from torch.distributed.pipelining import schedules  # which takes seconds to load

    theirs: Any = object.__new__(getattr(schedules, name))
    theirs.pp_group_size, theirs.n_local_stages = workers, _TURNS
    theirs.num_stages, theirs._n_microbatches = _TURNS * workers, microbatches
    theirs.microbatches_per_round = microbatches // max(1, microbatches // workers)
    theirs.pipeline_order = {}
    for worker in range(workers):
        theirs._stages = range(worker, _TURNS * workers, workers)
        theirs.pipeline_order[worker] = theirs._calculate_single_rank_operations(worker)
    theirs._dump_csv(str(file), format="compute_only")
    return file
