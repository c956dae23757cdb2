"""Steps of a run as a trace that Perfetto opens, made step by step: a trace of any length takes the memory of a few.

    run                  events        a checkpoint, a lost worker, its place at work again
                         loss, steps per second, and messages in flight between two stages
    worker 0 on desk     stage 0       F0 F1 ... B0, with arrows that join the actions on a microbatch
                         waits         what the worker waited for between them

Asynchronous steps overlap. A worker begins its steps in order: what begins before its newest step is complete.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

from stageline.pipeline.schedule import ONCE_PER_STEP, Kind

from . import track_events as events
from .drawn_steps import CAUSES
from .track_events import CountTrack, Note, SliceTrack, TrackSlice

Facts = Mapping[str, Any]
_FLOWS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)  # for the result of these, another stage waits
_MOST = 20  # bits of a microbatch's number in the number of its flow
_WHOLE = 10**9  # nanoseconds
_EVENTS = {  # milestones that are no worker's
    "checkpoint": "checkpoint",
    "broker": "restart of the broker",
    "resume": "resumed",
    "pause": "paused",
    "pause-end": "end of the pause",
}


class RunTrace:
    """Trace of a run, as packets.

    Attributes:
        slices: Slices of actions and waits that were added.
    """

    def __init__(
        self,
        run: str,
        workers: Sequence[Facts],
        losses: Mapping[int, float | None],
        milestones: Iterable[Facts],
    ) -> None:
        """Start without steps.

        Args:
            run: Id of the run.
            workers: Workers as the answer `status` has them.
            losses: Losses by step.
            milestones: Milestones as the answer `history` has them.
        """
        self.slices = 0
        self._losses = losses
        self._milestones = sorted(milestones, key=lambda each: float(each["at"]))
        self._numbers = count(2 + len(workers))  # of tracks: the run's process is 1, and then come the workers
        self._labels = {stage: label for each in workers for stage, label in _labels(each)}
        self._new = [events.process(1, f"run {run}"), *(_described(each) for each in workers)]
        self._stages: dict[tuple[int, int], SliceTrack] = {}  # by worker and copy of a stage
        self._waits: dict[int, SliceTrack] = {}
        self._counts: dict[str, CountTrack] = {}
        self._events = self._thread(1, "events")
        self._ended: int | None = None  # the newest step

    def of_step(self, step: Facts) -> Iterator[bytes]:
        """Yield packets: those of the steps before which are complete now. Steps come in order.

        Args:
            step: Step as the answer `timetable` has it.
        """
        begin, end = _ns(step["start"]), _ns(step["start"] + step["seconds"])
        if self._ended is None:
            self._new.append(events.wall_clock(begin))
            self._milestones = [each for each in self._milestones if _ns(each["at"]) >= begin]
        self._add_actions(step)
        self._add_waits(step["idle"])
        self._count_step(step["step"], end)
        yield from self._passed(end)
        yield from self._complete(step, begin)

    def rest(self, *, newest: bool) -> Iterator[bytes]:
        """Yield the packets that are left; `newest` is True if the run has finished no later step."""
        if newest:
            yield from self._passed(None)
        for track in (*self._stages.values(), *self._waits.values()):
            yield from track.written()
        for counts in self._counts.values():
            yield from counts.written()

    def _add_actions(self, step: Facts) -> None:
        flows = _flows(step["actions"])
        parts = {id(each): (flow, each is chain[-1]) for flow, chain in flows.items() for each in chain}
        for each in step["actions"]:
            flow, last = parts.get(id(each), (None, False))
            number = 0 if flow is None else (step["step"] << _MOST | flow) + 1
            once = each["kind"] in ONCE_PER_STEP
            notes: dict[str, Note] = {"step": step["step"]} | ({} if once else {"microbatch": each["microbatch"]})
            name = each["kind"] if once else f"{each['kind']}{each['microbatch']}"
            track = self._stage(each["worker"], each["stage"])
            track.add(TrackSlice(_ns(each["start"]), _ns(each["end"]), name, notes, number, last))
        self.slices += len(step["actions"])
        for chain in flows.values():
            for sent, taken in pairwise(chain):
                self._fly(sent, taken)

    def _fly(self, sent: Facts, taken: Facts) -> None:
        """Count a message from the end of one action to the start of another."""
        hop = [self._label(each["stage"]).partition(".")[0] for each in (sent, taken)]
        if sent["worker"] != taken["worker"]:
            track = self._counter(f"in flight, stage {hop[0]} to {hop[1]}")
            track.change(_ns(sent["end"]), 1)
            track.change(max(_ns(sent["end"]), _ns(taken["start"])), -1)

    def _add_waits(self, idle: Iterable[Facts]) -> None:
        for each in idle:
            if each["cause"] == "loop" or each["end"] <= each["start"]:
                continue
            notes: dict[str, Note] = {"cause": each["cause"], "for": CAUSES.get(each["cause"], ("", "?"))[1]}
            name = each["cause"]
            if each["stage"] is not None:
                notes["stage"] = self._label(each["stage"])
                name = f"{name}, stage {notes['stage']}"
            self._wait(each["worker"]).add(TrackSlice(_ns(each["start"]), _ns(each["end"]), name, notes))
            self.slices += 1

    def _count_step(self, step: int, end: int) -> None:
        if (loss := self._losses.get(step)) is not None:
            self._counter("loss").set(end, loss)
        if self._ended is not None and end > self._ended:
            self._counter("steps per second").set(end, _WHOLE / (end - self._ended))
        self._ended = end if self._ended is None else max(end, self._ended)

    def _passed(self, end: int | None) -> Iterator[bytes]:
        """Yield the packets of the milestones until `end`, or of all."""
        while self._milestones and (end is None or _ns(self._milestones[0]["at"]) <= end):
            each = self._milestones.pop(0)
            what = _EVENTS.get(each["what"]) or f"{each['what']} of worker {each['worker']}"
            notes: dict[str, Note] = {"step": each["step"]} | ({"why": each["why"]} if each["why"] else {})
            self._events.add(TrackSlice(_ns(each["at"]), None, what, notes))
        yield from self._described()
        yield from self._events.written()

    def _described(self) -> Iterator[bytes]:
        """Yield the descriptions of tracks that have none yet."""
        yield from self._new
        self._new.clear()

    def _complete(self, step: Facts, begin: int) -> Iterator[bytes]:
        """Yield the packets of what begins before a worker's part of the step, and of counts before the step."""
        parts: dict[int, int] = defaultdict(lambda: 2**63)
        for each in step["actions"]:
            parts[each["worker"]] = min(parts[each["worker"]], _ns(each["start"]))
        for (worker, _), track in self._stages.items():
            yield from track.written(parts[worker]) if worker in parts else ()
        for worker, track in self._waits.items():
            yield from track.written(parts[worker]) if worker in parts else ()
        for counts in self._counts.values():
            yield from counts.written(begin)

    def _label(self, stage: int) -> str:
        return self._labels.get(stage, str(stage))

    def _stage(self, worker: int, stage: int) -> SliceTrack:
        if (worker, stage) not in self._stages:
            self._stages[worker, stage] = self._thread(2 + worker, f"stage {self._label(stage)}")
        return self._stages[worker, stage]

    def _wait(self, worker: int) -> SliceTrack:
        if worker not in self._waits:
            self._waits[worker] = self._thread(2 + worker, "waits")
        return self._waits[worker]

    def _counter(self, name: str) -> CountTrack:
        if name not in self._counts:
            number = next(self._numbers)
            self._new.append(events.counter(number, 1, name))
            self._counts[name] = CountTrack(number)
        return self._counts[name]

    def _thread(self, process: int, name: str) -> SliceTrack:
        number = next(self._numbers)
        self._new.append(events.thread(number, process, name))
        return SliceTrack(number)


def _flows(actions: Iterable[Facts]) -> dict[int, list[Facts]]:
    """Return by microbatch the actions on it, in order, of which each waits for the one before."""
    chains: dict[int, list[Facts]] = defaultdict(list)
    for each in sorted(actions, key=lambda each: float(each["start"])):
        if each["kind"] in _FLOWS:
            chains[each["microbatch"]].append(each)
    return {microbatch: chain for microbatch, chain in chains.items() if len(chain) > 1}


def _labels(worker: Facts) -> Iterable[tuple[int, str]]:
    stages = worker["stages"]
    return zip(stages, worker.get("labels") or map(str, stages), strict=True)


def _described(worker: Facts) -> bytes:
    place = f" on {worker['host']}, pid {worker['pid']}" if "host" in worker else ""
    return events.process(2 + worker["index"], f"worker {worker['index']}{place}")


def _ns(seconds: float) -> int:
    return round(seconds * _WHOLE)
