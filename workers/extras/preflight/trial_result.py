"""Result of a trial: estimates, a transcript of what was computed on the way, or why the plan cannot work.

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
    rows: tuple[int, ...] = ()


class Transcript(msgspec.Struct, frozen=True):
    """`first` and `second`: what two calls of batch(0) gave. `computed`: what one microbatch gave, in order. The data
    are a plan's source, or its `dataset`."""

    first: tuple[LeafRecord, ...]
    second: tuple[LeafRecord, ...]
    held_out: tuple[LeafRecord, ...]
    computed: tuple[LeafRecord, ...]
    dataset: bool = False

    @property
    def key(self) -> str:
        """Key of the plan that names the data."""
        return "data.dataset" if self.dataset else "data.source"

    @property
    def advice(self) -> str:
        return _DATASET if self.dataset else _SOURCE


def repeats(one: Transcript) -> str:
    """Return how the second call of batch(0) differs from the first, and the way out; "" if it does not."""
    found = _difference(one.first, one.second)
    again = "batch(0) gave other values when it was called again"
    return f"{one.key}: {again}: {found}. {one.advice}" if found else ""


def agrees(one: Transcript, other: Transcript) -> str:
    """Return how two processes differ, and the way out; "" if they do not."""
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
    """Return how the data of a resumed run differ from those that it began with; "" if they do not."""
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
    """Estimate of a stage or a replica, called `label` by people. Of its `parameters`, `trained` are; `in_flight`
    microbatches are held at most; `bytes` says what takes how much, `total` all of it. What its tapped layers return
    for a microbatch is `tapped` bytes. `working` bytes come on top for a moment: what its operations make and free
    again, and what backward computes again. Of what is stashed, `offloaded` bytes are in files most of the time; of
    weights, gradients, averages and the optimizer's state, `in_files` bytes are memory of files. How much could be in
    files at most is in `movable`, by what it is. A microbatch takes `halfway` bytes more between the halves of its
    backward; None if the stage cannot split it.

    `group` processes compute it together. With more than one, all bytes are those of one process that has the whole
    stage: what a process of the group takes is not known."""

    stage: int
    worker: int
    layers: tuple[str, ...]
    parameters: int
    trained: int
    in_flight: int
    bytes: dict[str, int]
    total: int
    tapped: int = 0
    label: str = ""
    working: int = 0
    offloaded: int = 0
    in_files: int = 0
    group: int = 1
    halfway: int | None = 0
    movable: dict[str, int] = {}

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
    """Estimate of one queue, of messages as its `codec` writes them. Of a message, its producer has received
    `passed_on` bytes that it only passes on, such as a skip over its stage; `retained` bytes are those that the
    producer keeps until they are trimmed: of one step, or, with recovery, of all steps from one complete checkpoint
    to the next."""

    queue: str
    producer: int  # a stage
    consumer: int
    message: int  # bytes
    passed_on: int  # bytes
    in_flight: int  # messages put and not yet taken, at most
    retained: int  # bytes
    ends: str = ""  # the stages, for people: "1.0 to 2"
    codec: str = "lossless"


class WorkerEstimate(msgspec.Struct, frozen=True):
    """Memory that one worker's process takes at most beyond the imports of its program: `bytes` by purpose, `total`
    all of it; or the model as a whole, while it is loaded, if that is more. `stages` and `working` of a worker on
    another device are there, the others in its host's memory. It may take `limit`, if the plan says so. If that is
    `tight`, it gives back what it frees, and waits for its snapshots: then `bytes` are those of a worker that does.
    From a limit of `ample` bytes on it need not."""

    worker: int
    bytes: dict[str, int]
    total: int
    limit: int | None = None
    tight: bool = False
    ample: int | None = None

    @property
    def limits(self) -> tuple[int, bool] | None:
        """`limit` and `tight`; None without a limit."""
        return None if self.limit is None else (self.limit, self.tight)


class StageMemory(msgspec.Struct, frozen=True):
    """Choice for a limit: what `stage` recomputes and offloads; its part of a step takes longer by that `share`."""

    stage: int
    recompute: str
    offload: tuple[str, ...]
    share: float

    @property
    def acts(self) -> bool:
        """True if it recomputes or offloads anything."""
        return self.recompute != "nothing" or bool(self.offload)


class CacheEstimate(msgspec.Struct, frozen=True):
    """Rows that `stage`, the first that trains, keeps on the disk of its `worker` of the steps before
    `replayed_from`: `row_bytes` for each sample. The stages before it do not run in later steps."""

    stage: int
    worker: int
    replayed_from: int
    samples: int
    row_bytes: int
    bytes: int


