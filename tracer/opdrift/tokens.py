"""Name what ops do in numbers that mean the same in both traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from opdrift.records import Argument, OpInfo, Signature, TensorArgument
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

Words = npt.NDArray[np.uint64]

#: In-place ops that do not look at what they overwrite: the old content of their first argument is no input.
_OVERWRITING: Final = frozenset(
    [
        "copy_",
        "fill_",
        "zero_",
        "set_",
        "uniform_",
        "normal_",
        "bernoulli_",
        "random_",
        "exponential_",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "_foreach_copy_",
        "_foreach_zero_",
        "one_",
    ]
)
#: Ops that take the layout of a tensor and nothing else.
_LAYOUT_ONLY: Final = frozenset(
    [
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
    ]
)
#: Ops that return memory for their backward, of which some bytes are never written: which of their results that is.
WORKSPACES: Final = {
    "mkldnn_rnn_layer": 3,
    "_cudnn_rnn": 3,
    "miopen_rnn": 3,
    "cudnn_batch_norm": 3,
    "_batch_norm_with_update": 3,
}
#: Arguments by which the backward of such an op takes it.
_WORKSPACE_NAMES: Final = frozenset({"workspace", "reserve", "reserveSpace"})
#: Arguments through which a caller says where the result shall go.
_OUT_NAMES: Final = frozenset({"out", "out0", "out1", "out2", "out3"})
#: Ops that return what they are given in new memory.
_COPIES: Final = frozenset({"_to_copy", "_unsafe_view", "clone", "contiguous"})
_OLD: Final = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def word(text: str) -> int:
    """A 64-bit name for a text, the same in every process; never 0."""
    return (
        int.from_bytes(
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
        )
        or 1
    )


def mix(a: Words, b: Words) -> Words:
    """Combine words elementwise; the order of the arguments counts (splitmix64's finaliser)."""
    x = a * _OLD + b
    x = (x ^ (x >> np.uint64(30))) * _A
    x = (x ^ (x >> np.uint64(27))) * _B
    x ^= x >> np.uint64(31)
    return np.where(x == 0, np.uint64(1), x)


@dataclass(frozen=True, slots=True)
class SignatureTokens:
    """What is compared of a signature, from strict to loose; each a word.

    Attributes:
        full: Op, layouts without strides and devices, and every other argument.
        shape: Op and layouts.
        name: Op with its overload.
        family: Op without overload and without the underscore of its in-place form.
        settings: The non-tensor arguments alone.
        slots: Names of the tensor arguments.
        counted: Per tensor argument, whether the op looks at its content.
        view, uninitialised, factory, seeded: As OpInfo says; a factory has no tensor to start from.
        cast: It makes a tensor of another type, or in another place, of one.
        moves: It returns the elements of one tensor, as a view or a copy.
    cast: It makes a tensor of another type, or place, of one.
    """

    full: int
    shape: int
    name: int
    family: int
    settings: int
    slots: tuple[str, ...]
    counted: tuple[bool, ...]
    view: bool
    uninitialised: bool
    factory: bool
    seeded: bool
    cast: bool
    moves: bool


def family(name: str) -> str:
    """`aten.add_.Tensor` -> `aten.add`."""
    parts = name.split(".")
    head = ".".join(parts[:2])
    return head[:-1] if head.endswith("_") and not head.endswith("__") else head


def base(name: str) -> str:
    """`aten.add_.Tensor` -> `add_`: the op without namespace and overload."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def slots(signature: Signature) -> tuple[str, ...]:
    """Names of the tensor arguments in the order of an op's inputs: `mat1`, `tensors[0]`."""
    found: list[str] = []
    for name, argument in signature.arguments:
        _slots(name, argument, found)
    return tuple(found)


def _slots(name: str, argument: Argument, found: list[str]) -> None:
    if isinstance(argument, TensorArgument):
        found.append(name)
    elif isinstance(argument, tuple):
        for i, each in enumerate(argument):
            _slots(f"{name}[{i}]", each, found)


def tokens_of(signature: Signature) -> SignatureTokens:
    """The tokens of one signature."""
    info = signature.op
    layouts = json.dumps([[n, _layout(a)] for n, a in signature.arguments if _has_tensor(a)])
    settings = json.dumps([[n, _plain(a)] for n, a in signature.arguments if not _has_tensor(a)])
    names = slots(signature)
    return SignatureTokens(
        full=word(f"{info.name}|{layouts}|{settings}"),
        shape=word(f"{info.name}|{layouts}"),
        name=word(info.name),
        family=word(family(info.name)),
        settings=word(settings),
        slots=names,
        counted=tuple(_counts(info, name) for name in names),
        view=info.view and not info.mutates,
        uninitialised=info.uninitialised,
        factory=not info.seeded
        and not info.uninitialised
        and not any(_counts(info, name) for name in names)
        and not info.mutates,
        seeded=info.seeded,
        cast=base(info.name) == "_to_copy" and len(names) == 1,
        moves=(info.view or base(info.name) in _COPIES) and not info.mutates and len(names) == 1,
    )


def _counts(info: OpInfo, slot: str) -> bool:
    """Whether an op's result depends on the content of a tensor argument."""
    name = base(info.name)
    if name in _LAYOUT_ONLY or info.uninitialised:
        return False
    head = slot.partition("[")[0]
    if head in _WORKSPACE_NAMES:
        return False
    if head in info.mutates and (name in _OVERWRITING or head in _OUT_NAMES):
        return False
    # inductor's extern kernels and the `_out` forms write into `out` arguments of any name
    return not (info.name.endswith("out") and head in info.mutates)


def _has_tensor(argument: Argument) -> bool:
    if isinstance(argument, TensorArgument):
        return True
    return isinstance(argument, tuple) and any(_has_tensor(a) for a in argument)


def _layout(argument: Argument) -> object:
    if isinstance(argument, TensorArgument):
        return [argument.meta.dtype, argument.meta.shape]
    return [_layout(a) for a in argument] if isinstance(argument, tuple) else _plain(argument)


def _plain(argument: Argument) -> object:
    """JSON that keeps 1, 1.0 and True apart."""
    if isinstance(argument, tuple):
        return [_plain(a) for a in argument]
    if isinstance(argument, float):
        return {"f": argument.hex()}
    return argument if not isinstance(argument, TensorArgument) else _layout(argument)


class Column:
    """What is known of each op's signature, looked up by op index."""

    def __init__(
        self, signatures: Ints, answers: Mapping[int, object], dtype: type[np.generic]
    ) -> None:
        self._signatures = signatures
        self._answers = np.zeros(max(answers, default=0) + 1, dtype)
        for signature, answer in answers.items():
            self._answers[signature] = answer

    def __getitem__(self, ops: Any) -> Any:
        return self._answers[self._signatures[ops]]

    @property
    def all(self) -> npt.NDArray[Any]:
        """The answers for every op."""
        found: npt.NDArray[Any] = self._answers[self._signatures]
        return found


class OpTokens:
    """The tokens of every op of a trace; ops are many and signatures few, so only those are kept.

    Attributes:
        table: The tokens of each signature.
    """

    def __init__(self, trace: Trace) -> None:
        used = np.unique(trace.ops.signature).tolist()
        self.table = {s: tokens_of(trace.signature(s)) for s in used}
        self._signatures = trace.ops.signature
        self.full = self._column(lambda t: t.full)
        self.shape = self._column(lambda t: t.shape)
        self.name = self._column(lambda t: t.name)
        self.family = self._column(lambda t: t.family)
        self.settings = self._column(lambda t: t.settings)
        self.slots = self._column(lambda t: word("|".join(t.slots)))
        self.view = self._column(lambda t: t.view, np.bool_)
        self.uninitialised = self._column(lambda t: t.uninitialised, np.bool_)
        self.factory = self._column(lambda t: t.factory, np.bool_)
        self.seeded = self._column(lambda t: t.seeded, np.bool_)
        self.moves = self._column(lambda t: t.moves, np.bool_)
        self.cast = self._column(lambda t: t.cast, np.bool_)

    def _column(
        self, of: Callable[[SignatureTokens], object], dtype: type[np.generic] = np.uint64
    ) -> Column:
        return Column(self._signatures, {s: of(t) for s, t in self.table.items()}, dtype)


def counted_inputs(trace: Trace, tokens: OpTokens) -> npt.NDArray[np.bool_]:
    """Per element of `trace.ops.inputs.values`, whether its op looks at the content."""
    inputs = trace.ops.inputs
    if all(all(t.counted) for t in tokens.table.values()):
        return np.ones(len(inputs.values), np.bool_)
    known = sorted(tokens.table)
    lengths = np.array([len(tokens.table[s].counted) for s in known], np.int64)
    flags = np.array([c for s in known for c in tokens.table[s].counted], np.bool_)
    starts = np.cumsum(lengths) - lengths
    rank = np.searchsorted(np.array(known, np.int64), trace.ops.signature)[inputs.rows()]
    within = np.arange(len(inputs.values)) - inputs.offsets[inputs.rows()]
    beyond = within >= lengths[rank]  # a list cut short in the record: take it as looked at
    return np.where(beyond, True, flags[np.minimum(starts[rank] + within, len(flags) - 1)])
