"""What must be known of an overload before it runs: what it writes, whether its outputs can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload

from opdrift.choices import what_to_ask

#: Writes that schemas do not declare: name -> positions of the written arguments.
#: Measured on torch 2.13 (notes: integrity 9); batch norm is the only such aten op (integrity I8).
UNDECLARED: Final[dict[str, tuple[int, ...]]] = {
    "c10d::allreduce_": (0,),
    "c10d::allreduce_coalesced_": (0,),
    "c10d::broadcast_": (0,),
    "c10d::allgather_": (0,),
    "c10d::_allgather_base_": (0,),
    "c10d::allgather_coalesced_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::reduce_scatter_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::reduce_scatter_tensor_coalesced_": (0,),
    "c10d::reduce_": (0,),
    "c10d::gather_": (0,),
    "c10d::scatter_": (0,),
    "c10d::alltoall_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::recv_": (0,),
    "c10d::recv_any_source_": (0,),
    "fsdp::all_gather_copy_in": (1,),
    # the content of a functional collective's output arrives here
    "_c10d_functional::wait_tensor": (0,),
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
#: These hand out memory without writing it.
UNINITIALISED: Final = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "empty_quantized",
    }
)
#: These change which memory a tensor stands for; they write no content.
REBINDING: Final = frozenset(
    {"resize_", "set_", "resize_as_", "_resize_output_", "resize_as_sparse_"}
)
#: These write into their first argument without reading it.
OVERWRITING: Final = frozenset(
    {
        "fill_",
        "zero_",
        "copy_",
        "uniform_",
        "normal_",
        "bernoulli_",
        "random_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    }
    | {"_foreach_copy_", "_foreach_zero_", "eye", "arange"}
)
#: Collectives that fill their outputs without reading them (notes: integrity 9).
FILLING: Final = frozenset(UNDECLARED) - {
    "c10d::allreduce_",
    "c10d::allreduce_coalesced_",
    "c10d::reduce_",
    "_c10d_functional::wait_tensor",
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
}
#: These write those elements of their first argument that another argument names, and leave the rest.
SCATTERING: Final = frozenset(
    {
        "index_copy_",
        "index_fill_",
        "index_put_",
        "_index_put_impl_",
        "masked_fill_",
        "masked_scatter_",
        "put_",
        "scatter_",
        "fill_diagonal_",
    }
)
#: These are one op for autograd, and made of ops that autocast casts: measured over torch's own samples of ops and
#: `affine_grid`. A table, since of others (`_safe_softmax`) autocast is off inside where an op of its lists calls them.
CASTING_INSIDE: Final = frozenset(
    {
        "aten::_scaled_mm",  # on a CPU without AMX
        "aten::_sparse_addmm",
        "aten::_trilinear",
        "aten::affine_grid_generator",
        "aten::linalg_pinv",
    }
)
#: Of their tensor arguments these read the layout only.
LAYOUT_ONLY: Final = frozenset(
    {
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "is_same_size",
        "sym_size",
        "barrier",  # it needs a tensor for its device only
    }
)
#: These copy between devices, and with `non_blocking` they return before the copy is done.
COPYING: Final = frozenset({"aten::_to_copy", "aten::copy_"})
#: Collectives whose output another thread fills; only `wait` says when (notes: integrity I1).
NEVER_WAIT: Final = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_"})


class Plan:
    """The facts of one overload, made at its first call.

    Attributes:
        id: Number of the op in the trace.
        call: What to call to run the op (the overload's C++ entry where there is one).
        writes: (position or None, name) of each argument that the op writes into.
        quiet: Its outputs are not fingerprinted: views, fresh memory, collectives that are not done.
        fresh: It hands out memory that nothing has written.
        deferred: What it returns is filled later (functional collectives).
        rebinds: It changes a tensor's memory, not its content.
        copies: It may copy from a device to the host without waiting.
        settled: What it returns is content, and there once it has returned.
        reads: It reads the content of its tensor arguments, but for those it `overwrites` or `scatters` into.
        overwrites: It writes into arguments without reading them.
        fills_own_slice: It fills its own rank's slice of the buffer that it writes into.
        hands_on: It puts one tensor's content into another, and looks at none of it: unwritten memory stays that.
        scatters: It writes a part of its first argument that another argument names, without reading it.
        bumps: Version counters of what it writes go up once the mode has returned.
        seeded: It may draw from a generator.
        collective: It is of c10d and returns a Work.
        joins: It talks to other ranks and is announced before it runs (`collectives`).
        waits: Its Work may be waited for inside the mode if the program asked for a synchronous call.
        asks: What steers the choice of its implementation and has to be looked at (`choices`); 0 for nothing.
        async_index: Position of `async_op` in the schema, or None.
        lists_written: It writes into lists of tensors, whose version counters torch forgets under a mode.
        composite: It is made of other ops, so it must run with the program's own dispatch keys.
        casts_inside: Autocast casts the operands of ops that it is made of.
        aliasing: It is made of other ops, and returns views or writes: those must be known to autograd as such.
        scalar: It returns a Python number.
        repair: It must run through `neutral.run`.
    """

    __slots__ = (
        "aliasing",
        "asks",
        "async_index",
        "bumps",
        "call",
        "casts_inside",
        "collective",
        "composite",
        "copies",
        "deferred",
        "fills_own_slice",
        "fresh",
        "func",
        "hands_on",
        "id",
        "joins",
        "lists_written",
        "name",
        "overwrites",
        "quiet",
        "reads",
        "rebinds",
        "repair",
        "scalar",
        "scatters",
        "seeded",
        "settled",
        "waits",
        "writes",
    )

    def __init__(self, func: Any, ident: int) -> None:
        self.id = ident
        self.asks = 0
        self.func = func
        self.name = str(func)
        # `_op` skips OpOverload.__call__, a Python frame; c10d ops and higher-order ops have none that fits
        self.call: Callable[..., Any] = func._op if type(func) is OpOverload else func
        self.writes: tuple[tuple[int | None, str], ...] = ()
        self.quiet = self.fresh = self.rebinds = self.seeded = self.copies = False
        self.joins = False
        self.collective = self.waits = self.lists_written = self.composite = self.scalar = False
        self.async_index: int | None = None
        self.repair = self.overwrites = self.scatters = self.bumps = self.deferred = False
        self.aliasing = self.casts_inside = False
        self.fills_own_slice = False
        self.hands_on = False
        self.reads = self.settled = True
        # c10d ops are TorchBindOpOverload, a subclass: an exact type test would lose their write table
        if not isinstance(func, OpOverload):
            return
        schema = func._schema
        arguments = schema.arguments  # asked for once: torch makes them anew each time
        written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        space, base = schema.name.split("::")
        self.asks = what_to_ask(base, schema.overload_name) if space == "aten" else 0
        self.rebinds = base in REBINDING
        self.copies = schema.name in COPYING
        self.casts_inside = schema.name in CASTING_INSIDE
        self.settled = not (self.rebinds or self.copies)
        self.writes = () if self.rebinds else _writes(schema.name, arguments)
        self.fresh = base in UNINITIALISED
        self.deferred = space == "_c10d_functional" and base != "wait_tensor"
        self.quiet = self.fresh or self.rebinds or self.deferred or func.is_view
        self.reads = not (self.fresh or self.rebinds or func.is_view or base in LAYOUT_ONLY)
        self.overwrites = (
            base in OVERWRITING or schema.name in FILLING or any(a.kwarg_only for a in written)
        )
        # scatter_.reduce and its like combine with what is there
        self.scatters = (
            space == "aten" and base in SCATTERING and "reduce" not in schema.overload_name
        )
        self.fills_own_slice = schema.name == "fsdp::all_gather_copy_in"
        self.hands_on = schema.name == "aten::copy_"
        self.seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.collective = space == "c10d"
        self.waits = self.collective and schema.name not in NEVER_WAIT
        self.async_index = next((i for i, a in enumerate(arguments) if a.name == "async_op"), None)
        # the fused optimisers and loss scaling bump no version counter without a mode either (measured, torch 2.13)
        self.lists_written = not base.startswith(("_fused_", "_amp_")) and any(
            "Tensor" in str(a.type) and "List" in str(a.type) for a in written
        )
        self.bumps = (
            schema.is_mutable
            and not self.lists_written
            and not base.startswith(("_fused_", "_amp_"))
        )
        if _is_composite(func):
            aliases = [a for a in (*arguments, *schema.returns) if a.alias_info is not None]
            self.composite = not aliases
            self.aliasing = bool(aliases) and not _is_known_to_autograd(func)
        self.scalar = bool(schema.returns) and all(
            str(r.type) in ("number", "Scalar", "bool", "int", "float") for r in schema.returns
        )

    def describe(self) -> str:
        """The text that the trace keeps of this op (JSON, see docs/trace-format.md)."""
        data: dict[str, Any] = {"name": self.name}
        marks = []
        if isinstance(self.func, OpOverload):
            schema = self.func._schema
            arguments = schema.arguments
            data["arguments"] = [a.name for a in arguments]
            data["defaults"] = {
                a.name: encode(a.default_value) for a in arguments if a.has_default_value()
            }
            data["mutates"] = [name for _, name in self.writes]
            marks = [
                name
                for name, holds in (
                    ("view", self.func.is_view),
                    ("uninitialised", self.fresh),
                    ("seeded", self.seeded),
                    ("pointwise", torch.Tag.pointwise in self.func.tags),
                    ("reduction", torch.Tag.reduction in self.func.tags),
                )
                if holds
            ]
        else:
            marks = ["higher_order"]
        return json.dumps({**data, "is": marks})


def _writes(name: str, arguments: Sequence[Any]) -> tuple[tuple[int | None, str], ...]:
    declared = tuple(
        (None if a.kwarg_only else i, a.name)
        for i, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    undeclared = tuple((i, arguments[i].name) for i in UNDECLARED.get(name, ()))
    return declared + tuple(w for w in undeclared if w not in declared)


def _is_composite(func: OpOverload) -> bool:
    """CompositeImplicitAutograd: under a mode it would decompose with other dispatch keys."""
    if not torch._C._dispatch_has_kernel(func.name()):
        return False  # TorchScript's ops (prim::device) are none of the dispatcher's, which would raise
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _is_known_to_autograd(func: OpOverload) -> bool:
    """Whether autograd makes the op itself a view or a write, before the mode sees it; `narrow` and `chunk` are so."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.ADInplaceOrView))


def encode(value: Any) -> Any:
    """A non-tensor argument as JSON: numbers as they are, other things as {"x": text}."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else {"f": repr(value)}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, complex | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {"x": str(value).removeprefix("torch.")}
    return {"x": type(value).__qualname__}
