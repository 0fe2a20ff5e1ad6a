"""Open spans while a run is recorded, through the program's own tracer: for run, steps and module calls.

    provider = ...  # the program's own
    spans = OpenTelemetryIntegration(provider.get_tracer("training"))
    with opdrift.record("monday.trace", model=model, integrations=["auto", spans]):
        model(tokens)

What the program does inside, logs and spans of its own among it, belongs to the module that does it: the spans are
current while they are open. No provider is made and none is set; `opdrift export otlp` sends a trace's ops afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any, cast

from opentelemetry import context
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from opdrift.plugins import ModuleCall, RecorderLike
from opdrift_integrations.paths import with_class


@dataclass(frozen=True, slots=True)
class _Open:
    """A span that is current on its thread.

    Attributes:
        call: The module call that it is of; 0 for the run and for steps.
        handled: The exception that was being handled when it began: not one of its own.
    """

    span: Span
    token: Token[Context]
    call: int
    handled: BaseException | None


@dataclass(slots=True)
class _Run:
    """One recording.

    Attributes:
        base: The context in which the run's span is current.
        stacks: The open spans of each thread, the innermost last.
    """

    base: Context
    stacks: dict[int, list[_Open]] = field(default_factory=dict)


class _Ids:
    """Ids that are not drawn from Python's `random`, whose state is the program's.

    The SDK's own generator draws from there, so that each span would change what a seeded program draws next.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self._system = random.SystemRandom()

    def generate_span_id(self) -> int:
        """A number that is not 0."""
        return self._system.randrange(1, 2**64)

    def generate_trace_id(self) -> int:
        """The program's generator may put a meaning into these; they are made for a run without parent only."""
        with _random_untouched():
            return int(self._program.generate_trace_id())

    def is_trace_id_random(self) -> bool:
        """As of the program's generator; older ones do not say."""
        return bool(getattr(self._program, "is_trace_id_random", bool)())


@contextlib.contextmanager
def _random_untouched() -> Iterator[None]:
    """Draw from a state of our own meanwhile: the program's would give the same number again next time."""
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def _neutral(tracer: Tracer) -> Tracer:
    """A tracer that does all as this one, but takes its ids from elsewhere; this one if it is not of the SDK."""
    generator = getattr(tracer, "id_generator", None)
    if generator is None:
        return tracer
    own: Any = copy.copy(tracer)
    own.id_generator = _Ids(generator)
    return cast("Tracer", own)


class OpenTelemetryIntegration:
    """Spans for the run, its steps and its module calls; the attributes are those of docs/otel-attributes.md.

    Args:
        tracer: From the program's provider. It decides about sampling, limits, processors and exporters.
    """

    name = "opentelemetry"
    library = "opentelemetry"

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = _neutral(tracer)
        #: whether starting a span may draw from `random`
        self._draws = self._tracer is tracer
        self._run: _Run | None = None

    @contextlib.contextmanager
    def attach(self, recorder: RecorderLike) -> Iterator[None]:
        """Open the run's span; whatever is still open is closed at the end."""
        if self._run is not None:
            raise RuntimeError(
                "this OpenTelemetryIntegration is attached to another recording; make one for each"
            )
        span = self._start("torch.run")
        run = self._run = _Run(set_span_in_context(span))
        here = run.stacks[threading.get_ident()] = []
        self._push(here, span, 0)
        try:
            yield
        finally:
            self._run = None
            for stack in (*(s for s in run.stacks.values() if s is not here), here):
                while stack:
                    # what other threads left open is not current here
                    self._pop(stack, current=stack is here)

    def entered(self, call: ModuleCall) -> None:
        """See `SeesModules`."""
        run = self._run
        if run is None:
            return
        stack = run.stacks.setdefault(threading.get_ident(), [])
        self._return_to(stack, call.parent)  # a KeyboardInterrupt leaves modules without a word
        said: dict[str, str | int | bool] = {
            "torch.module.path": call.path,
            "torch.module.type": call.kind,
            "torch.module.call_index": call.number,
            "torch.module.training": call.training,
        }
        # a thread of autograd's has no context of the program's
        parent = None if stack else run.base
        name = with_class(call.path, call.kind)
        self._push(stack, self._start(name, parent, attributes=said), call.id)

    def returned(self, call: int) -> None:
        """See `SeesModules`."""
        run = self._run
        if run is not None:
            self._return_to(run.stacks.get(threading.get_ident(), []), call)

    def marked(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A step ends the one before it; in the middle of a module it is an event, because it cannot end that."""
        run = self._run
        stack = [] if run is None else run.stacks.get(threading.get_ident(), [])
        if run is None or not stack or kind != "step":
            return
        number = fields.get("step")
        said = {"torch.step": number} if isinstance(number, int) else {}
        if stack[-1].call:
            stack[-1].span.add_event("torch.step", said)
            return
        if len(stack) > 1:
            self._pop(stack)
        self._push(stack, self._start("torch.step", attributes=said), 0)

    def _start(
        self,
        name: str,
        parent: Context | None = None,
        attributes: Mapping[str, str | int | bool] | None = None,
    ) -> Span:
        with _random_untouched() if self._draws else contextlib.nullcontext():
            return self._tracer.start_span(name, parent, attributes=attributes)

    def _return_to(self, stack: list[_Open], call: int) -> None:
        while stack and stack[-1].call not in (0, call):
            self._pop(stack)

    def _push(self, stack: list[_Open], span: Span, call: int) -> None:
        token = context.attach(set_span_in_context(span))
        stack.append(_Open(span, token, call, sys.exception()))

    def _pop(self, stack: list[_Open], *, current: bool = True) -> None:
        ended = stack.pop()
        error = sys.exception()
        if error is not None and error is not ended.handled and ended.span.is_recording():
            ended.span.record_exception(error)
            ended.span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        if current:
            context.detach(ended.token)
        ended.span.end()
