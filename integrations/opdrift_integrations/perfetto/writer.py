"""Timelines in Perfetto's own format: protobuf, with exact nanoseconds and each text once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from opdrift.export.output import Counted
from opdrift.export.tracks import Facts, Instant, Items, Level, Slice, Timeline, Value

#: The generated classes, which have no annotations.
_PROTOS: Any = perfetto_trace_pb2

#: Texts, or encoded arguments, that are remembered; of more the format lets a writer forget and begin anew.
_REMEMBERED: Final = 1 << 17
#: Events between two reports of progress.
_REPORTED: Final = 1 << 14
#: Tags of the fields that are written by hand: number << 3, and 2 for what has a length (perfetto_trace.proto).
_PACKET: Final = b"\x0a"
_TIMESTAMP: Final = b"\x40"
_TRACK_EVENT: Final = b"\x5a"
_DEBUG_ANNOTATION: Final = b"\x22"
_NAME_IID, _INT_VALUE, _STRING_VALUE = b"\x08", b"\x20", b"\x32"
#: Of JSON's integers, what fits into the format's; others are written as text.
_INT64: Final = range(-(1 << 63), 1 << 63)


def write(file: Counted, drawn: Timeline, progress: Callable[[float], None]) -> int:
    """Write one process, and return how many slices, instants and levels of counters that is.

    Args:
        file: To write to; processes follow each other.
        drawn: The process.
        progress: Called now and then with the share that is done.
    """
    return _Writer(file, drawn).write(progress)


class _Writer:
    """Writes one process."""

    def __init__(self, file: Counted, drawn: Timeline) -> None:
        self._file = file
        self._drawn = drawn
        # small numbers, which are short in a file that has them in each packet
        self._sequence = 1 + (drawn.header.rank or 0)
        self._uuid = self._sequence << 20
        self._names = _Interned("event_names", "name")
        self._categories = _Interned("event_categories", "name")
        self._keys = _Interned("debug_annotation_names", "name")
        self._texts = _Interned("debug_annotation_string_values", "str")
        self._tables = (self._names, self._categories, self._keys, self._texts)
        #: encoded track events of slices that differ in time and their own arguments alone
        self._alike: dict[tuple[int, str, str, Facts], bytes] = {}
        self._ends: dict[int, bytes] = {}
        #: per track, the ends of slices that are open
        self._open: dict[int, list[int]] = {}
        self._packet: Any = _PROTOS.TracePacket()
        self._state: bytes = _PROTOS.TracePacket(
            trusted_packet_sequence_id=self._sequence,
            sequence_flags=_PROTOS.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE,
        ).SerializeToString()
        self._begins_anew = True

    def write(self, progress: Callable[[float], None]) -> int:
        """Write everything, and return how many events that is."""
        self._describe()
        number = 0
        for number, event in enumerate(self._drawn.events, 1):
            if isinstance(event, Slice):
                self._slice(event)
            elif isinstance(event, Level):
                self._level(event)
            else:
                self._instant(event)
            if number % _REPORTED == 0:
                progress(min(number / max(self._drawn.count, 1), 1.0))
        for track, ends in self._open.items():
            while ends:
                self._write_end(track, ends.pop())
        return number

    def _describe(self) -> None:
        """The process and its tracks.

        There is no snapshot of clocks: times are those of the wall clock, and with one the viewer draws a group of
        tracks for it and folds ours.
        """
        packet = _PROTOS.TracePacket()
        descriptor = packet.track_descriptor
        descriptor.uuid = self._uuid
        descriptor.process.pid = self._drawn.number
        descriptor.process.process_name = _clean(self._drawn.name)
        descriptor.child_ordering = _PROTOS.TrackDescriptor.EXPLICIT
        self._write(packet)
        for track in self._drawn.tracks:
            packet = _PROTOS.TracePacket()
            descriptor = packet.track_descriptor
            descriptor.uuid = self._uuid + track.id
            descriptor.parent_uuid = self._uuid
            descriptor.name = _clean(track.name)
            descriptor.sibling_order_rank = track.id
            if track.unit == "bytes":
                descriptor.counter.unit = _PROTOS.CounterDescriptor.UNIT_SIZE_BYTES
            self._write(packet)

    # ---- events ----------------------------------------------------------------------------------------

    def _slice(self, event: Slice) -> None:
        ends = self._open.setdefault(event.track, [])
        while ends and ends[-1] <= event.start:
            self._write_end(event.track, ends.pop())
        ends.append(event.start + event.duration)
        own = None if event.arrows_out or event.arrows_in else self._encoded(event.own)
        alike = self._alike.get((event.track, event.name, event.category, event.facts))
        if own is not None and alike is not None:
            self._write_alike(event.start, alike + own)
            return
        packet = self._packet
        packet.Clear()
        self._head(packet, event.track, event.name, event.category)
        packet.timestamp = event.start
        packet.track_event.type = _PROTOS.TrackEvent.TYPE_SLICE_BEGIN
        self._annotate(packet, event.facts.items, shared=True)
        self._alike[event.track, event.name, event.category, event.facts] = (
            packet.track_event.SerializeToString()
        )
        self._annotate(packet, event.own, shared=False)
        base = self._uuid
        packet.track_event.flow_ids.extend(base + each for each in event.arrows_out)
        packet.track_event.terminating_flow_ids.extend(base + each for each in event.arrows_in)
        self._write(packet)

    def _write_alike(self, time: int, track_event: bytes) -> None:
        """Write a packet as protobuf would: most of a long run is made of these, and this takes a third of the time."""
        data = b"".join(
            (
                _TIMESTAMP,
                _varint(time),
                self._state,
                _TRACK_EVENT,
                _varint(len(track_event)),
                track_event,
            )
        )
        self._file.write(_PACKET + _varint(len(data)) + data)

    def _encoded(self, items: Items) -> bytes | None:
        """Arguments as they stand in a track event; None if a name among them is new."""
        found = b""
        for key, value in items:
            number = self._keys.known(key)
            if number is None:
                return None
            if type(value) is int and value >= 0:
                data = _NAME_IID + _varint(number) + _INT_VALUE + _varint(value)
            elif type(value) is str and value.isascii():
                data = b"".join(
                    (_NAME_IID, _varint(number), _STRING_VALUE, _varint(len(value)), value.encode())
                )
            else:
                annotation = _PROTOS.DebugAnnotation()
                annotation.name_iid = number
                self._set(annotation, value, None)
                data = annotation.SerializeToString()
            found += _DEBUG_ANNOTATION + _varint(len(data)) + data
        return found

    def _write_end(self, track: int, time: int) -> None:
        end = self._ends.get(track)
        if end is None:
            packet = _PROTOS.TracePacket()
            packet.track_event.type = _PROTOS.TrackEvent.TYPE_SLICE_END
            packet.track_event.track_uuid = self._uuid + track
            end = self._ends[track] = packet.track_event.SerializeToString()
        self._write_alike(time, end)

    def _instant(self, event: Instant) -> None:
        packet = self._packet
        packet.Clear()
        self._head(packet, event.track, event.name, event.category)
        packet.timestamp = event.time
        packet.track_event.type = _PROTOS.TrackEvent.TYPE_INSTANT
        self._annotate(packet, event.own, shared=False)
        self._write(packet)

    def _level(self, event: Level) -> None:
        packet = self._packet
        packet.Clear()
        packet.timestamp = event.time
        packet.trusted_packet_sequence_id = self._sequence
        packet.track_event.type = _PROTOS.TrackEvent.TYPE_COUNTER
        packet.track_event.track_uuid = self._uuid + event.track
        packet.track_event.counter_value = event.value
        self._write(packet)

    # ---- parts of a packet -------------------------------------------------------------------------------

    def _head(self, packet: Any, track: int, name: str, category: str) -> None:
        self._forget_if_full(packet)
        packet.trusted_packet_sequence_id = self._sequence
        packet.track_event.track_uuid = self._uuid + track
        packet.track_event.name_iid = self._names.of(name, packet)
        packet.track_event.category_iids.append(self._categories.of(category, packet))

    def _forget_if_full(self, packet: Any) -> None:
        flags = _PROTOS.TracePacket
        packet.sequence_flags = flags.SEQ_NEEDS_INCREMENTAL_STATE
        full = max(len(self._alike), *map(len, self._tables)) >= _REMEMBERED
        if self._begins_anew or full:
            self._begins_anew = False
            self._alike.clear()
            for table in self._tables:
                table.clear()
            packet.sequence_flags |= flags.SEQ_INCREMENTAL_STATE_CLEARED

    def _annotate(self, packet: Any, items: Items, *, shared: bool) -> None:
        """Add arguments; texts of shared ones are written once and then referred to."""
        for key, value in items:
            annotation = packet.track_event.debug_annotations.add()
            annotation.name_iid = self._keys.of(key, packet)
            self._set(annotation, value, packet if shared else None)

    def _set(self, annotation: Any, value: Value, packet: Any) -> None:
        if isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, int) and value in _INT64:
            annotation.int_value = value
        elif isinstance(value, float):
            annotation.double_value = value
        elif isinstance(value, Mapping):
            for key, each in value.items():
                entry = annotation.dict_entries.add()
                entry.name = _clean(str(key))
                self._set(entry, each, packet)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for each in value:
                self._set(annotation.array_values.add(), each, packet)
        elif packet is not None:
            annotation.string_value_iid = self._texts.of(
                "none" if value is None else str(value), packet
            )
        else:
            annotation.string_value = _clean("none" if value is None else str(value))

    def _write(self, packet: Any) -> None:
        # what perfetto's StreamingTraceProtoBuilder writes, without copying the packet into a message for that
        data = packet.SerializeToString()
        self._file.write(_PACKET + _varint(len(data)) + data)


class _Interned:
    """Texts of one kind by number; the packet that uses one first carries it."""

    def __init__(self, table: str, field: str) -> None:
        self._table = table
        self._field = field
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def clear(self) -> None:
        """Forget all of them."""
        self._numbers.clear()

    def known(self, text: str) -> int | None:
        """The number of a text that was written already."""
        return self._numbers.get(text)

    def of(self, text: str, packet: Any) -> int:
        """The number of a text; a packet that uses it first carries it."""
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self._numbers) + 1
            entry = getattr(packet.interned_data, self._table).add()
            entry.iid = found
            clean = _clean(text)
            setattr(entry, self._field, clean.encode() if self._field == "str" else clean)
        return found


def _clean(text: str) -> str:
    """A text that UTF-8 can hold: half of a surrogate pair as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _varint(number: int) -> bytes:
    """A number that is not negative, as protobuf writes it: seven bits a byte, the lowest first."""
    if number < 16384:
        return _SHORT[number]
    return _CONTINUED[number & 16383] + _varint(number >> 14)


_CONTINUED: Final = [bytes((n & 127 | 128, n >> 7 | 128)) for n in range(16384)]
_SHORT: Final = [bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7)) for n in range(16384)]
