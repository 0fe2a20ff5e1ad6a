"""`opdrift export perfetto`: what is in the file, read back with Perfetto's own messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opdrift.export.processes import Processes, Selection
from opdrift.export.timeline import timeline
from opdrift.export.tracks import Instant, Level
from opdrift.testing import Builder, export, trace

pytest.importorskip("perfetto", reason="perfetto is not installed")

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from opdrift_integrations.perfetto import PerfettoExporter, writer
from opdrift_integrations.perfetto.dialect import DIALECT

HOSTILE = "</script>\n<b>[red]\u202e\N{PILE OF POO}\ud800" + "x" * 10_000

#: Traces are not compared by paths that are no Unicode.
PATH = HOSTILE.replace("\ud800", "")


def packets(tmp_path, *traces, **options):
    """The packets of an export."""
    path = tmp_path / "made.pftrace"
    export(PerfettoExporter(), *traces, output=path, **options)
    found = protos.Trace()
    found.ParseFromString(path.read_bytes())
    return list(found.packet)


def value(annotation, texts):
    """An argument, its texts looked up."""
    kind = annotation.WhichOneof("value")
    if annotation.dict_entries:
        return {each.name: value(each, texts) for each in annotation.dict_entries}
    if annotation.array_values:
        return [value(each, texts) for each in annotation.array_values]
    return (
        texts[annotation.string_value_iid]
        if kind == "string_value_iid"
        else getattr(annotation, kind)
    )


def decoded(packets):
    """What a reader makes of them: slices, instants and levels, as tuples; and names by track."""
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in packets
        if p.HasField("track_descriptor")
    }
    tables, found, is_open = {}, [], {}
    flags = protos.TracePacket
    for packet in packets:
        if not packet.HasField("track_event"):
            continue
        sequence, event = packet.trusted_packet_sequence_id, packet.track_event
        if packet.sequence_flags & flags.SEQ_INCREMENTAL_STATE_CLEARED:
            tables[sequence] = [{}, {}, {}, {}]
        if event.type == event.TYPE_COUNTER:
            found.append((tracks[event.track_uuid].name, packet.timestamp, event.counter_value))
            continue
        if event.type == event.TYPE_SLICE_END:
            row, start = is_open[event.track_uuid].pop()
            row[3] = packet.timestamp - start
            continue
        assert packet.sequence_flags & flags.SEQ_NEEDS_INCREMENTAL_STATE
        names, categories, keys, texts = tables[sequence]
        interned = packet.interned_data
        names |= {each.iid: each.name for each in interned.event_names}
        categories |= {each.iid: each.name for each in interned.event_categories}
        keys |= {each.iid: each.name for each in interned.debug_annotation_names}
        texts |= {each.iid: each.str.decode() for each in interned.debug_annotation_string_values}
        row = [
            tracks[event.track_uuid].name,
            names[event.name_iid],
            categories[event.category_iids[0]],
            None,
            packet.timestamp,
            {keys[a.name_iid]: value(a, texts) for a in event.debug_annotations},
            len(event.flow_ids),
            len(event.terminating_flow_ids),
        ]
        found.append(row)
        if event.type == event.TYPE_SLICE_BEGIN:
            is_open.setdefault(event.track_uuid, []).append((row, packet.timestamp))
    assert not any(is_open.values())
    return [tuple(row) for row in found]


def clean(argument):
    """An argument as the format can hold it."""
    if isinstance(argument, dict):
        return {key: clean(each) for key, each in argument.items()}
    if isinstance(argument, list):
        return [clean(each) for each in argument]
    return argument.replace("\ud800", "\\ud800") if isinstance(argument, str) else argument


def expected(process):
    """The same, from the timeline itself."""
    drawn = timeline(process, DIALECT)
    names = {track.id: track.name for track in drawn.tracks}
    for event in drawn.events:
        if isinstance(event, Level):
            yield names[event.track], event.time, event.value
        elif isinstance(event, Instant):
            yield (
                names[event.track],
                event.name,
                event.category,
                None,
                event.time,
                clean(dict(event.own)),
                0,
                0,
            )
        else:
            args = clean({**dict(event.facts.items), **dict(event.own)})
            yield (
                names[event.track], event.name, event.category, event.duration, event.start, args,
                len(event.arrows_out), len(event.arrows_in),
            )  # fmt: skip


def run(*, change="", layers=3, rank=None):
    """Layers with hostile names, marks of all kinds of values, and times as of today."""
    build = Builder(rank=rank, label=f"run {HOSTILE}")
    x = build.leaf("x", kind="input", shape=(4, 8))
    for number in range(layers):
        build.mark("step", step=number)
        with build.scope(f"layers.{number}", type="Block"), build.scope(PATH, type="Linear"):
            x = build.op(
                "addmm", x, x, x, settings={"beta": 0.5}, change=change if number == 1 else "",
                source=(HOSTILE, number, "forward"),
            )  # fmt: skip
            x = build.op("var_mean", x, outputs=2)
    fields = {"large": 1 << 70, "negative": -5, "yes": True, "number": 0.25, "text": HOSTILE}
    build.mark("note", nested=[1, {"a": HOSTILE}], **fields)
    build.output(x)
    made = build.build()
    made.header = replace(made.header, start_unix_ns=1_796_087_766_833_090_490)
    return made


def test_the_file_holds_the_timeline(tmp_path):
    """Every slice, instant and level with its time, arguments and arrows; what repeats is written by hand, and reads the same."""
    left, right = run(), run(change="*")
    (process,) = Processes([right], Selection(), warn=pytest.fail, against=left)

    found = decoded(packets(tmp_path, right, against=left))

    wanted = list(expected(process))
    note = next(row for row in wanted if row[1] == "note")
    note[5]["large"] = str(1 << 70)  # more than the format's integers hold
    assert sorted(found, key=repr) == sorted(wanted, key=repr)
    assert any(row[6] for row in wanted if len(row) > 3)


def test_a_writer_that_forgets_what_it_has_told_tells_it_anew(tmp_path, monkeypatch):
    """Texts are remembered up to a limit; a reader is told where they begin anew."""
    monkeypatch.setattr(writer, "_REMEMBERED", 6)
    (process,) = Processes([run(layers=8)], Selection(), warn=pytest.fail)

    found = packets(tmp_path, run(layers=8))

    cleared = [p.sequence_flags & protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED for p in found]
    assert np.count_nonzero(cleared) > 2
    wanted = list(expected(process))
    next(row for row in wanted if row[1] == "note")[5]["large"] = str(1 << 70)
    assert sorted(decoded(found), key=repr) == sorted(wanted, key=repr)


def test_what_repeats_is_written_once(tmp_path):
    """A hundred equal layers take little more than the first: names and arguments are interned."""

    def size(layers):
        build = Builder()
        x = build.leaf("x", kind="input")
        for _ in range(layers):
            with build.scope("layer"):
                x = build.op("mm", x, source=("a" * 500, 1, "forward"))
        export(PerfettoExporter(), build.build(), output=tmp_path / "made")
        return (tmp_path / "made").stat().st_size

    assert size(102) - size(2) < 100 * 250


def test_ranks_are_processes(tmp_path):
    """Each with its number, its tracks, and a sequence of its own."""
    found = packets(tmp_path, run(rank=0), run(rank=1))

    processes = [
        p.track_descriptor.process for p in found if p.track_descriptor.HasField("process")
    ]
    assert [(p.pid, p.process_name[:6]) for p in processes] == [(1000, "rank 0"), (1001, "rank 1")]
    uuids = [p.track_descriptor.uuid for p in found if p.HasField("track_descriptor")]
    assert len(uuids) == len(set(uuids))
    assert {p.trusted_packet_sequence_id for p in found if p.HasField("track_event")} == {1, 2}


def test_a_run_without_ops_is_an_empty_timeline(tmp_path):
    assert decoded(packets(tmp_path, Builder().build())) == []


def test_equal_traces_give_equal_files(tmp_path):
    """Nothing of the moment of the export is in it."""
    for name in ("one", "two"):
        export(PerfettoExporter(), trace("mm relu"), output=tmp_path / name)

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("number", [0, 1, 127, 128, 16383, 16384, 2**35, 2**61 - 1, 2**63 - 1])
def test_numbers_are_written_as_protobuf_writes_them(number):
    packet = protos.TracePacket(timestamp=number)

    assert b"\x40" + writer._varint(number) == packet.SerializeToString()


def test_the_tags_are_those_of_the_messages():
    """Fields that are written by hand have the numbers that Perfetto gave them."""

    def tag(message, field, kind):
        return writer._varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)

    assert [
        tag(protos.Trace, "packet", 2),
        tag(protos.TracePacket, "timestamp", 0),
        tag(protos.TracePacket, "track_event", 2),
    ] == [writer._PACKET, writer._TIMESTAMP, writer._TRACK_EVENT]
    assert [
        tag(protos.TrackEvent, "debug_annotations", 2),
        tag(protos.DebugAnnotation, "name_iid", 0),
        tag(protos.DebugAnnotation, "int_value", 0),
        tag(protos.DebugAnnotation, "string_value", 2),
    ] == [
        writer._DEBUG_ANNOTATION,
        writer._NAME_IID,
        writer._INT_VALUE,
        writer._STRING_VALUE,
    ]
