"""Traces as OpenTelemetry spans: how they nest, what they say, and that their bytes are what the SDK would send."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from otlp_receiver import attributes_of, spans_of

import opdrift
from opdrift.commands.main import opdrift as command
from opdrift.records import RAISED
from opdrift.testing import Builder, export, plant, trace
from opdrift_integrations.otlp import OtlpExporter
from opdrift_integrations.otlp.encoding import Event, Extras, Limits, Link
from opdrift_integrations.otlp.identity import Kind, span_ids
from opdrift_integrations.otlp.jsonlines import JsonLines
from opdrift_integrations.otlp.protobuf import Protobuf

PAGE = Path(__file__).parents[2] / "docs" / "otel-attributes.md"


# ---- reading what was exported -----------------------------------------------------------------------------


def parsed(line):
    """A line of OTLP JSON as the protobuf message that it stands for; its ids are hexadecimal there."""

    def with_bytes(data):
        if isinstance(data, list):
            return [with_bytes(each) for each in data]
        if not isinstance(data, dict):
            return data
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode()
            if key in ("traceId", "spanId", "parentSpanId")
            else with_bytes(value)
            for key, value in data.items()
        }

    return ParseDict(with_bytes(json.loads(line)), ExportTraceServiceRequest())


@pytest.fixture
def exported(tmp_path):
    """Export traces into a file, and read its requests back."""

    def run(*traces, level="all", against=None, arguments=()):
        path = tmp_path / "spans.jsonl"
        said = export(
            OtlpExporter(), *traces, output=path, against=against,
            arguments=["--level", level, "--protocol", "file", *arguments],
        )  # fmt: skip
        requests = [parsed(line) for line in path.read_text("ascii").splitlines()]
        count = sum(len(spans_of(request)) for request in requests)
        assert said == f"wrote {count:,} span{'s' * (count != 1)} as OTLP JSON lines"
        return requests

    return lambda *traces, **options: Found(run(*traces, **options))


class Found:
    """The spans of an export."""

    def __init__(self, requests):
        self.requests = requests
        self.spans = [span for request in requests for span in spans_of(request)]

    def named(self, name) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def parent(self, span) -> str:
        """The name of a span's parent."""
        (found,) = [s.name for s in self.spans if s.span_id == span.parent_span_id]
        return found

    @property
    def nesting(self):
        """Name and parent of each span, in order."""
        names = {span.span_id: span.name for span in self.spans}
        return [(span.name, names.get(span.parent_span_id)) for span in self.spans]


# ---- what is a span ------------------------------------------------------------------------------------------


def test_spans_nest_as_modules_do(exported):
    """Run, module calls, ops; each in the innermost call that it ran in."""
    build = Builder()
    x = build.leaf("x", kind="input")
    with build.scope("block", type="Block"):
        x = build.op("mm", x, build.leaf("w"))
        with build.scope("norm", type="LayerNorm"):
            x = build.op("native_layer_norm", x)
    build.output(build.op("relu", x))

    assert exported(build.build()).nesting == [
        ("torch.run", None),
        ("block (Block)", "torch.run"),
        ("block.norm (LayerNorm)", "block (Block)"),
        ("aten.mm.default", "block (Block)"),
        ("aten.native_layer_norm.default", "block.norm (LayerNorm)"),
        ("aten.relu.default", "torch.run"),
    ]


def test_steps_hold_what_follows_their_mark(exported):
    """What ran before the first one belongs to the run; steps have the program's numbers."""
    build = Builder()
    x = build.op("relu", build.leaf("x", kind="input"))
    build.mark("step", step=10)
    with build.scope("fc", type="Linear"):
        x = build.op("mm", x, build.leaf("w"))
    build.mark("step", step=20)
    build.output(build.op("gelu", x))

    found = exported(build.build())

    assert found.nesting == [
        ("torch.run", None),
        ("torch.step", "torch.run"),
        ("torch.step", "torch.run"),
        ("fc (Linear)", "torch.step"),
        ("aten.relu.default", "torch.run"),
        ("aten.mm.default", "fc (Linear)"),
        ("aten.gelu.default", "torch.step"),
    ]
    steps = [span for span in found.spans if span.name == "torch.step"]
    assert [attributes_of(step) for step in steps] == [{"torch.step": 10}, {"torch.step": 20}]
    assert found.named("aten.gelu.default").parent_span_id == steps[1].span_id
    assert found.named("fc (Linear)").parent_span_id == steps[0].span_id


