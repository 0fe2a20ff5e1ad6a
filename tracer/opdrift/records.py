"""What the two halves of opdrift share: what a trace holds, and what a diagnosis says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

TRACE_SCHEMA: Final = "opdrift.trace/1"
DIAGNOSIS_SCHEMA: Final = "opdrift.diagnosis/1"
#: `Alignment.method` where the ranks of one run are held against each other; `paired` then counts what was checked.
ACROSS_RANKS: Final = "across the ranks of one run"
#: Cause of what a rank left undone for the others.
RANK_ENDED: Final = "rank-ended"

#: Where an op of no module ran, in words.
OUTSIDE: Final = "the program outside every module"

# ---- what a trace holds --------------------------------------------------------------------------

#: Bits of an op's `flags`.
RAISED: Final = 1  #: the op raised; it has no outputs
UNFINGERPRINTED: Final = 2  #: at least one output has no fingerprint although it is no view
TRACER_FAILED: Final = 4  #: opdrift failed at this op; what is missing is in the footer
PENDING: Final = 8  #: an asynchronous collective: its outputs were filled later
READ_UNINITIALISED: Final = 16  #: the op read memory that nothing had written
COMPILED: Final = 32  #: called from code that torch.compile generated
GRAD_ENABLED: Final = 64  #: autograd was recording
REREAD: Final = 128  #: an input's content was read again at use
OPERAND_GRAD: Final = 256  #: of an attention op: its query, key or value requires grad
MASK_GRAD: Final = 512  #: of an attention op, its mask requires grad; of an `add`, what is added
READ_IN_FLIGHT: Final = (
    1024  #: the op read host memory that a collective or a copy was still filling
)

#: Bit -> the word that reports use for it.
FLAG_WORDS: Final = {
    RAISED: "raised",
    UNFINGERPRINTED: "unfingerprinted",
    TRACER_FAILED: "tracer-failed",
    PENDING: "pending",
    READ_UNINITIALISED: "read-uninitialised",
    READ_IN_FLIGHT: "read-in-flight",
    COMPILED: "compiled",
    GRAD_ENABLED: "grad-enabled",
    REREAD: "reread",
    OPERAND_GRAD: "operand-requires-grad",
    MASK_GRAD: "mask-requires-grad",
}

#: What the op of a compiled region is called, before its pass: `compiled.region.forward`.
COMPILED_REGION: Final = "compiled.region"

Phase = Literal["forward", "backward"]
LeafKind = Literal[
    "parameter", "buffer", "input", "constant", "shard", "gradient", "output", "alive"
]
LeafWhen = Literal["entry", "use", "changed", "generated", "gather", "return", "exit"]

#: A non-tensor argument as recorded: JSON's types, or text for dtypes, devices, layouts, generators.
Scalar = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The layout of a tensor; the storage offset belongs to the value.

    `dtype` and `device` are written as torch writes them, without the "torch." (`bfloat16`, `cuda:0`).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """Stands for a tensor in a signature's arguments; the op's `inputs` hold the values, in order."""

    meta: TensorMeta


Argument = Scalar | TensorArgument | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that inductor compiled, whose calls are recorded as one op each.

    Attributes:
        direction: "forward" for a graph with a backward pass, "inference" for one without.
        function: The compiled function, as `Net.forward`; None for the backward pass of one that was not seen.
        file: Where that is defined; `line` is its first.
        graph: inductor's number of the graph in its process; the two passes share it.
        key: inductor's cache key: equal keys mean the same generated code.
        kernels: Names of the kernels that were generated.
        extern: Kernels of torch that it calls, in the order of its source.
        dynamic: It takes sizes as arguments.
        cudagraphs: It is replayed as a CUDA graph.
        cudagraphs_refused: Why it is not, in torch's words.
    """

    direction: Literal["forward", "backward", "inference"]
    function: str | None = None
    file: str | None = None
    line: int | None = None
    graph: int | None = None
    key: str | None = None
    kernels: tuple[str, ...] = ()
    extern: tuple[str, ...] = ()
    dynamic: bool = False
    cudagraphs: bool = False
    cudagraphs_refused: str | None = None


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known of an overload, once per trace.

    Attributes:
        name: `aten.mm.default`.
        arguments: Names in schema order, positional ones first.
        defaults: Defaults of arguments that have one (a dispatched call leaves defaults out).
        mutates: Names of the arguments that the op writes into.
        view: Its outputs alias an input and are not fingerprinted.
        uninitialised: It hands out memory without writing it (`empty` and its relatives).
        seeded: Tagged `nondeterministic_seeded`: it may draw from a generator.
        pointwise: Tagged `pointwise`.
        reduction: Tagged `reduction`.
        higher_order: A higher-order op; its inside is not seen.
        region: The compiled graph of which this is a call; None for an op of the dispatcher.
    """

    name: str
    arguments: tuple[str, ...] = ()
    defaults: Mapping[str, Argument] = field(default_factory=dict[str, Argument])
    mutates: tuple[str, ...] = ()
    view: bool = False
    uninitialised: bool = False
    seeded: bool = False
    pointwise: bool = False
    reduction: bool = False
    higher_order: bool = False
    region: CompiledGraph | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """An op with the layouts of its tensors and its other arguments; ops of equal signature share one."""

    op: OpInfo
    arguments: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module. Call 0 is the program outside every module."""

    id: int
    parent: int
    path: str
    type: str
    number: int
    training: bool
    source: Source | None
    thread: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A named (or nameless) value that no recorded op made, or one that leaves the run.

    `kind` "output" is what a root module returned, "gradient" a parameter's `.grad` at exit, "alive"
    a value whose storage still lived at exit; `when` says at which moment it was seen. `seq` is the
    last op before that moment. A nameless constant has the name "".
    """

    name: str
    kind: LeafKind
    when: LeafWhen
    value: int
    seq: int
    call: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that is no op: a step, a gather, a move, a flag that changed, a finding of the tracer."""

    seq: int
    time_ns: int
    kind: str
    call: int
    thread: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatched op, expanded for people; bulk work uses the columns of the trace instead.

    Attributes:
        seq: Its number in the run, from 1, in the order in which the ops began.
        inputs: Value ids of the tensor arguments, in the order of the signature.
        outputs: Value ids: first `mutated` written arguments, then what the op returned.
        rng: Digest of the generator's state before a seeded op; 0 for others.
        node: Autograd sequence number; joins a backward op to its forward op.
    """

    index: int
    seq: int
    signature: Signature
    call: Call
    source: Source | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutated: int
    phase: Phase
    flags: int
    thread: int
    start_ns: int
    duration_ns: int
    rng: int
    node: int

    @property
    def name(self) -> str:
        """The op's name, such as `aten.mm.default`."""
        return self.signature.op.name


