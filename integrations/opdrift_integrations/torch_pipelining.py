"""torch's pipeline parallelism: the trial run by which a stage learns the shapes that it sends and receives.

Before its first step a stage runs its module forward, and backward, once more (torch 2.13: `PipelineStage.
_forward_metadata_inference` and `_backward_metadata_inference`), on memory that nothing has written unless it is the
first, and throws away what comes out. Its ops are not recorded: their inputs are no inputs of the run. What it leaves
behind is written down, in marks:

`trial`  `library` "torch_pipelining", `unit` (path of the stage's module; null if the recorder does not know it), `stage`
         (its number), `phase` (forward or backward), `unwritten` (it ran on memory that nothing has written) and
         `buffers` (those that it wrote: running statistics).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator, Iterator
from typing import Any, Final

from opdrift.plugins import Digest, RecorderLike
from opdrift_integrations.digests import same
from opdrift_integrations.failures import Failures
from opdrift_integrations.patching import watch
from opdrift_integrations.paths import join

#: What runs a trial, by version of torch: the first of each line that is there.
_FORWARD: Final = ("_forward_metadata_inference", "_shape_inference")
_BACKWARD: Final = "_backward_metadata_inference"


class TorchPipeliningIntegration:
    """Leaves out the trial runs of `torch.distributed.pipelining`, and says what they wrote."""

    name = "torch_pipelining"
    library = "torch.distributed.pipelining.stage"

    @contextlib.contextmanager
    def attach(self, recorder: RecorderLike) -> Iterator[None]:
        """Watch the stages that this thread runs inside the block."""
        owner = importlib.import_module(self.library).PipelineStage
        failures = Failures(recorder, self.name, "torch's pipelining")
        forward = next((name for name in _FORWARD if name in vars(owner)), None)
        if forward is None:
            failures.missing(f"PipelineStage.{_FORWARD[0]}")
        trials = _Trials(recorder)
        with contextlib.ExitStack() as stack:
            if forward is not None:
                stack.enter_context(watch(owner, forward, trials.forward, failures))
            if _BACKWARD in vars(owner):
                stack.enter_context(watch(owner, _BACKWARD, trials.backward, failures))
            yield


class _Trials:
    """The observers of one recorder."""

    def __init__(self, recorder: RecorderLike) -> None:
        self._recorder = recorder

    def forward(self, stage: Any, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        yield from self._trial(stage, "forward")

    def backward(self, stage: Any, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        yield from self._trial(stage, "backward")

    def _trial(self, stage: Any, phase: str) -> Generator[None, Any, None]:
        path = self._recorder.clean_path(stage.submod)
        before = self._buffers(stage)
        with self._recorder.pause():
            yield
        written = [
            name
            for name, now in self._buffers(stage).items()
            if same(before.get(name), now) is False
        ]
        with self._recorder.quiet():
            for name, buffer in stage.submod.named_buffers():
                if name in written and path is not None:
                    self._recorder.name_tensor(buffer, join(path, name), kind="buffer")
        self._recorder.mark(
            "trial",
            library="torch_pipelining",
            unit=path,
            stage=int(stage.stage_index),
            phase=phase,
            unwritten=not stage.is_first,
            buffers=[join(path or "", name) for name in written],
        )

    def _buffers(self, stage: Any) -> dict[str, Digest | None]:
        with self._recorder.quiet():
            return {name: self._recorder.digest(b) for name, b in stage.submod.named_buffers()}
