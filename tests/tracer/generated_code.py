"""Graphs as inductor's, without its compiler: their code is a Python function that the dispatcher does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.debug  # inductor's own code takes it to be loaded
from torch._inductor.output_code import CompiledFxGraph

SOURCE = """
cpp_fused_mul_0 = async_compile.cpp_pybinding(['float*'], '''...''')
def call(self, args):
    extern_kernels.addmm(arg0_1, arg1_1, out=buf0)
    torch.ops.aten.convolution.default(buf0, arg2_1)
"""


def unseen(run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel: what it runs is no op of any mode, and moves no version counter."""

    def kernel(*given: Any) -> Any:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            return run(*given)

    return kernel


class Compiled:
    """A compiled function; its code takes the list of inputs, and returns the list of outputs.

    Args:
        code: What was generated for it.
        facts: Attributes of the graph that are other than usual.
    """

    def __init__(self, code: Callable[[list[Any]], Sequence[Any]], **facts: Any) -> None:
        self.graph = made = CompiledFxGraph.__new__(CompiledFxGraph)
        made.fx_kwargs = {"graph_id": 7, "is_backward": False, "is_inference": True}  # type: ignore[typeddict-item]
        made.mutated_input_idxs = set()  # type: ignore[assignment]
        made.source_code = SOURCE
        made._fx_graph_cache_key = "fkey"  # type: ignore[attr-defined]
        made.disabled_cudagraphs_reason = None
        made.compiled_fn_runner = None
        made.current_callable = code
        for name, value in facts.items():
            setattr(made, name, value)

    def __call__(self, *inputs: Any) -> Any:
        out = self.graph(list(inputs))
        return out[0] if len(out) == 1 else out


def scaling(factor: float) -> Compiled:
    """A compiled function that multiplies by a number."""
    return Compiled(lambda inputs: [unseen(lambda x: x * factor)(*inputs)])
