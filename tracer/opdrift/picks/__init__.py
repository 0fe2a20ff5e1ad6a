"""Which implementation an op ran, and why, from what the trace holds.

A fused attention op *is* the pick; the math path and attention written by hand are recognised by data
flow (`attention_regions`), and why other backends were refused follows from torch's own rules, as does the
library of an op on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Final

from opdrift.picks.attention import AttentionRegion, attention_regions
from opdrift.picks.cpu import product_sizes, routine
from opdrift.picks.device import counted_kernels, with_kernels
from opdrift.picks.fastpath import FUSED, FastPaths
from opdrift.picks.names import named
from opdrift.picks.observed import SOURCES, Observed, Seen, Source, counted
from opdrift.picks.sdpa_calls import SdpaCall, SdpaCalls, decisive
from opdrift.picks.settings import Settings
from opdrift.picks.values import Flow, base_name
from opdrift.picks.verbose import read_line, with_calls
from opdrift.records import RAISED, Pick
from opdrift.tracefile.reader import Trace

__all__ = ["AttentionRegion", "Picks", "SdpaCall", "Settings", "attention_regions", "decisive"]

#: Seen whole under inference_mode, where the dispatcher does not split it.
_WHOLE: Final = "scaled_dot_product_attention"
#: Library of a backend that is told by rule, on CPUs and GPUs.
_LIBRARY: Final = {
    ("cpu", "FLASH_ATTENTION"): "ATen",
    ("cuda", "FLASH_ATTENTION"): "FlashAttention",
    ("cuda", "EFFICIENT_ATTENTION"): "CUTLASS",
    ("cuda", "CUDNN_ATTENTION"): "cuDNN",
}


class Picks:
    """Which implementations the ops of one trace ran."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._flow = Flow(trace)
        self._settings = Settings(trace)
        self._calls = SdpaCalls(self._flow, self._settings)

    @cached_property
    def regions(self) -> list[AttentionRegion]:
        """Attention calls that ran as several ops, in order."""
        return attention_regions(self._trace, self._flow)

    @cached_property
    def _fast_paths(self) -> FastPaths:
        return FastPaths(self._trace)

    @cached_property
    def _observed(self) -> Observed:
        return Observed(self._trace)

    def of(self, index: int) -> Pick | None:
        """What the op at an index ran by itself; None where there is no choice or it is not known."""
        name = self._trace.op_info(int(self._trace.ops.signature[index])).name
        chosen = self._by_rule(index, name)
        seen = self.seen(index, "verbose")
        if seen is not None:
            chosen = with_calls(chosen, name, seen)
        seen = self.seen(index, "profiler")
        return chosen if seen is None else with_kernels(chosen, name, seen)

    def seen(self, index: int, source: Source) -> Seen | None:
        """What was observed of an op while it ran (`kernels="full"`); None if it was not watched."""
        return self._observed.of(int(self._trace.ops.seq[index]), source)

    def _by_rule(self, index: int, name: str) -> Pick | None:
        op = base_name(name)
        if op in FUSED:
            refused = self._fast_paths.refused(index)
            return Pick(name, "ATen", None, FUSED[op], refused, "dispatcher")
        if op == _WHOLE and name.startswith("aten."):
            return self._whole(index, name)
        found = named(name, amd="hip" in self._trace.header.versions)
        if found is not None:
            return self._with_refusals(found, self.call(index), index)
        if op == "_safe_softmax":
            reason = "nothing but the math path of SDPA calls it"
            return Pick(name, "ATen", "MATH", reason, source="dispatcher")
        return routine(self._trace, index, self._settings)

    def of_region(self, region: AttentionRegion) -> Pick:
        """What a region of several ops stands for, with what all of them called."""
        lines, kernels = (
            [name for op in region.ops if (seen := self.seen(op, source)) for name in seen.names]
            for source in SOURCES
        )
        observed = counted(read_line(line).text for line in lines) + counted_kernels(kernels)
        return replace(self._region_by_rule(region), observed=observed)

    def _region_by_rule(self, region: AttentionRegion) -> Pick:
        if region.backend is None:
            refused = self._fast_paths.refused(region.softmax)
            reason = "attention written out in ops"
            return Pick(region.name, "ATen", None, reason, refused, "inferred")
        found = Pick(region.name, "ATen", region.backend, source="dispatcher")
        return self._with_refusals(found, self._calls.of_region(region), region.softmax)

    def call(self, index: int) -> SdpaCall | None:
        """The facts of a call of SDPA that is one op."""
        return self._calls.of_op(index)

    def call_of_region(self, region: AttentionRegion) -> SdpaCall | None:
        """The facts of a call of SDPA that ran as torch's math path."""
        return None if region.backend is None else self._calls.of_region(region)

    def sizes(self, index: int) -> tuple[int, ...] | None:
        """(m, n, k) of a product, (batch, m, n, k) of several; None for other ops."""
        return product_sizes(self._trace, index)

    def _whole(self, index: int, name: str) -> Pick | None:
        """SDPA as one op: which backend is inside follows from the rules."""
        call = self.call(index)
        if call is None or int(self._trace.ops.flags[index]) & RAISED:
            return None
        if call.facts.empty:
            return Pick(name, "ATen", None, "an operand has no elements: torch computes zeros")
        backend = call.taken()
        if backend is None:
            return None
        library = _LIBRARY.get((call.facts.device, backend), "ATen")
        by = "torch's own check" if call.answers else "torch's rules"
        found = Pick(name, library, backend, f"by {by}; the op is not split here")
        return self._with_refusals(found, call, index)

    def _with_refusals(self, found: Pick, call: SdpaCall | None, index: int) -> Pick:
        refused: dict[str, str] = {}
        reason = found.reason
        if call is not None and found.backend is not None and "backward" not in found.name:
            refused = call.refused_before(found.backend)
            if len(refused) == 1:
                (reason,) = refused.values()
            elif refused:
                reason = "torch tries it after those that refused"
            elif found.source == "dispatcher" and call.judged:
                reason = "torch tries it first, and it takes the call"
        others = self._fast_paths.refused(index)
        return replace(found, reason=reason, refused={**refused, **others})

    def among(self, ops: Iterable[int]) -> dict[int, Pick]:
        """Op index -> what ran, where it is known; an attention of several ops at its first."""
        asked = set(ops)
        found = {}
        near = {int(self._trace.ops.call[i]) for i in asked}
        for region in attention_regions(self._trace, self._flow, calls=near):
            if region.ops[0] in asked:
                found[region.ops[0]] = self.of_region(region)
            asked.difference_update(region.ops)
        for index in sorted(asked):
            chosen = self.of(index)
            if chosen is not None:
                found[index] = chosen
        return dict(sorted(found.items()))