def test_gathers_and_moves_are_spans_with_their_fields(exported):
    """Parameters by name; one that is not what its source held is an error."""
    build = Builder()
    with build.scope("fc", type="Linear"):
        build.mark(
            "gather",
            library="torch_fsdp",
            bytes=64,
            parameters=[["fc.weight", 0, [4, 4]]],
            intact=True,
        )
        build.op("relu", build.leaf("x", kind="input"))
    build.mark("move", direction="load", intact=False, mismatch=[{"parameter": "fc.weight"}])

    found = exported(build.build())

    gather, move = found.named("torch.gather"), found.named("torch.move")
    assert attributes_of(gather) == {
        "torch.gather.library": "torch_fsdp",
        "torch.gather.bytes": 64,
        "torch.gather.parameters": ["fc.weight"],
        "torch.gather.intact": True,
    }
    assert (found.parent(gather), found.parent(move)) == ("fc (Linear)", "torch.run")
    assert gather.status.code == 0
    assert (move.status.code, move.status.message) == (2, "the move is not what its source held")
    assert attributes_of(move)["torch.move.mismatch"] == '[{"parameter":"fc.weight"}]'


@pytest.mark.parametrize(
    ("level", "names"),
    [
        ("module", {"torch.run", "fc (Module)"}),
        ("divergent", {"torch.run", "fc (Module)", "aten.gelu.default", "aten.mm.default"}),
        (
            "all",
            {
                "torch.run",
                "fc (Module)",
                "aten.relu.default",
                "aten.gelu.default",
                "aten.mm.default",
            },
        ),
    ],
)
def test_a_level_says_which_ops_are_spans(level, names, exported):
    """None, those that differ, all."""
    words = "fc{ relu gelu mm }"

    found = exported(plant(words, 2), level=level, against=trace(words))

    assert {span.name for span in found.spans} == names


def test_without_a_comparison_only_ops_that_raised_are_told_apart(exported):
    """At the default level; the op and the run have the status ERROR."""
    build = Builder(exception="ValueError: too long")
    x = build.op("relu", build.leaf("x", kind="input"))
    build.op("mm", x, flags=RAISED)

    found = exported(build.build(), level="divergent")

    assert [(span.name, span.status.code, span.status.message) for span in found.spans] == [
        ("torch.run", 2, "ValueError: too long"),
        ("aten.mm.default", 2, "the op raised an exception"),
    ]
    (event,) = found.spans[0].events
    assert (event.name, attributes_of(event)) == (
        "exception",
        {"exception.type": "ValueError", "exception.message": "too long"},
    )


def test_a_part_of_a_run_holds_only_what_is_around_it(tmp_path, recorded):
    """--scope leaves out the other modules, and the marks outside."""
    out = tmp_path / "spans.jsonl"
    options = ["-o", str(out), "--level", "module", "--scope", "2.attention"]

    assert command(["export", "otlp", str(recorded / "base.trace"), *options]) == 0

    (request,) = map(parsed, out.read_text().splitlines())
    assert [span.name for span in spans_of(request)] == [
        "torch.run", "Sequential", "2 (Block)", "2.attention (Attention)",
        "2.attention.qkv (Linear)", "2.attention.out (Linear)",
    ]  # fmt: skip
    assert not spans_of(request)[0].events


# ---- what spans say ------------------------------------------------------------------------------------------


def test_an_op_says_what_ran_where_on_what(exported):
    """Shapes, dtypes, digests, arguments, module, source line, thread."""
    build = Builder()
    x = build.leaf("x", kind="input", shape=(2, 3))
    with build.scope("norm", type="LayerNorm"):
        y = build.op(
            "native_layer_norm", x, settings={"eps": 1e-5}, source=("net.py", 7, "forward")
        )
    build.output(y)
    run = build.build()

    said = attributes_of(exported(run).named("aten.native_layer_norm.default"))

    digest = {v: f"{run.fingerprint(v).raw:016x}" for v in (x, y)}
    assert said.pop("torch.op.outputs.absmax") == [pytest.approx(run.fingerprint(y).absmax)]
    assert said == {
        "torch.op.name": "aten.native_layer_norm.default",
        "torch.op.seq": 1,
        "torch.op.inputs.shapes": ["[2,3]"],
        "torch.op.inputs.dtypes": ["float32"],
        "torch.op.inputs.devices": ["cpu"],
        "torch.op.inputs.fingerprints": [digest[x]],
        "torch.op.outputs.shapes": ["[2,3]"],
        "torch.op.outputs.dtypes": ["float32"],
        "torch.op.outputs.fingerprints": [digest[y]],
        "torch.op.outputs.nonfinite": [0],
        "torch.op.arguments": '{"eps":1e-05}',
        "torch.module.path": "norm",
        "torch.phase": "forward",
        "torch.thread": 0,
        "code.file.path": "net.py",
        "code.line.number": 7,
        "code.function.name": "forward",
    }


