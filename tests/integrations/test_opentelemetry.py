"""Spans through the program's own tracer while it is recorded."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from torch import nn
from torch.utils.checkpoint import checkpoint

import opdrift
from opdrift_integrations.opentelemetry import OpenTelemetryIntegration


class Spans:
    """A provider of the program's, and what it was told."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = self.provider.get_tracer("program")
        self.integration = OpenTelemetryIntegration(self.tracer)

    @property
    def ended(self) -> list[ReadableSpan]:
        """In the order in which they began."""
        return sorted(self._memory.get_finished_spans(), key=lambda s: s.start_time or 0)

    @property
    def nesting(self) -> list[tuple[str, str | None]]:
        names = {s.context.span_id: s.name for s in self.ended if s.context}
        return [(s.name, names.get(s.parent.span_id) if s.parent else None) for s in self.ended]


@pytest.fixture
def spans() -> Iterator[Spans]:
    before = context.get_current()
    made = Spans()
    yield made
    assert context.get_current() == before
    made.provider.shutdown()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))


def test_run_steps_and_module_calls_are_spans(spans, tmp_path):
    """They nest as the program ran; the attributes are those of an export."""
    net = model()
    with opdrift.record(
        tmp_path / "a.trace", model=net, integrations=[spans.integration]
    ) as recorder:
        for number in (3, 4):
            recorder.mark("step", step=number)
            net(torch.ones(2, 4))

    step = [
        ("Sequential", "torch.step"),
        ("0 (Linear)", "Sequential"),
        ("1 (Sequential)", "Sequential"),
        ("1.0 (ReLU)", "1 (Sequential)"),
    ]
    assert spans.nesting == [
        ("torch.run", None),
        ("torch.step", "torch.run"), *step,
        ("torch.step", "torch.run"), *step,
    ]  # fmt: skip
    assert [s.attributes["torch.step"] for s in spans.ended if s.name == "torch.step"] == [3, 4]
    assert dict(spans.ended[-1].attributes) == {
        "torch.module.path": "1.0",
        "torch.module.type": "ReLU",
        "torch.module.call_index": 1,
        "torch.module.training": True,
    }


def test_the_program_s_own_spans_belong_to_the_module_that_opens_them(spans, tmp_path):
    """And ours to the span that the program was in."""

    class Own(nn.Module):
        def forward(self, x):
            with spans.tracer.start_as_current_span("lookup"):
                return x + 1

    net = nn.Sequential(Own())
    with (
        spans.tracer.start_as_current_span("request"),
        opdrift.record(tmp_path / "a.trace", model=net, integrations=[spans.integration]),
    ):
        net(torch.ones(2))

    assert spans.nesting == [
        ("request", None), ("torch.run", "request"), ("Sequential", "torch.run"), ("0 (Own)", "Sequential"),
        ("lookup", "0 (Own)"),
    ]  # fmt: skip


def test_no_global_provider_is_set(spans, tmp_path):
    """What other libraries ask for is what it was."""
    before = trace.get_tracer_provider()
    with opdrift.record(tmp_path / "a.trace", integrations=[spans.integration]):
        model()(torch.ones(2, 4))

    assert trace.get_tracer_provider() is before


def test_an_exception_leaves_no_span_open(spans, tmp_path):
    """Those that it leaves have it, with the status ERROR; it reaches the program as it is."""

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("too long")

    net = nn.Sequential(nn.ReLU(), Fails())
    with pytest.raises(ValueError, match="too long") as caught:  # noqa: SIM117 (the recorder is left by it)
        with opdrift.record(tmp_path / "a.trace", model=net, integrations=[spans.integration]):
            net(torch.ones(2))

    told = {s.name: (s.status.status_code.name, [e.name for e in s.events]) for s in spans.ended}
    failed = ("ERROR", ["exception"])
    assert told == {
        "torch.run": failed, "Sequential": failed, "1 (Fails)": failed, "0 (ReLU)": ("UNSET", []),
    }  # fmt: skip
    assert caught.value.__traceback__ is not None
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_an_exception_that_was_being_handled_is_no_error_of_the_modules(spans, tmp_path):
    """A model that is called in an `except` block."""
    net = nn.Sequential(nn.ReLU())
    with opdrift.record(tmp_path / "a.trace", model=net, integrations=[spans.integration]):
        try:
            raise KeyError("cache")
        except KeyError:
            net(torch.ones(2))

    assert {s.status.status_code.name for s in spans.ended} == {"UNSET"}


def test_an_interrupted_module_is_closed_when_the_next_one_begins(spans, tmp_path):
    """torch tells no hook of a KeyboardInterrupt."""

    class Interrupted(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                raise KeyboardInterrupt
            return x

    net = nn.Sequential(Interrupted())
    with opdrift.record(tmp_path / "a.trace", model=net, integrations=[spans.integration]):
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(2))
        net(torch.zeros(2))

    assert spans.nesting == [
        ("torch.run", None),
        ("Sequential", "torch.run"), ("0 (Interrupted)", "Sequential"),
        ("Sequential", "torch.run"), ("0 (Interrupted)", "Sequential"),
    ]  # fmt: skip


class Foreign:
    """A tracer that is not the SDK's, and draws from `random`."""

    def __init__(self, tracer):
        self._tracer = tracer

    def start_span(self, *args, **options):
        return self._tracer.start_span(*args, **options)


class Dated(RandomIdGenerator):
    """A generator of the program's that puts a meaning into trace ids."""

    def generate_trace_id(self):
        return 7 << 96 | random.getrandbits(96)

    def is_trace_id_random(self):
        return False


