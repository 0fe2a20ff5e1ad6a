"""A run recorded and read back, in the words of the tests of recording."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import opdrift
from opdrift.findings import findings
from opdrift.records import Finding, Leaf, Op


@dataclass
class Recording:
    """What a block recorded; `trace` is there once the block has ended."""

    recorder: opdrift.Recorder
    trace: Any = None

    @property
    def ops(self) -> list[Op]:
        return [self.trace.op(index) for index in range(len(self.trace.ops))]

    def op(self, name: str) -> Op:
        """The last op of a name such as `add.Tensor`."""
        return [op for op in self.ops if op.name == f"aten.{name}"][-1]

    def leaves(self, name: str) -> list[Leaf]:
        return [leaf for leaf in self.trace.leaves if leaf.name == name]

    def elements(self, value: int) -> list[float] | None:
        """A small float32 content as fingerprinted; None if it was not."""
        fingerprint = self.trace.fingerprint(value)
        if fingerprint is None:
            return None
        bits: Any = fingerprint.sample.astype(np.uint32)
        return bits.view(np.float32).tolist()

    def read(self, name: str) -> list[list[float] | None]:
        """What the last op of a name read, an entry a tensor."""
        return [self.elements(value) for value in self.op(name).inputs]

    def wrote(self, name: str) -> list[list[float] | None]:
        """What the last op of a name returned or wrote, an entry a tensor."""
        return [self.elements(value) for value in self.op(name).outputs]

    @property
    def paths(self) -> list[tuple[str, int]]:
        """Path and number of each module call."""
        return [(call.path, call.number) for call in self.trace.calls[1:]]

    @property
    def findings(self) -> list[Finding]:
        return list(findings([self.trace]))


@contextmanager
def recording(**options: Any) -> Iterator[Recording]:
    """Record a block, which must leave a whole trace without failures of the tracer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.trace"
        with opdrift.record(path, **{"integrations": (), **options}) as recorder:
            recording = Recording(recorder)
            yield recording
        recording.trace = opdrift.load(path)
        assert recording.trace.incomplete is None
        assert recording.trace.footer.failures == ()


def recorded(run: Callable[[], Any], **options: Any) -> Recording:
    """Record a function; what it returns lives until the recording has ended."""
    with recording(**options) as found:
        kept = run()
    del kept
    return found