def test_times_are_those_of_the_recording_in_nanoseconds(exported, recorded):
    """A module call lasts from its first op to its last."""
    run = opdrift.load(recorded / "base.trace")
    clock = run.header.start_unix_ns - run.header.start_ns

    found = exported(run)

    ops = {attributes_of(s)["torch.op.seq"]: s for s in found.spans if s.name.startswith("aten.")}
    assert len(ops) == len(run.ops)
    for index in range(len(run.ops)):
        span, start = ops[int(run.ops.seq[index])], int(run.ops.start[index]) + clock
        assert span.start_time_unix_nano == start
        assert span.end_time_unix_nano == start + int(run.ops.duration[index])
    names = {span.span_id: span for span in found.spans}
    for span in found.spans[1:]:
        parent = names[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano


def test_the_run_says_with_what_it_ran(exported):
    """Label, versions and settings on its span; host facts in the resource, and no command line."""
    build = Builder(label="monday", flags={"deterministic": True}, rank=1, world_size=4)
    build.op("relu", build.leaf("x", kind="input"))

    found = exported(build.build())

    said = attributes_of(found.named("torch.run"))
    assert (said["torch.run.label"], said["torch.run.ops"]) == ("monday", 1)
    assert json.loads(said["torch.run.settings"])["deterministic"] is True
    (request,) = found.requests
    resource = attributes_of(request.resource_spans[0].resource)
    assert (resource["torch.distributed.rank"], resource["torch.distributed.world_size"]) == (1, 4)
    assert (resource["service.name"], resource["process.runtime.version"]) == ("opdrift", "3.11")
    assert "hand" not in str(request)  # the command line of built traces


def test_other_marks_are_events_of_the_run(exported):
    """And of very many the rest is counted."""
    build = Builder()
    build.op("relu", build.leaf("x", kind="input"))
    for number in range(130):
        build.mark("flags", deterministic=[False, number])

    run = exported(build.build()).named("torch.run")

    assert (len(run.events), run.dropped_events_count) == (128, 2)
    assert run.events[1].name == "torch.mark.flags"
    assert attributes_of(run.events[1]) == {"torch.flags.deterministic": "[false,1]"}


def test_every_attribute_is_documented(exported, recorded):
    """docs/otel-attributes.md has a row for each that is sent."""
    build = Builder(rank=0, exception="E: e", variables={"A": "1"}, label="x", complete=False)
    build.mark("step")
    with build.scope("fc", type="Linear"):
        build.op("relu", build.leaf("x", kind="input"), flags=RAISED, source=("a", 1, "b"))
    documented = set(re.findall(r"`([a-z]+\.[a-z0-9_.]+)`", PAGE.read_text("utf-8")))
    sent = set()

    with pytest.warns(UserWarning, match="incomplete"):
        found = [exported(build.build())]
    for left, right in (("base", "eps"), ("base", "math"), ("base", "weights")):
        sides = [opdrift.load(recorded / f"{name}.trace") for name in (right, left)]
        found.append(exported(sides[0], against=sides[1]))
    for each in found:
        for request in each.requests:
            sent |= set(attributes_of(request.resource_spans[0].resource))
        for span in each.spans:
            told = [event for event in span.events if not event.name.startswith("torch.mark.")]
            for part in (span, *told, *span.links):
                sent |= set(attributes_of(part))

    assert len(sent) > 50
    assert sent - documented == set()


# ---- comparison ----------------------------------------------------------------------------------------------


def test_the_status_message_is_one_line(exported):
    """Whatever the names in it hold."""

    def run(change):
        build = Builder()
        with build.scope("new\nline"):
            build.output(build.op("gelu", build.leaf("x", kind="input"), change=change))
        return build.build()

    found = exported(run("*"), against=run(""))

    message = found.named("aten.gelu.default").status.message
    assert "new\\nline" in message
    assert "\n" not in message


def test_the_first_divergence_is_an_event_and_an_error(exported):
    """On its op; what it reached is no error."""
    words = "fc{ relu gelu mm }"

    found = exported(plant(words, 2), against=trace(words))

    op = found.named("aten.gelu.default")
    (event,) = op.events
    told = attributes_of(event)
    assert event.name == "torch.diff.first_divergence"
    assert event.time_unix_nano == op.start_time_unix_nano
    assert (told["torch.op.name"], told["torch.diff.seq"]) == ("aten.gelu.default", 2)
    assert op.status.code == 2
    assert op.status.message == f"first divergence: {told['torch.diff.summary']}"
    assert [s.name for s in found.spans if s.status.code == 2] == ["torch.run", "aten.gelu.default"]
    statuses = [attributes_of(span).get("torch.diff.status") for span in found.spans[2:]]
    assert statuses == ["equal", "origin", "receiver"]
    run = attributes_of(found.named("torch.run"))
    assert list(run)[:2] == [
        "torch.diff.verdict",
        "torch.diff.summary",
    ]  # what was asked comes first
    assert (run["torch.diff.verdict"], run["torch.diff.summary"]) == (
        "diverged",
        told["torch.diff.summary"],
    )
    assert attributes_of(found.named("fc (Module)"))["torch.diff.differing_ops"] == 2


def test_links_lead_to_the_same_op_of_the_other_run(exported, recorded):
    """Its ids are those that exporting that run sends."""
    left, right = (opdrift.load(recorded / f"{name}.trace") for name in ("base", "eps"))
    other = exported(left).spans
    there = {span.span_id: attributes_of(span).get("torch.op.seq") for span in other}

    found = exported(right, against=left)

    links = [
        (attributes_of(span)["torch.op.seq"], *span.links) for span in found.spans if span.links
    ]
    assert len(links) > 20
    assert all(there[link.span_id] == seq for seq, link in links)  # both runs have the same ops
    assert {link.trace_id for _, link in links} == {other[0].trace_id}
    assert {span.trace_id for span in found.spans} != {other[0].trace_id}
    assert attributes_of(links[0][1]) == {
        "torch.diff.role": "baseline",
        "torch.diff.baseline.seq": links[0][0],
    }


def test_a_parameter_that_differs_is_told_on_the_run(exported):
    """No op is at fault."""
    found = exported(plant("mm relu", 1, "!"), against=trace("mm relu"))

    run = found.named("torch.run")
    assert attributes_of(run.events[0])["torch.diff.name"] == "w0"
    assert [span.name for span in found.spans if span.events] == ["torch.run"]


def test_without_ops_the_event_is_on_the_module(exported):
    """At level module."""
    words = "fc{ relu gelu }"

    found = exported(plant(words, 2), against=trace(words), level="module")

    module = found.named("fc (Module)")
    assert [event.name for event in module.events] == ["torch.diff.first_divergence"]
    assert module.status.code == 2


def test_rounding_is_no_error(exported, recorded):
    """The event says where it begins; nothing is red."""
    base, math = (opdrift.load(recorded / f"{name}.trace") for name in ("base", "math"))

    found = exported(math, against=base)

    assert attributes_of(found.spans[0])["torch.diff.verdict"] == "rounding"
    assert {span.status.code for span in found.spans} == {0}
    events = [e for s in found.spans for e in s.events if e.name.startswith("torch.diff")]
    assert [attributes_of(event)["torch.diff.material"] for event in events] == [False]


def test_equal_runs_have_neither_event_nor_link(exported):
    """And their verdict is on the run."""
    found = exported(trace("mm relu"), against=trace("mm relu"))

    assert attributes_of(found.spans[0])["torch.diff.verdict"] == "identical"
    assert [s.name for s in found.spans if s.events or s.links or s.status.code] == []


# ---- ids -----------------------------------------------------------------------------------------------------


def test_exporting_twice_sends_the_same_bytes(exported):
    """Ids follow from the run, so a receiver that has it already gets nothing new."""
    run = trace("fc{ mm relu } mm")

    assert exported(run).requests == exported(run).requests


def test_ranks_are_traces_of_their_own(exported):
    """Each is a process; no span of one has the trace id of another."""
    found = exported(trace("mm", rank=0), trace("mm", rank=1))

    assert len({span.trace_id for span in found.spans}) == 2
    assert [span.name for span in found.spans].count("torch.run") == 2


def test_no_two_spans_share_an_id():
    """The ids of a million ops, as many calls and the run are all different, and none is all zeros."""
    numbers = np.arange(1_000_000)
    ids = [i for kind in (Kind.OP, Kind.CALL) for i in span_ids(b"\x07" * 16, kind, numbers)]
    ids += span_ids(b"\x07" * 16, Kind.RUN, numbers[:1])

    assert len(set(ids)) == len(ids)
    assert bytes(8) not in ids


# ---- bytes ---------------------------------------------------------------------------------------------------

TRACE_ID = bytes(range(1, 17))
SCOPE = ("opdrift", "1.2", "urn:x")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(
    texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
)
lists = st.one_of(
    st.lists(texts, max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.floats(allow_nan=False), max_size=4),
)
values = st.dictionaries(texts.filter(bool), st.one_of(scalars, lists), max_size=5)
times = st.integers(1, 2**63)
ids = st.binary(min_size=8, max_size=8).filter(any)
events = st.lists(st.builds(Event, texts, times, values), max_size=3)
links = st.lists(
    st.builds(Link, st.binary(min_size=16, max_size=16).filter(any), ids, values), max_size=3
)


def sdk_context(trace_id, span_id, remote=False):
    return SpanContext(
        int.from_bytes(trace_id), int.from_bytes(span_id), remote, TraceFlags(TraceFlags.SAMPLED)
    )


def from_sdk(ident, parent, name, start, end, attributes, extras, resource):
    """The same request, encoded by OpenTelemetry's own code."""
    span = ReadableSpan(
        name,
        context=sdk_context(TRACE_ID, ident),
        parent=sdk_context(TRACE_ID, parent),
        resource=Resource(resource, schema_url=SCOPE[2]),
        attributes=attributes,
        events=[SdkEvent(e.name, e.attributes, timestamp=e.time) for e in extras.events],
        links=[
            SdkLink(sdk_context(each.trace_id, each.span_id, remote=True), each.attributes)
            for each in extras.links
        ],
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.UNSET)
        if extras.error is None
        else Status(StatusCode.ERROR, extras.error),
        start_time=start,
        end_time=end,
        instrumentation_scope=InstrumentationScope(*SCOPE),
    )
    return encode_spans([span])


