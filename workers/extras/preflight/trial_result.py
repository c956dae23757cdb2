"""Result of a trial: estimates, a transcript of the values computed on the way, or why the plan cannot work.

It crosses as JSON from the process of the trial to the one that started it, in the log of what the user's code prints.
Reading it needs no torch.

A transcript has checksums. Two processes try the same plan, and each asks its data source twice for the same batch:

    process A    batch(0)  ... one microbatch ...  batch(0)
                    │ must agree                      │ with the first: stages draw from sources of their own
    process B    batch(0)  ... one microbatch ...  batch(0)
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

from stageline.broker.control.records import RunLength
from stageline.pipeline.errors import DataError, ModelRefused, StagelineError
from stageline.pipeline.model.layer_costs import LayerCost
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.plan import PlanError, PlanRefused

ROWS = 4096  # of a tensor that have a checksum of their own; the others have one in common

_GO_ON = "data.check = false goes on all the same"
_DATA = (
    "The first and the last stage each draw from a source of their own, and so does a replacement: inputs would be "
    "trained with the targets of other rows. "
)
_SOURCE = (
    f"{_DATA}Draw with a generator that is seeded with the `seed` that the source is given, or with the seed and the "
    f"step, and sort what comes from a set or a folder; {_GO_ON}."
)
_DATASET = (
    f"{_DATA}Each sample is drawn with the default generators of torch, numpy and `random` seeded: draw with those, or "
    f"seed a generator of your own from them in __getitem__, and sort what comes from a set or a folder; {_GO_ON}."
)
_COMPUTED = (
    "Something in the model, the loss or the optimizer depends on more than the seed: a replacement of a lost worker "
    "would compute other bits. torch.use_deterministic_algorithms(True) in model.py names operations that do; numbers "
    "that are not torch's need a generator that is seeded, and a set has another order in each process "
    f"(PYTHONHASHSEED); {_GO_ON}."
)
DOING, RESULT = "doing", "result"  # the words of a trial's own lines
_LASTING = {"weights": ("weights", "gradients", "averages"), "optimizer": ("optimizer",)}  # what is in files with it


class LeafRecord(msgspec.Struct, frozen=True):
    """Record of one leaf of a tree: its description ("float32 [6, 4]", or a plain value), and its checksums."""

    name: str
    what: str
    whole: int = 0
    rows: tuple[int, ...] = ()  # checksums of the first `ROWS` rows, if asked for


class Transcript(msgspec.Struct, frozen=True):
    """Transcript of a trial: the data that two calls of batch(0) gave, the rows held out, and the values computed."""

    first: tuple[LeafRecord, ...]  # first call of batch(0)
    second: tuple[LeafRecord, ...]  # second call of batch(0)
    held_out: tuple[LeafRecord, ...]
    computed: tuple[LeafRecord, ...]  # results of one microbatch, in order
    dataset: bool = False  # the data are the plan's `dataset`, not its source

    @property
    def key(self) -> str:
        """Name of the plan's key that names the data."""
        return "data.dataset" if self.dataset else "data.source"

    @property
    def advice(self) -> str:
        """Advice for people whose data differ from call to call."""
        return _DATASET if self.dataset else _SOURCE


def repeats(one: Transcript) -> str:
    """Return how the second call of batch(0) differs from the first, and the way out; "" if they agree."""
    found = _difference(one.first, one.second)
    again = "batch(0) gave other values when it was called again"
    return f"{one.key}: {again}: {found}. {one.advice}" if found else ""


def agrees(one: Transcript, other: Transcript) -> str:
    """Return how the transcripts of two processes differ, and the way out; "" if they agree."""
    for call, ours, theirs in (("batch(0)", one.first, other.first), ("held_out()", one.held_out, other.held_out)):
        if found := _difference(ours, theirs):
            return f"{one.key}: {call} gave other values in another process: {found}. {one.advice}"
    found = _difference(one.computed, other.computed)
    return f"one microbatch gave other bits in another process, at first in {found}. {_COMPUTED}" if found else ""


class FirstBatches(msgspec.Struct, frozen=True):
    """Records of the data when a run began: batch(0), and a batch of the rows held out."""

    first: tuple[LeafRecord, ...]
    held_out: tuple[LeafRecord, ...]


def goes_on(begun: FirstBatches, now: Transcript) -> str:
    """Return how the data of a resumed run differ from the data that it began with; "" if they agree."""
    for call, then, here in (("batch(0)", begun.first, now.first), ("held_out()", begun.held_out, now.held_out)):
        if found := _difference(then, here):
            return (
                f"{now.key}: {call} gives other values than when the run began: {found}. Its weights were trained with "
                f"those. Put the data back as they were, or begin a new run; {_GO_ON}."
            )
    return ""


def _difference(ours: Sequence[LeafRecord], theirs: Sequence[LeafRecord]) -> str:
    return next(_differences(ours, theirs), "")


