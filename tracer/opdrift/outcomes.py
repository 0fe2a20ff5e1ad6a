"""What an op left behind: what it returned, what it wrote, and what is not there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from opdrift.collectives import waited
from opdrift.interning import parts
from opdrift.memory import InFlight, Use, under_way
from opdrift.neutral import filled_parts, is_synchronous, work_of, written_tensors
from opdrift.records import PENDING, UNFINGERPRINTED
from opdrift.transfers import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opdrift.buffers import ThreadBuffers
    from opdrift.collectives import Collectives
    from opdrift.plans import Plan
    from opdrift.values import Values


class Outcomes:
    """Registers outputs and written tensors; what returns an int returns flags of the op.

    Args:
        values: Identity and content of tensors.
        collectives: Says what is waited for.
        write_mark: Writes a mark: (thread buffers, kind, fields).
    """

    def __init__(
        self,
        values: Values,
        collectives: Collectives,
        write_mark: Callable[[ThreadBuffers, str, Mapping[str, Any]], None],
    ) -> None:
        self._values = values
        self._collectives = collectives
        self._write_mark = write_mark

    def returned(self, t: ThreadBuffers, plan: Plan, out: Any, outputs: list[int]) -> None:
        """Register the tensors among what an op returned."""
        for item in out:
            if isinstance(item, Tensor):
                if type(item).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                    continue  # made by an inner mode (FakeTensor): its memory, if any, is not ours to read
                try:
                    self._values.output(t, item, outputs, plan)
                except (RuntimeError, NotImplementedError):
                    self.in_parts(t, item, outputs, plan)
            elif isinstance(item, list | tuple):
                self.returned(t, plan, item, outputs)

    def in_parts(self, t: ThreadBuffers, out: Tensor, outputs: list[int], plan: Plan) -> None:
        """Register a sparse or nested tensor by the plain ones that hold it."""
        for part in parts(out):
            self._values.output(t, part, outputs, plan)

    def copied(self, t: ThreadBuffers, use: Use, out: Tensor, outputs: list[int]) -> int:
        """What a copy returned, which may not have arrived yet if it comes from a device."""
        in_flight = None
        if not use.plan.writes:
            self._moved(t, use, out)
            in_flight = self._under_way(use, out)
        if in_flight is not None:
            self._values.arriving(t, out, outputs, in_flight)
            return PENDING | UNFINGERPRINTED
        self.returned(t, use.plan, (out,), outputs)
        return 0

    def written(self, t: ThreadBuffers, use: Use, outputs: list[int]) -> int:
        """Register what an op has written."""
        strided: list[Tensor] = []
        for tensor in filled_parts(*use):
            try:
                tensor.untyped_storage()
                tensor.stride()
                strided.append(tensor)
            except (RuntimeError, NotImplementedError):
                strided.extend(parts(tensor))
        in_flight = None
        if use.plan.copies and strided:
            self._moved(t, use, strided[0])
            in_flight = self._under_way(use, strided[0])
        self._values.written(t, strided, outputs, use=use, in_flight=in_flight)
        return 0 if in_flight is None else PENDING | UNFINGERPRINTED

    def _moved(self, t: ThreadBuffers, use: Use, out: Tensor) -> None:
        """Tell of a copy that went from one device to another."""
        fields = transfer(use, out, self._values.key, t.path)
        if fields is not None:
            self._write_mark(t, "move", fields)

    def _under_way(self, use: Use, target: Tensor) -> InFlight | None:
        """As `under_way`; where everything is waited for at once, so is this."""
        found = under_way(use, target)
        if found is not None and self._collectives.synchronised:
            found.wait()
            return None
        return found

    def collective(self, t: ThreadBuffers, use: Use, out: Any, outputs: list[int]) -> int:
        """A collective's output is not there when the mode regains control (H1).

        A synchronous one may be waited for here, since the program waits next anyway; an asynchronous
        one never: on gloo a second wait hangs or writes the result again (integrity I1).
        """
        work = work_of(out)
        tensors = written_tensors(*use)
        # that of a message on gloo says so once the program's own wait has returned, and only then
        readable = "reduce_scatter" not in use.plan.name
        if work is None and "recv" in use.plan.name:  # one of a batch on a device: nothing tells
            self._values.written(t, tensors, outputs, in_flight=InFlight(None, readable=False))
            return PENDING | UNFINGERPRINTED
        if work is None or (use.plan.waits and is_synchronous(*use)):
            if work is None or waited(work):
                self._values.written(t, tensors, outputs)
                return 0
            self._values.written(t, tensors, outputs, in_flight=InFlight(None, readable=False))
            return PENDING | UNFINGERPRINTED
        if use.plan.waits and self._collectives.settled(work, readable=readable):
            self._values.written(t, tensors, outputs)
            return 0
        message = "recv" in use.plan.name
        in_flight = InFlight(work, readable=readable, message=message)
        self._values.written(t, tensors, outputs, in_flight=in_flight)
        return PENDING | UNFINGERPRINTED