@settings(max_examples=150, deadline=None)
@given(
    ids,
    ids,
    texts,
    times,
    times,
    values,
    st.builds(Extras, events, links, st.none() | texts),
    values,
)
def test_our_bytes_say_what_the_sdk_s_say(
    ident, parent, name, start, end, attributes, extras, resource
):
    """Both encodings, against OpenTelemetry's own encoder, for any content that it takes."""
    expected = from_sdk(ident, parent, name, start, end, attributes, extras, resource)

    for kind, read in ((Protobuf, ExportTraceServiceRequest.FromString), (JsonLines, parsed)):
        encoder = kind(TRACE_ID, resource, SCOPE, Limits())
        encoded = encoder.attributes(attributes)
        got = read(
            encoder.request([encoder.span(ident, parent, name, start, end, encoded, extras)])
        )
        if kind is JsonLines:  # JSON leaves an empty status out
            for span in spans_of(expected):
                if span.status.code == 0:
                    span.ClearField("status")
        assert got == expected


@pytest.mark.parametrize("kind", [Protobuf, JsonLines])
def test_what_is_over_a_limit_is_cut_and_counted(kind):
    """As OTEL_SPAN_*_LIMIT say; nothing is left out without a count."""
    limits = Limits(
        attributes=2, length=3, events=1, links=1, event_attributes=1, link_attributes=0
    )
    encoder = kind(TRACE_ID, {}, SCOPE, limits)
    event = Event("event", 1, {"a": 1, "b": 2})
    link = Link(TRACE_ID, b"12345678", {"a": 1})
    extras = Extras([event, event], [link, link, link], "a long story", dropped_events=4)

    encoded = encoder.attributes({"a": "abcdef", "b": ["xyz123"], "c": 3})
    body = encoder.request([encoder.span(b"12345678", b"", "name", 1, 2, encoded, extras)])
    read = parsed if kind is JsonLines else ExportTraceServiceRequest.FromString
    (span,) = spans_of(read(body))

    assert attributes_of(span) == {"a": "abc", "b": ["xyz"]}
    assert (span.dropped_attributes_count, span.status.message) == (1, "a l")
    assert (len(span.events), span.dropped_events_count) == (1, 5)
    assert (attributes_of(span.events[0]), span.events[0].dropped_attributes_count) == ({"a": 1}, 1)
    assert (len(span.links), span.dropped_links_count) == (1, 2)
    assert (attributes_of(span.links[0]), span.links[0].dropped_attributes_count) == ({}, 1)