@dataclass(frozen=True, slots=True)
class Header:
    """What the run ran with; written before the first op.

    `flags` are process and thread settings that steer numerics, `variables` environment variables,
    `versions` those of Python and of libraries, `options` what `record()` was asked for. `launch` is equal on all ranks
    of one launch of a distributed run; None where no launcher told.
    """

    schema: str
    fingerprint: str
    label: str
    created: str
    torch: str
    device: str
    rank: int | None
    world_size: int | None
    program: tuple[str, ...]
    flags: Mapping[str, Scalar | list[Any]]
    variables: Mapping[str, str]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    engine: str
    start_unix_ns: int
    start_ns: int
    launch: str | None

    @property
    def run_id(self) -> str:
        """Tells this recording from others."""
        return f"{self.created}#{self.start_ns}"


#: What `sys.exit()` raises where a program has nothing to complain of.
_ASKED_TO_END: Final = frozenset({"SystemExit: ", "SystemExit: 0", "SystemExit: None"})


@dataclass(frozen=True, slots=True)
class Footer:
    """How the run ended; absent when the process was killed.

    `raised_at` is the innermost line of the program that the exception came through; None where that is not known.
    `failures` are the tracer's own, one entry a place: {"where", "error", "count"}.
    """

    ops: int
    ended: Literal["ok", "raised"]
    exception: str | None
    raised_at: str | None
    failures: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether an exception left the run that is more than the program's wish to end."""
        return self.ended == "raised" and self.exception not in _ASKED_TO_END


