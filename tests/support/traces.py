"""Traces read back by the protobuf classes of Perfetto's own package, and checked."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """A slice, or an instant, whose end is its start. Times are in nanoseconds since the epoch."""

    track: str
    name: str
    start: int
    end: int
    notes: dict[str, object]
    flows: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()  # flows


@dataclass(slots=True)
class ReadTrace:
    """A trace. A track is named after its process and itself: "worker 0/stage 0"."""

    slices: list[ReadSlice] = field(default_factory=list)
    instants: list[ReadSlice] = field(default_factory=list)
    counts: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))


def read_trace(packets: bytes | Iterable[bytes]) -> ReadTrace:
    """The trace; an error if a track, a name or an end is missing, slices overlap, or times fall within a sequence."""
    trace, read = Trace(), ReadTrace()
    trace.ParseFromString(packets if isinstance(packets, bytes) else b"".join(packets))
    tracks = _tracks(trace)
    times: dict[int, int] = defaultdict(int)
    names: dict[int, dict[tuple[str, int], str]] = defaultdict(dict)
    open_slices: dict[int, tuple[int, TrackEvent]] = {}
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        sequence, event = packet.trusted_packet_sequence_id, packet.track_event
        assert packet.timestamp >= times[sequence], "times fall"
        times[sequence] = packet.timestamp
        _learn(packet, names[sequence])
        track = tracks[event.track_uuid]
        match event.type:
            case TrackEvent.TYPE_COUNTER:
                read.counts[track].append((packet.timestamp, event.double_counter_value))
            case TrackEvent.TYPE_INSTANT:
                read.instants.append(_slice(track, names[sequence], event, packet.timestamp, packet.timestamp))
            case TrackEvent.TYPE_SLICE_BEGIN:
                assert event.track_uuid not in open_slices, f"slices of {track} overlap"
                open_slices[event.track_uuid] = packet.timestamp, event
            case TrackEvent.TYPE_SLICE_END:
                start, begun = open_slices.pop(event.track_uuid)
                assert start < packet.timestamp
                read.slices.append(_slice(track, names[sequence], begun, start, packet.timestamp))
            case other:
                raise AssertionError(f"unexpected event {other}")
    assert not open_slices, "slices without an end"
    _check_flows(read)
    return read


def _tracks(trace: Trace) -> dict[int, str]:
    found = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
    processes = {each.uuid: each.process.process_name for each in found if each.HasField("process")}
    named = {
        each.uuid: f"{processes[each.parent_uuid]}/{each.thread.thread_name or each.name}"
        for each in found
        if not each.HasField("process")
    }
    assert len(named) + len(processes) == len(found), "two tracks have one number"
    assert len({*named.values()}) == len(named), "two tracks have one name"
    return named


def _learn(packet: TracePacket, names: dict[tuple[str, int], str]) -> None:
    if packet.sequence_flags & TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
        names.clear()
    for each in packet.interned_data.event_names:
        names["event", each.iid] = each.name
    for each in packet.interned_data.debug_annotation_names:
        names["note", each.iid] = each.name


def _slice(track: str, names: dict[tuple[str, int], str], event: TrackEvent, start: int, end: int) -> ReadSlice:
    notes = {
        names["note", each.name_iid]: getattr(each, str(each.WhichOneof("value"))) for each in event.debug_annotations
    }
    name, flows = names["event", event.name_iid], tuple(event.flow_ids)
    return ReadSlice(track, name, start, end, notes, flows, tuple(event.terminating_flow_ids))


def _check_flows(read: ReadTrace) -> None:
    begun: dict[int, list[int]] = defaultdict(list)
    ended: dict[int, list[int]] = defaultdict(list)
    for each in read.slices:
        for flow in each.flows:
            begun[flow].append(each.start)
        for flow in each.ends:
            ended[flow].append(each.start)
    assert begun.keys() == ended.keys(), "a flow has no begin, or no end"
    for flow, (end, *more) in ended.items():
        assert not more, "a flow ends twice"
        assert max(begun[flow]) <= end, "a flow goes on after its end"