@pytest.mark.parametrize("kind", [Protobuf, JsonLines])
@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("a\ud800b", "a\\ud800b"), ("</script>\n\x00", "</script>\n\x00"), ("", ""), (2**63, str(2**63)),
        (float("inf"), float("inf")), (-float("inf"), -float("inf")), (-1, -1), (False, False), ([], []),
    ],
)  # fmt: skip
def test_odd_values_arrive(kind, value, sent):
    """What UTF-8 or 64 bits cannot hold comes as text."""
    encoder = kind(TRACE_ID, {}, SCOPE, Limits())
    encoded = encoder.attributes({"odd": value})
    body = encoder.request([encoder.span(b"12345678", b"", "name", 1, 2, encoded)])
    read = parsed if kind is JsonLines else ExportTraceServiceRequest.FromString

    assert attributes_of(spans_of(read(body))[0]) == {"odd": sent}


@pytest.mark.parametrize("kind", [Protobuf, JsonLines])
def test_half_of_a_surrogate_pair_arrives_wherever_a_text_stands(kind):
    """In names, keys and the status, too: a receiver would refuse the whole request for one."""
    odd, sent = "a\ud800b", "a\\ud800b"
    extras = Extras([Event(odd, 1, {odd: 1})], (), odd)
    encoder = kind(TRACE_ID, {odd: odd}, SCOPE, Limits())

    body = encoder.request([encoder.span(b"12345678", b"", odd, 1, 2, (), extras)])

    read = parsed if kind is JsonLines else ExportTraceServiceRequest.FromString
    (span,) = spans_of(read(body))
    (event,) = span.events
    resource = read(body).resource_spans[0].resource
    assert (span.name, span.status.message, event.name) == (sent, sent, sent)
    assert (attributes_of(event), attributes_of(resource)) == ({sent: 1}, {sent: sent})