@pytest.mark.parametrize("kind", ["sdk", "foreign", "dated"])
def test_what_the_program_draws_from_random_is_what_it_was(kind, spans, tmp_path):
    """The SDK takes ids from there; every span would change what a seeded program draws next."""
    if kind == "dated":
        spans.provider.id_generator = Dated()
    tracer = spans.provider.get_tracer(kind)
    integration = OpenTelemetryIntegration(Foreign(tracer) if kind == "foreign" else tracer)

    class Draws(nn.Module):
        def forward(self, x):
            return x * random.random()

    net = nn.Sequential(Draws(), nn.Sequential(Draws()))
    random.seed(1)
    plain = [net(torch.ones(2)), random.random()]
    random.seed(1)
    with opdrift.record(tmp_path / "a.trace", model=net, integrations=[integration]) as recorder:
        recorder.mark("step", step=1)
        traced = [net(torch.ones(2))]
    traced.append(random.random())

    assert torch.equal(traced[0], plain[0])
    assert traced[1] == plain[1]
    assert len({s.context.span_id for s in spans.ended}) == 6
    assert (spans.ended[0].context.trace_id >> 96 == 7) == (kind == "dated")


def test_a_step_in_the_middle_of_a_module_is_an_event(spans, tmp_path):
    """It cannot end what it is in."""

    class Loop(nn.Module):
        def forward(self, x):
            recorder.mark("step", step=1)
            return x + 1

    net = Loop()
    with opdrift.record(
        tmp_path / "a.trace", model=net, integrations=[spans.integration]
    ) as recorder:
        net(torch.ones(2))

    loop = next(s for s in spans.ended if s.name == "Loop")
    assert [(e.name, dict(e.attributes)) for e in loop.events] == [
        ("torch.step", {"torch.step": 1})
    ]
    assert "torch.step" not in {s.name for s in spans.ended}


def test_scopes_of_the_program_are_spans(spans, tmp_path):
    """`recorder.scope()` as well as modules."""
    with opdrift.record(tmp_path / "a.trace", integrations=[spans.integration]) as recorder:
        with recorder.scope("generation"):
            nn.Sequential(nn.ReLU())(torch.ones(2))
        torch.ones(2) + 1

    assert spans.nesting == [
        ("torch.run", None), ("generation (scope)", "torch.run"), ("Sequential", "generation (scope)"), ("0 (ReLU)", "Sequential"),
    ]  # fmt: skip


def test_modules_that_autograd_runs_again_belong_to_the_run(spans, tmp_path):
    """Checkpointing; whichever thread does it."""
    net = model()
    x = torch.ones(2, 4, requires_grad=True)
    with opdrift.record(tmp_path / "a.trace", model=net, integrations=[spans.integration]):
        checkpoint(net, x, use_reentrant=False).sum().backward()

    roots = [s for s in spans.ended if s.parent is None]
    assert [s.name for s in roots] == ["torch.run"]
    assert [name for name, _ in spans.nesting].count("0 (Linear)") == 2


def test_one_integration_serves_one_recording_at_a_time(spans, tmp_path):
    """The second one is recorded without spans, and its trace says so; after the first it may be used again."""
    with opdrift.record(tmp_path / "a.trace", integrations=[spans.integration]):
        with opdrift.record(tmp_path / "b.trace", integrations=[spans.integration]):
            model()(torch.ones(2, 4))
        assert trace.get_current_span().is_recording()
    with opdrift.record(tmp_path / "c.trace", integrations=[spans.integration]):
        pass

    failures = [opdrift.load(tmp_path / f"{name}.trace").footer.failures for name in "abc"]
    assert [len(each) for each in failures] == [0, 1, 0]
    assert "attached to another recording" in failures[1][0]["error"]
    assert [s.name for s in spans.ended].count("torch.run") == 2


def test_a_tracer_that_fails_does_not_reach_the_program(spans, tmp_path):
    """What it could not be told is noted in the trace."""

    class Broken:
        def start_span(self, name, *args, **options):
            if name == "0 (Linear)":
                raise RuntimeError("no exporter")
            return spans.tracer.start_span(name, *args, **options)

    net = model()
    with opdrift.record(
        tmp_path / "a.trace", model=net, integrations=[OpenTelemetryIntegration(Broken())]
    ):
        result = net(torch.ones(2, 4))

    assert result.shape == (2, 4)
    (failure,) = opdrift.load(tmp_path / "a.trace").footer.failures
    assert "no exporter" in failure["error"]
    assert ("1.0 (ReLU)", "1 (Sequential)") in spans.nesting


def test_modules_of_other_threads_are_not_told(spans, tmp_path):
    """A recording belongs to the thread that began it, and so do its spans."""
    net = model()
    with opdrift.record(tmp_path / "a.trace", model=net, integrations=[spans.integration]):
        thread = threading.Thread(target=net, args=(torch.ones(2, 4),))
        thread.start()
        thread.join()

    assert spans.nesting == [("torch.run", None)]


def test_it_goes_with_what_attaches_by_itself(spans, tmp_path):
    """integrations=["auto", spans]."""
    with opdrift.record(tmp_path / "a.trace", integrations=["auto", spans.integration]):
        model()(torch.ones(2, 4))

    assert len(spans.ended) == 5
    assert opdrift.load(tmp_path / "a.trace").footer.failures == ()


def test_a_class_is_no_integration(spans):
    """It wants to be made, with a tracer."""
    with pytest.raises(opdrift.InvalidOptionError, match="integrations that you made yourself"):
        opdrift.record("never.trace", integrations=[OpenTelemetryIntegration])