def _differences(ours: Sequence[LeafRecord], theirs: Sequence[LeafRecord]) -> Iterator[str]:
    for here, there in zip_longest(ours, theirs):
        if here is None or there is None:
            yield f"{(here or there).name} is there in only one of them"
        elif here.name != there.name:
            yield f"{here.name} is {there.name} there"
        elif here.what != there.what:
            yield f"{here.name} ({here.what}, then {there.what})"
        elif here != there:
            yield f"{_row(here, there)}{here.name}"


def _row(here: LeafRecord, there: LeafRecord) -> str:
    if not here.rows:
        return ""
    numbers = (number for number, pair in enumerate(zip(here.rows, there.rows, strict=True)) if pair[0] != pair[1])
    return f"row {next(numbers, f'{ROWS} or a later one')} of "


class StageEstimate(msgspec.Struct, frozen=True):
    """Estimate of the memory of a stage or a replica.

    `working` bytes come on top of `total` for a moment: operations make them and free them again, backward recomputes
    them. `group` processes compute the stage together. With more than one, all bytes are those of a single process that
    has the whole stage: the bytes of a process of the group are not known.
    """

    stage: int
    worker: int
    layers: tuple[str, ...]
    parameters: int  # numbers of all parameters
    trained: int  # those of them that are trained
    in_flight: int  # microbatches that are held at most
    bytes: dict[str, int]  # by purpose
    total: int  # sum of `bytes`
    tapped: int = 0  # bytes that its tapped layers return for a microbatch
    label: str = ""  # name for people
    working: int = 0
    offloaded: int = 0  # bytes of stashed activations that are in files most of the time
    in_files: int = 0  # bytes of weights, gradients, averages and optimizer state in memory of files
    group: int = 1
    halfway: int | None = 0  # bytes of a microbatch between the halves of its backward; None: it cannot be split
    movable: dict[str, int] = {}  # bytes that could be in files at most, by purpose

    def with_files(self, wanted: Collection[str]) -> "StageEstimate":
        """Return the estimate with the parts `wanted`, by their names in `memory.offload`, in files."""
        lasting = [part for each in wanted for part in _LASTING.get(each, ())]
        return replace(
            self,
            offloaded=self.movable["activations"] if "activations" in wanted else 0,
            in_files=sum(self.movable[part] for part in lasting),
        )

    def with_in_flight(self, count: int) -> "StageEstimate":
        """Return the estimate with `count` microbatches in flight at most."""
        each = max(1, self.in_flight)
        held = {**self.bytes, "activations": self.bytes["activations"] // each * count}
        movable = {**self.movable, "activations": self.movable["activations"] // each * count}
        return replace(self, in_flight=count, bytes=held, total=sum(held.values()), movable=movable)


class QueueEstimate(msgspec.Struct, frozen=True):
    """Estimate of one queue, whose messages are written by its `codec`."""

    queue: str
    producer: int  # a stage
    consumer: int
    message: int  # bytes
    passed_on: int  # bytes of a message that its producer only passes on, such as a skip over its stage
    in_flight: int  # messages put and not yet taken, at most
    retained: int  # bytes kept until trimmed: of a step; with recovery, of all from one complete checkpoint to the next
    ends: str = ""  # the stages, for people: "1.0 to 2"
    codec: str = "lossless"


class WorkerEstimate(msgspec.Struct, frozen=True):
    """Estimate of the memory that one worker's process takes at most, beyond the imports of its program.

    On another device than the CPU, `stages` and `working` are that device's memory, the other parts its host's. A
    worker whose limit is `tight` returns freed memory and waits for its snapshots; then `bytes` are those of such a
    worker.
    """

    worker: int
    bytes: dict[str, int]  # by purpose
    total: int  # sum of `bytes`; or the model as a whole, while it is loaded, if that is more
    limit: int | None = None  # bytes that the plan allows
    tight: bool = False
    ample: int | None = None  # least limit in bytes that is not tight

    @property
    def limits(self) -> tuple[int, bool] | None:
        """Pair of `limit` and `tight`; None without a limit."""
        return None if self.limit is None else (self.limit, self.tight)


class StageMemory(msgspec.Struct, frozen=True):
    """Choice for a limit of memory: the parts of `stage` that are recomputed or offloaded, and the time it costs."""

    stage: int
    recompute: str
    offload: tuple[str, ...]
    share: float  # by this share, the stage's part of a step takes longer

    @property
    def acts(self) -> bool:
        """True if the stage recomputes or offloads anything."""
        return self.recompute != "nothing" or bool(self.offload)


class CacheEstimate(msgspec.Struct, frozen=True):
    """Estimate of the rows that `stage`, the first that trains, keeps on the disk of its `worker`.

    It keeps rows of the steps before `replayed_from`. From that step on, the stages before it do not run.
    """

    stage: int
    worker: int
    replayed_from: int
    samples: int
    row_bytes: int  # for each sample
    bytes: int


class ScheduleEstimate(msgspec.Struct, frozen=True):
    """Estimate of a schedule that a run may choose."""

    name: str
    in_flight: tuple[int, ...]  # microbatches of each stage at most
    bytes: int  # of the worker that takes most
    reason: str = ""  # why it cannot be taken; "" if it can
    halves: bool = False  # it splits backwards


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimate of a plan, schema plan/1."""

    schema: str = "plan/1"
    digest: str
    plan: dict[str, Any]  # keys with their values
    origins: dict[str, str]
    warnings: tuple[str, ...]
    steps: int
    stages: list[StageEstimate]
    queues: list[QueueEstimate]
    workers: list[WorkerEstimate]
    idle: tuple[float, ...]  # each worker's share of a step, if a backward takes twice a forward and messages no time
    seconds: tuple[float, ...] = ()  # of a microbatch, by stage, if where to cut was measured
    prefix_cache: CacheEstimate | None = None
    replicas: list[StageEstimate] = []  # of stages, besides the first of each
    schedules: tuple[ScheduleEstimate, ...] = ()  # of a run that chooses its schedule
    memory: tuple[StageMemory, ...] = ()  # of a plan with a limit: what was chosen for it


class TriedPlan(msgspec.Struct, frozen=True, tag="tried"):
    """Result of training one microbatch of a plan."""

    estimate: Estimate
    length: RunLength  # of the run
    first_trainable: int  # stages below it run forward only
    transcript: Transcript
    layouts: tuple[StageLayout, ...] = ()  # of the stages, if they were asked for
    cut: tuple[int, ...] | None = None  # first layers of the stages, if the cut was measured
    memory: dict[str, object] = {}  # choice for a limit, by keys of the plan


class MeasuredCut(msgspec.Struct, frozen=True, tag="cut"):
    """Cut of a plan that has it measured, and the seconds that each stage takes for a microbatch."""

    cut: tuple[int, ...]
    seconds: tuple[float, ...]


class ChosenMemory(msgspec.Struct, frozen=True, tag="memory"):
    """Choice of recomputing and offloading for a plan with a limit of memory."""

    keys: dict[str, object]  # of the plan, with their values
    stages: tuple[StageMemory, ...]  # all stages, chosen or not
    left_out: tuple[str, ...] = ()  # why some ways of recomputing were not considered


class MeasuredLayers(msgspec.Struct, frozen=True, tag="layers"):
    """Costs of the layers with the plan's microbatches, of which a step has `microbatches`."""

    names: tuple[str, ...]
    costs: tuple[LayerCost, ...]
    microbatches: int


class TrialRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Refusal of a plan that cannot work: name of the error's class, and its texts (several for `PlanRefused`)."""

    kind: str
    texts: tuple[str, ...]

    @classmethod
    def of(cls, error: StagelineError) -> "TrialRefusal":
        """Return the refusal for `error`."""
        texts = map(str, error.errors) if isinstance(error, PlanRefused) else [str(error)]
        return cls(type(error).__name__, tuple(texts))

    @property
    def error(self) -> StagelineError:
        """The error, to be raised."""
        match self.kind:
            case PlanRefused.__name__:
                return PlanRefused([PlanError("", text) for text in self.texts])
            case DataError.__name__:
                return DataError("\n".join(self.texts))
            case _:
                return ModelRefused("\n".join(self.texts))


Outcome = TriedPlan | MeasuredCut | ChosenMemory | MeasuredLayers


class TrialLog:
    """Reader of the log of a trial, whose own lines begin with a mark."""

    def __init__(self, mark: str, read: Callable[[int], bytes], printed: Callable[[bytes], None]) -> None:
        """Create a reader.

        Args:
            mark: Word with which the trial's own lines begin.
            read: Returns the bytes of the log from a given offset on.
            printed: Called with the bytes that the user's code prints.
        """
        self.doing = "its start"
        self.result: Outcome | TrialRefusal | None = None
        self._begin = f"{mark} ".encode()
        self._read = read
        self._printed = printed
        self._offset = 0
        self._rest = b""  # what was read and may be the beginning of one of the trial's lines

    def follow(self) -> None:
        """Read lines that were added, and update `doing` and `result`. After the result, further lines are ignored."""
        if self.result is not None:
            return
        new = self._read(self._offset)
        self._offset += len(new)
        self._rest += new
        while (start := self._rest.find(self._begin)) >= 0:
            end = self._rest.find(b"\n", start + len(self._begin))
            if end < 0:
                break
            self._print(start)
            line, self._rest = self._rest[: end - start], self._rest[end - start + 1 :]
            if self._note(line[len(self._begin) :]):
                return
        self._print(self._printable())

    def _printable(self) -> int:
        """Return how many bytes of the rest cannot be part of one of the trial's own lines."""
        if (start := self._rest.find(self._begin)) >= 0:
            return start
        tails = range(max(0, len(self._rest) - len(self._begin)), len(self._rest))
        return next((place for place in tails if self._begin.startswith(self._rest[place:])), len(self._rest))

    def _print(self, count: int) -> None:
        if count:
            self._printed(self._rest[:count])
        self._rest = self._rest[count:]

    def _note(self, line: bytes) -> bool:
        """Take note of a line. Return True if it is the result."""
        word, _, content = line.partition(b" ")
        if word == RESULT.encode():
            with suppress(msgspec.MsgspecError):  # then there is none
                self.result = msgspec.json.decode(content, type=Outcome | TrialRefusal)
            return True
        self.doing = content.decode(errors="replace")
        return False
