"""Walking from values to the ops that made and used them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from opdrift.records import Argument, TensorMeta
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace


def base_name(name: str) -> str:
    """`aten.add_.Tensor` -> `add`."""
    parts = name.split(".")
    op = parts[1] if len(parts) > 1 else name
    return op[:-1] if op.endswith("_") and not op.endswith("__") else op


class Flow:
    """Names, inputs, outputs, makers and users of the ops of one trace, by index."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._names: dict[int, str] = {}
        self._arguments: dict[int, dict[str, Argument]] = {}

    def name(self, index: int) -> str:
        """Base name of an op."""
        signature = int(self.trace.ops.signature[index])
        found = self._names.get(signature)
        if found is None:
            found = self._names[signature] = base_name(self.trace.op_info(signature).name)
        return found

    def arguments(self, index: int) -> dict[str, Argument]:
        """Arguments of an op by name, without defaults."""
        signature = int(self.trace.ops.signature[index])
        found = self._arguments.get(signature)
        if found is None:
            found = dict(self.trace.signature(signature).arguments)
            self._arguments[signature] = found
        return found

    def inputs(self, index: int) -> list[int]:
        """Value ids of an op's tensor arguments."""
        return [int(v) for v in self.trace.ops.inputs[index]]

    def outputs(self, index: int) -> list[int]:
        """Value ids of an op's outputs."""
        return [int(v) for v in self.trace.ops.outputs[index]]

    def meta(self, value: int) -> TensorMeta:
        """A value's layout."""
        return self.trace.meta(value)

    def maker(self, value: int, before: int) -> int | None:
        """Index of the last op before another that made a value; None for a leaf.

        Views of equal layout are one value, so calls that view the same tensor make it again and again.
        An op that returned the value it was given did not make it.
        """
        values, rows = self._makers
        start, end = np.searchsorted(values, [value, value + 1])
        at = int(start + np.searchsorted(rows[start:end], before))
        return int(rows[at - 1]) if at > start else None

    def users(self, value: int) -> list[int]:
        """Indices of the ops that take a value, in order."""
        values, rows = self._uses
        start, end = np.searchsorted(values, [value, value + 1])
        return [int(i) for i in rows[start:end]]

    def indices(self, *names: str) -> list[int]:
        """Indices of the ops with one of these base names, in order."""
        signatures = self.trace.ops.signature
        wanted = [
            s
            for s in np.unique(signatures).tolist()
            if base_name(self.trace.op_info(s).name) in names
        ]
        return [int(i) for i in np.flatnonzero(np.isin(signatures, wanted))]

    @cached_property
    def _makers(self) -> tuple[Ints, Ints]:
        """Values in order, and the ops that made each, in order."""
        inputs, outputs = self.trace.ops.inputs, self.trace.ops.outputs
        size = len(self.trace.values.storage)
        pairs = outputs.rows() * size + outputs.values
        # np.isin takes three times the memory and far longer: it does not know that rows are in order
        given = np.sort(inputs.rows() * size + inputs.values, kind="stable")
        given = np.append(given, -1)  # for what is searched beyond the end
        made = given[np.searchsorted(given[:-1], pairs)] != pairs
        values, rows = outputs.values[made], outputs.rows()[made]
        order = np.lexsort((rows, values))
        return values[order], rows[order]

    @cached_property
    def _uses(self) -> tuple[Ints, Ints]:
        inputs = self.trace.ops.inputs
        order = np.argsort(inputs.values, kind="stable")
        return inputs.values[order], inputs.rows()[order]
