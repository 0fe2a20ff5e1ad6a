"""Scratch memory that a collective filled: the library copies its result out of it while the program waits.

gloo reduces a whole buffer of its own for a reduce_scatter, and `Work.wait` copies this rank's part out of it, with ops
that the dispatcher sees. The buffer comes from C++, so that it looks like a tensor from outside the run; its content is
the collective's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

_COPY: Final = "aten.copy_.default"
_COLLECTIVES: Final = "c10d."


def deliveries(trace: Trace, of: Ints, writer: Ints, before: Ints) -> Iterator[tuple[int, int]]:
    """(state of such memory, index of the collective that filled it).

    What tells it: it has no name, nothing touched it before the collective, and the first that becomes of it is a copy
    into what the collective had written, which changes nothing there as far as that is known.

    Args:
        trace: The run.
        of: State of each value.
        writer: Op index that brought a storage to each state; -1 for leaves.
        before: The state of the same storage before each, -1 for the first one seen.
    """
    signatures = {s: trace.op_info(s).name for s in np.unique(trace.ops.signature).tolist()}
    collectives = {s for s, name in signatures.items() if name.startswith(_COLLECTIVES)}
    copying = [s for s, name in signatures.items() if name == _COPY]
    if not copying or not collectives:
        return
    columns, ops = trace.values, trace.ops
    strange = {int(of[leaf.value]) for leaf in trace.leaves if not leaf.name and leaf.when == "use"}
    strange -= {int(of[leaf.value]) for leaf in trace.leaves if leaf.name}
    for copy in np.flatnonzero(np.isin(ops.signature, copying)).tolist():
        inputs, outputs = ops.inputs[copy].tolist(), ops.outputs[copy].tolist()
        if len(inputs) != 2 or not outputs:
            continue
        target, source = inputs
        state, filled_by = int(of[source]), int(writer[of[target]])
        if state not in strange or writer[state] >= 0 or before[state] >= 0:
            continue
        if filled_by < 0 or int(ops.signature[filled_by]) not in collectives:
            continue
        rows = columns.fingerprint[target], columns.fingerprint[outputs[0]]
        if min(rows) >= 0 and len({trace.fingerprints.key(int(row)) for row in rows}) > 1:
            continue  # it is something else than what the collective had brought
        yield state, filled_by
