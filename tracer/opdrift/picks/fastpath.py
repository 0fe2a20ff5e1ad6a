"""Why torch.nn did not take its fast paths, in torch's own words, as the recorder found them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

from opdrift.tracefile.reader import Trace

#: Fused ops of modules; attention inside them is none of SDPA's backends.
FUSED: Final = {
    "_transformer_encoder_layer_fwd": "the fast path of nn.TransformerEncoderLayer",
    "_native_multi_head_attention": "the fast path of nn.MultiheadAttention",
}


class FastPaths:
    """What the marks of a trace say about fast paths, by module path."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._said: dict[str, list[tuple[int, Mapping[str, str]]]] = {}
        for mark in trace.marks:
            if mark.kind == "fast-path":
                path = trace.calls[mark.call].path
                self._said.setdefault(path, []).append((mark.seq, mark.fields))

    def refused(self, index: int) -> dict[str, str]:
        """Fast paths that the attention at an op did not take, and why; the innermost first."""
        said = self._said.get(self._trace.calls[int(self._trace.ops.call[index])].path, ())
        # a mark carries the number of the last op before it
        at = bisect_right(said, int(self._trace.ops.seq[index]) - 1, key=lambda each: each[0])
        if not at:
            return {}
        return {f"fast path of nn.{kind}": words for kind, words in said[at - 1][1].items()}