# ---- what a diagnosis says (DESIGN 3.4) -------------------------------------------------------------

Verdict = Literal["identical", "rounding", "diverged"]
DivergenceKind = Literal["leaf", "op", "structure", "hidden-write"]
Confidence = Literal["certain", "likely", "possible"]
PickSource = Literal["dispatcher", "verbose", "profiler", "inferred"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sides(Generic[T]):
    """The same fact of the left and of the right run."""

    left: T
    right: T


@dataclass(frozen=True, slots=True)
class Cause:
    """Why: a slug of DESIGN 7's table with what speaks for it and what to type next."""

    slug: str
    confidence: Confidence
    summary: str
    evidence: tuple[str, ...]
    try_: str


@dataclass(frozen=True, slots=True)
class Pick:
    """Which implementation ran, and why not another.

    Attributes:
        name: The op, after ": " with the routine of a library, or the name of an attention.
        observed: What libraries or the device said that they ran, in order; of `kernels="full"`.
    """

    name: str
    library: str | None = None
    backend: str | None = None
    reason: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    source: PickSource = "inferred"
    observed: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[str, ...]:
        """What was observed, without the one call or kernel that the name already tells."""
        told = self.name.partition(": ")[2]
        return tuple(call for call in self.observed if call != told)


@dataclass(frozen=True, slots=True)
class ArgumentDifference:
    """A non-tensor argument that differs, both sides as text."""

    name: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """An origin: where the runs come apart, how far, why, and what it became downstream.

    Attributes:
        name: The leaf's name; None for an op.
        op: The op's name; for a leaf, the op that used it first, if any did.
        module: The scope; "" is the root module. The left side's, where both have one.
        call: Which call of that scope, from 0.
        source: `file:line in function`.
        seq: The op's number on each side; None where it is missing.
        output: Which output of the op differs.
        inputs_match: Whether all inputs are known equal; None where that is not known.
        material: Not explained by rounding.
        relative_difference: ||left - right|| / ||left|| of the output or leaf, from the sketches.
        explained: The largest relative difference that rounding accounts for here.
        conditioning: ||A|| ||B|| / ||C|| for matmul-like ops: how far the op magnifies rounding.
        max_abs_difference: Largest difference seen among the samples (exact for small tensors).
        ulp: The same in units in the last place of the dtype.
        nonfinite: Non-finite values of each side's output.
        tensors: `float32[2, 6]` of each side's output or leaf.
        members: Names of the leaves, or seqs as text, that this divergence stands for besides itself.
        how: How the sizes were obtained ("sketch", "sample", "exact", "statistics", "unavailable"; of
            logs of other tools "norms", how far two norms are apart, a lower bound, or "hashes").
        final_relative_difference: The same measure at the run's output.
        arithmetic: In what the op computes: `bfloat16`, `float32, TF32 off`.
        outside: The op ran outside every module: a loss or an optimizer's step that the program calls itself.
        made_otherwise: An input is a constant, or a view of what is equal, that was made with other
            arguments: `arguments` are those.
        content: In words, what changed with no op that wrote it, where that is no leaf but an op's output.
        ranks: Which ranks of one run each side stands for, where those are held against each other.
    """

    kind: DivergenceKind
    name: str | None
    op: str | None
    module: str
    call: int
    phase: Phase | None
    source: str | None
    seq: Sides[int | None]
    output: int | None
    inputs_match: bool | None
    material: bool
    relative_difference: float | None
    explained: float | None
    conditioning: float | None
    max_abs_difference: float | None
    ulp: float | None
    nonfinite: Sides[int | None]
    kernel: Sides[Pick | None]
    arguments: tuple[ArgumentDifference, ...]
    final_relative_difference: float | None
    cause: Cause
    tensors: Sides[str | None] = Sides(None, None)
    members: tuple[str, ...] = ()
    how: str | None = None
    arithmetic: str | None = None
    outside: bool = False
    made_otherwise: bool = False
    content: str | None = None
    ranks: Sides[tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Amplifier:
    """An op at which a small difference became a large one."""

    op: str
    module: str
    seq: Sides[int | None]
    input_difference: float
    output_difference: float
    gain: float


@dataclass(frozen=True, slots=True)
class EnvironmentDifference:
    """A flag, version, variable or seed that differs."""

    name: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class UnpairedGroup:
    """Ops that only one run has, grouped by op and module."""

    op: str
    module: str
    count: int
    first_seq: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the ops of the two runs were put together."""

    paired: int
    left_only: int
    right_only: int
    method: str
    fallback_reason: str | None


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Which trace a side is."""

    path: str
    run_id: str
    label: str
    created: str
    torch: str
    device: str
    ops: int
    complete: bool
    world_size: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """The largest relative difference among the ops of one top-level stretch of the run, for people.

    `unpaired` of the ops have no counterpart in the right run: of them nothing is known to be equal.
    """

    module: str
    ops: int
    differing: int
    relative_difference: float | None
    unpaired: int = 0


@dataclass(frozen=True, slots=True)
class DifferingSamples:
    """Which samples differ in the results of two runs of whole batches, recorded with `batch=`.

    Attributes:
        size: Samples of the batch.
        numbers: Those of which a part of a result differs, from 0.
    """

    size: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer: whether two runs agree, where they come apart first, and why.

    `ranks` holds one diagnosis per rank when distributed traces are compared rank by rank; this one
    is then the rank with the earliest origin. `notes` are sentences about what could not be judged or
    does not count (unused weights that differ, a trace that is incomplete). `exact` is False where the
    records cannot prove that two tensors are equal (logs of other tools): "identical" then says that no
    difference was seen. `final_explained` is the largest difference at the output that rounding grows to in
    a model of this depth, where rounding is all that was found. `samples`
    says which samples differ where whole batches were compared.
    """

    verdict: Verdict
    left: TraceSummary
    right: TraceSummary
    first: Divergence | None
    first_bitwise: Divergence | None
    origins: tuple[Divergence, ...]
    amplifiers: tuple[Amplifier, ...]
    causes: tuple[Cause, ...]
    environment: tuple[EnvironmentDifference, ...]
    unpaired: Sides[tuple[UnpairedGroup, ...]]
    alignment: Alignment
    growth: tuple[GrowthPoint, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: Mapping[int, Diagnosis] = field(default_factory=dict)
    exact: bool = True
    samples: DifferingSamples | None = None
    final_explained: float | None = None

    def __str__(self) -> str:
        """One line: the verdict, the first difference, its cause."""
        if self.first is None:
            return f"{self.verdict}: all that reaches the results is equal ({self.alignment.paired} ops paired)"
        first = self.first
        place = first.name or f"{first.op or 'a result'} in {first.module or 'the root module'}"
        return (
            f"{self.verdict}: first at {place}: {first.cause.slug} ({first.cause.confidence}):"
            f" {first.cause.summary}"
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What one run alone shows to be wrong: kind "gather", "move", "checkpoint", "hidden-write", "uninitialised", "nan".

    `names` holds all parameters and buffers that it is about, `name` the first. `since` is the number of the op after
    which it may have happened, where what is at `seq` only shows that it has; else None.
    """

    kind: str
    cause: Cause
    name: str | None
    op: str | None
    module: str
    seq: int | None
    step: int | None
    rank: int | None
    names: tuple[str, ...] = ()
    since: int | None = None
