"""Where nothing fits: which worker takes too much, what comes closest, and how much that would need."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .choosing import cheapest, sharing
from .load import Options, StageLoad, StageOption, Switches, WorkerRoom, limit_for, reserve_of

# What takes most, and what then helps besides a higher limit.
_PARTS = {
    "stages": ("what its stages hold", "more stages, smaller microbatches, or a schedule with fewer in flight"),
    "working": (
        "what operations, or a snapshot, take for a moment",
        "smaller microbatches, or more stages",
    ),
    "messages": ("messages", "a smaller recovery.snapshot_every, queues.retain_bytes, or smaller microbatches"),
    "snapshots": ("copies for snapshots", "more stages"),
    "offload": ("activations on their way to files and back", "more stages"),
    "model": ("the model as a whole while it is made", "model.weights, from which a worker reads its own stages alone"),
}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """`worker` takes `foreseen` bytes at least, with these `switches` of its `stages`, most of them for `part`; of its
    limit, `reserve` bytes are not to be foreseen."""

    worker: int
    stages: tuple[int, ...]
    switches: tuple[Switches, ...]
    foreseen: int
    part: str
    reserve: int

    def __str__(self) -> str:
        by_stage = zip(self.stages, self.switches, strict=True)
        closest = "; ".join(f"stage {stage} with {switches}" for stage, switches in by_stage)
        what, way_out = _PARTS[self.part]
        return (
            f"worker {self.worker} would take {self.foreseen} bytes, most of them for {what}, with the closest choice: "
            f"{closest}; and {self.reserve} bytes of this limit are kept free for what is not estimated (an eighth of "
            f'it, and 16 MiB at least). Use "{-(-limit_for(self.foreseen) // 2**20)}MiB" or more, or {way_out}'
        )


def shortfalls(stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> Iterator[Shortfall]:
    """One of each group of stages and workers that no combination of options fits."""
    for group in sharing(stages):
        options = [stages[stage] for stage in group]
        if cheapest(options, workers) is None:
            yield _closest(group, [[replace(each, nanoseconds=0) for each in own] for own in options], workers)


def _closest(group: Sequence[int], options: Sequence[Options], workers: Sequence[WorkerRoom]) -> Shortfall:
    """By the least that would have to be added to the limit of each worker: without its last byte, one is too small."""
    low, high = 0, 1
    while cheapest(options, _with_more(workers, high)) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cheapest(options, _with_more(workers, middle)) is None else (low, middle)
    chosen = cheapest(options, _with_more(workers, high)) or ()
    short = _with_more(workers, high - 1)
    loads = {worker: load for worker, load in _loads(chosen).items() if not short[worker].fits(load)}
    worker, load = next(iter(loads.items()))
    room, parts = workers[worker], workers[worker].parts(load)
    own = [place for place, each in enumerate(chosen) if worker in each.loads]
    return Shortfall(
        worker,
        tuple(group[place] for place in own),
        tuple(chosen[place].switches for place in own),
        room.peak(load),
        "model" if room.model > sum(parts.values()) else max(parts, key=lambda name: parts[name]),
        reserve_of(room.limit or 0),
    )


def _with_more(workers: Sequence[WorkerRoom], more: int) -> list[WorkerRoom]:
    return [each if each.limit is None else replace(each, limit=each.limit + more) for each in workers]


def _loads(chosen: Iterable[StageOption]) -> dict[int, StageLoad]:
    """Return what each worker takes with these."""
    found: dict[int, StageLoad] = {}
    for option in chosen:
        for worker, load in option.loads.items():
            found[worker] = load.beside(found.get(worker, StageLoad()))
    return found