def test_hostile_names_and_huge_arguments_arrive(exported):
    """Markup and line breaks as they are; what is very long is cut."""
    build = Builder()
    with build.scope('a.<script>"\n\x1b[31m', type="<b>"):
        build.op(
            "relu", *(build.leaf(f"x{i}", kind="input") for i in range(300)),
            settings={"size": list(range(50_000))},
        )  # fmt: skip

    found = exported(build.build())

    op = attributes_of(found.named("aten.relu.default"))
    assert op["torch.module.path"] == 'a.<script>"\n\x1b[31m'
    assert len(op["torch.op.arguments"]) == 16384
    assert (len(op["torch.op.inputs.shapes"]), op["torch.op.inputs.shapes"][-1]) == (
        257,
        "and 44 more",
    )
    assert len(op["torch.op.inputs.fingerprints"]) == 257


def test_help_loads_nothing_that_only_exporting_needs(python):
    """Neither NumPy nor gRPC nor OpenTelemetry's packages."""
    program = (
        "import sys\nfrom opdrift.commands.main import opdrift\n"
        "try:\n    opdrift(['export', 'otlp', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'grpc', 'google', 'opentelemetry', 'torch'} & set(sys.modules)))"
    )

    done = python("-c", program)

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_sending_over_http_needs_no_library_of_opentelemetry(recorded, tmp_path, python):
    """Only gRPC needs the extra."""
    program = (
        "import sys\nfor name in ('opentelemetry', 'google.protobuf', 'grpc', 'requests'): sys.modules[name] = None\n"
        "from opdrift.commands.main import opdrift\n"
        f"status = opdrift(['export', 'otlp', {str(recorded / 'base.trace')!r}, '-o', {str(tmp_path / 'x.jsonl')!r}])\n"
        "sys.exit(status)"
    )

    done = python("-c", program)

    assert (done.returncode, done.stderr) == (0, "")