class ScheduleEstimate(msgspec.Struct, frozen=True):
    """A schedule that a run may choose: how many microbatches each stage has `in_flight` at most, the bytes of the
    worker that takes most, and the `reason` why it cannot be taken; "" if it can. `halves`: it splits backwards."""

    name: str
    in_flight: tuple[int, ...]
    bytes: int
    reason: str = ""
    halves: bool = False


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Schema plan/1. `idle` is each worker's share of a step, if a backward takes twice a forward, messages no time."""

    schema: str = "plan/1"
    digest: str
    plan: dict[str, object]
    origins: dict[str, str]
    warnings: tuple[str, ...]
    steps: int
    stages: list[StageEstimate]
    queues: list[QueueEstimate]
    workers: list[WorkerEstimate]
    idle: tuple[float, ...]
    seconds: tuple[float, ...] = ()  # of a microbatch, by stage, if where to cut was measured
    prefix_cache: CacheEstimate | None = None
    replicas: list[StageEstimate] = []  # of stages, besides the first of each
    schedules: tuple[ScheduleEstimate, ...] = ()  # of a run that chooses its schedule
    memory: tuple[StageMemory, ...] = ()  # of a plan with a limit: what was chosen for it


class TriedPlan(msgspec.Struct, frozen=True, tag="tried"):
    """Result of training one microbatch. `length` is the run's; stages below `first_trainable` run forward only.
    `layouts` are the stages', if they were asked for; `cut` has their first layers, if that was measured, and
    `memory` the choice for a limit, by keys of the plan."""

    estimate: Estimate
    length: RunLength
    first_trainable: int
    transcript: Transcript
    layouts: tuple[StageLayout, ...] = ()
    cut: tuple[int, ...] | None = None
    memory: dict[str, object] = {}


class MeasuredCut(msgspec.Struct, frozen=True, tag="cut"):
    """Cut of a plan that has it measured, and the seconds that each stage takes for a microbatch."""

    cut: tuple[int, ...]
    seconds: tuple[float, ...]


class ChosenMemory(msgspec.Struct, frozen=True, tag="memory"):
    """Choice for a plan with a limit: `keys` of the plan with their values; the memory of each of the `stages`,
    chosen or not; and why some ways of recomputing were `left_out`."""

    keys: dict[str, object]
    stages: tuple[StageMemory, ...]
    left_out: tuple[str, ...] = ()


class MeasuredLayers(msgspec.Struct, frozen=True, tag="layers"):
    """Costs of the layers with the plan's microbatches, of which a step has so many."""

    names: tuple[str, ...]
    costs: tuple[LayerCost, ...]
    microbatches: int


class TrialRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The plan cannot work: the error of that `kind`, and its texts, of which a refused plan has several."""

    kind: str
    texts: tuple[str, ...]

    @classmethod
    def of(cls, error: StagelineError) -> "TrialRefusal":
        texts = map(str, error.errors) if isinstance(error, PlanRefused) else [str(error)]
        return cls(type(error).__name__, tuple(texts))

    @property
    def error(self) -> StagelineError:
        """Return the error, to be raised."""
        match self.kind:
            case PlanRefused.__name__:
                return PlanRefused([PlanError("", text) for text in self.texts])
            case DataError.__name__:
                return DataError("\n".join(self.texts))
            case _:
                return ModelRefused("\n".join(self.texts))


Outcome = TriedPlan | MeasuredCut | ChosenMemory | MeasuredLayers


class TrialLog:
    """The log of a trial that writes `mark` before its own lines. `printed` is called with what the user's code prints.

    `read(offset)` gives the bytes that the log has from there on.
    """

    def __init__(self, mark: str, read: Callable[[int], bytes], printed: Callable[[bytes], None]) -> None:
        self.doing = "its start"
        self.result: Outcome | TrialRefusal | None = None
        self._begin = f"{mark} ".encode()
        self._read = read
        self._printed = printed
        self._offset = 0
        self._rest = b""  # what was read and may be the beginning of one of the trial's lines

    def follow(self) -> None:
        """Takes note of what has been added; after the result, nothing is of interest."""
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
            if self._note(line.removeprefix(self._begin)):
                return
        self._print(self._printable())

    def _printable(self) -> int:
        """Return how many bytes of the rest cannot be part of one of the trial's lines."""
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
