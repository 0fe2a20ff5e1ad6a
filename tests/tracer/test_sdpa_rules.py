"""The rules for attention backends agree with torch's chooser, and what traces say with what ran."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from sdpa_grid import Call, Point, points, switches
from torch.nn.attention import SDPBackend, sdpa_kernel

import opdrift
from opdrift.picks import Picks
from opdrift.picks.sdpa import (
    CUDNN,
    CUDNN_FIRST,
    EFFICIENT,
    FLASH,
    MATH,
    Choice,
    Facts,
    Gpu,
    Operand,
    Switches,
)
from opdrift.picks.sdpa_calls import SdpaCall, decisive
from opdrift.picks.sdpa_rules import choose
from opdrift.records import Pick
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace

# ---- CPU: the rules against torch's chooser ---------------------------------------------------------------


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns where no backend takes a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def disagreements(some: Iterable[Point]) -> tuple[Counter[str], list[tuple[Point, str, Choice]]]:
    """How often torch chose what, and the points where the rules choose something else."""
    chosen: Counter[str] = Counter()
    wrong = []
    for point in some:
        call = Call.at(point)
        with call.settings():
            ours = choose(call.facts(), switches())
            torchs = call.torchs_choice()
        chosen[torchs] += 1
        if torchs != (ours.backend or "raises"):
            wrong.append((point, torchs, ours))
    return chosen, wrong


def test_the_cpu_rules_choose_as_torch_does() -> None:
    """20,000 calls along eleven axes, `torch._fused_sdp_choice` asked at each."""
    chosen, wrong = disagreements(points(20_000))

    assert wrong == []
    assert min(chosen[name] for name in (FLASH, MATH, "raises")) > 2500


@pytest.mark.exhaustive
def test_the_cpu_rules_choose_as_torch_does_everywhere() -> None:
    """60,000 calls from another seed."""
    assert disagreements(points(60_000, seed=1))[1] == []


# ---- CPU: what traces say against what ran ----------------------------------------------------------------


@dataclass
class Told:
    """What was seen of one call: torch's choice and the rules' beforehand, and its ops in the trace."""

    point: Point
    torchs: str
    ours: Choice
    raised: bool
    ops: range = range(0)


def record(path: Path, some: Iterable[Point]) -> tuple[Trace, list[Told]]:
    """A trace of calls, each between two marks."""
    told = []
    with opdrift.record(path, kernels="off", integrity="off") as recorder:
        recorder.mark("case")
        for point in some:
            call = Call.at(point)
            with call.settings():
                each = Told(point, call.torchs_choice(), choose(call.facts(), switches()), False)
                recorder.mark("begin")
                try:
                    call()
                except (RuntimeError, IndexError, NotImplementedError):
                    each.raised = True
                recorder.mark("case")
            told.append(each)
    trace = opdrift.load(path)
    begins = [m.seq for m in trace.marks if m.kind == "begin"]
    ends = [m.seq for m in trace.marks if m.kind == "case"]
    for each, first, last in zip(told, begins, ends[1:], strict=True):
        each.ops = range(first, last)  # seqs count from 1, indices from 0
    return trace, told


def check(picks: Mapping[int, Pick], trace: Trace, told: Told) -> str:
    """Hold what the trace says of one call against what ran; which kind of call it was."""
    names = [trace.op_info(int(trace.ops.signature[i])).name.split(".")[1] for i in told.ops]
    found = {i: picks[i] for i in told.ops if i in picks and _is_attention(picks[i])}
    context = (told, names, found)
    if told.raised:
        return "raises"
    why = {name: "; also ".join(each) for name, each in told.ours.refused.items()}
    if "scaled_dot_product_attention" in names:  # inference_mode
        (pick,) = found.values()
        if "no elements" not in (pick.reason or ""):
            assert (pick.backend, dict(pick.refused)) == (told.torchs, why), context
        return "whole"
    if "_scaled_dot_product_flash_attention_for_cpu" in names:
        (pick,) = found.values()
        assert (pick.backend, told.torchs, dict(pick.refused)) == (FLASH, FLASH, {}), context
        return "flash"
    if "_safe_softmax" in names:
        (pick,) = found.values()
        assert (pick.backend, told.torchs, dict(pick.refused)) == (MATH, MATH, why), context
        return "math"
    assert found == {}, context
    assert any(name.startswith("zeros") for name in names), context
    return "empty"


def _is_attention(pick: Pick) -> bool:
    return pick.backend is not None or "attention" in pick.name


def check_all(folder: Path, some: Iterable[Point]) -> Counter[str]:
    """Record calls in traces of 4,000, and check each."""
    kinds: Counter[str] = Counter()
    rest = iter(some)
    while group := list(islice(rest, 4000)):
        trace, told = record(folder / str(kinds.total()), group)
        picks = Picks(trace).among(range(len(trace.ops)))
        kinds.update(check(picks, trace, each) for each in told)
    return kinds


def test_a_trace_says_what_ran_and_why(tmp_path: Path) -> None:
    """2,000 recorded calls: the op that ran, torch's choice, and the refusals are one story."""
    kinds = check_all(tmp_path, points(2000))

    assert min(kinds[kind] for kind in ("flash", "math")) > 200


@pytest.mark.exhaustive
def test_a_trace_says_what_ran_and_why_everywhere(tmp_path: Path) -> None:
    """20,000 recorded calls, of which those that ran are told as they ran."""
    kinds = check_all(tmp_path, points(20_000, seed=2))

    assert min(kinds[kind] for kind in ("flash", "math", "empty", "whole")) > 400


def test_empty_operands_are_no_choice(tmp_path: Path) -> None:
    """torch adds up nothing instead of choosing a backend; under inference_mode the pick says so."""
    q = torch.ones(0, 4, 8, 16)
    with torch.inference_mode(), opdrift.record(tmp_path / "t", kernels="off") as _:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    found = Picks(opdrift.load(tmp_path / "t")).of(0)

    assert found is not None
    assert (found.backend, found.reason) == (
        None,
        "an operand has no elements: torch computes zeros",
    )


def test_a_call_that_would_end_the_process_raises_by_the_rules() -> None:
    """No key heads with enable_gqa: torch divides by them."""
    empty = Operand((1, 0, 4, 8), 1, "float32")

    choice = choose(
        Facts(Operand((1, 4, 4, 8), 1, "float32"), empty, empty, grouped=True), Switches()
    )

    assert (choice.backend, choice.raises) == (None, "SIGFPE")


# ---- CUDA: worked examples ----------------------------------------------------------------------------------

H100 = Gpu(9, 0, cudnn=91600)
A100 = Gpu(8, 0, cudnn=91600)
RTX4090 = Gpu(8, 9, cudnn=91600)
B200 = Gpu(10, 0, cudnn=91600)
T4 = Gpu(7, 5, cudnn=91600)


def on_gpu(
    *,
    queries: int = 128,
    size: int = 64,
    dtype: str = "bfloat16",
    heads: int = 8,
    key_heads: int = 8,
    stride: int = 1,
    grad: bool = False,
    mask: Operand | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    grouped: bool = False,
) -> Facts:
    """A call with 128 keys in a batch of two."""
    query = Operand((2, heads, queries, size), stride, dtype, grad)
    key = Operand((2, key_heads, 128, size), stride, dtype, grad)
    return Facts(query, key, key, mask, dropout, causal, grouped, wants_grad=grad, device="cuda")


MASK = Operand((1, 1, 128, 128), 1, "bfloat16")


@pytest.mark.parametrize(
    ("facts", "gpu", "backend", "refused"),
    [
        (on_gpu(), A100, FLASH, {}),
        (on_gpu(), H100, CUDNN, {}),
        (on_gpu(mask=MASK), A100, EFFICIENT, {FLASH: "an attn_mask is given"}),
        (on_gpu(mask=MASK), H100, CUDNN, {}),
        (on_gpu(dtype="float32"), A100, EFFICIENT, {FLASH: "it takes float16 or bfloat16, not float32"}),
        (on_gpu(dtype="float64"), A100, MATH, {
            FLASH: "it takes float16 or bfloat16, not float64",
            EFFICIENT: "it takes float32 or float16 or bfloat16, not float64",
        }),
        (on_gpu(), T4, MATH, {
            FLASH: "the GPU is sm75; it needs sm80 to sm121",
            EFFICIENT: "it takes float32 or float16, not bfloat16",
        }),
        (on_gpu(dtype="float16"), T4, EFFICIENT, {FLASH: "the GPU is sm75; it needs sm80 to sm121"}),
        (on_gpu(queries=1, causal=True), A100, EFFICIENT, {FLASH: "is_causal with 1 queries and 128 keys"}),
        (on_gpu(size=512), A100, EFFICIENT, {
            FLASH: "head sizes must be equal and at most 256, not 512",
        }),
        (on_gpu(size=512), H100, EFFICIENT, {
            CUDNN: "head sizes must be at most 256 here, not 512",
            FLASH: "head sizes must be equal and at most 256, not 512",
        }),
        (on_gpu(size=100, dtype="float16"), A100, FLASH, {}),
        (on_gpu(size=256, grad=True), RTX4090, FLASH, {}),
        (on_gpu(size=224, grad=True), RTX4090, EFFICIENT, {
            FLASH: "training with head size 224 on sm89",
        }),
        (on_gpu(key_heads=2, grouped=True, mask=MASK), A100, MATH, {
            FLASH: "an attn_mask is given",
            EFFICIENT: "numbers of heads differ: 8, 2 and 2 (query, key, value), and it has no grouped heads",
        }),
        (on_gpu(key_heads=2, grouped=True), A100, FLASH, {}),
        (on_gpu(stride=2), A100, MATH, {
            FLASH: "the last dim is not contiguous (stride of query 2, key 2, value 2)",
            EFFICIENT: "the last dim is not contiguous (stride of query 2, key 2, value 2)",
        }),
        (on_gpu(dropout=0.1), H100, FLASH, {CUDNN: "dropout_p is 0.1, no multiple of 1/16"}),
        (on_gpu(size=136), B200, FLASH, {CUDNN: "head sizes must be at most 128 here, not 136"}),
    ],
)  # fmt: skip
def test_cuda_chooses_by_its_table(
    facts: Facts, gpu: Gpu, backend: str, refused: dict[str, str]
) -> None:
    """Worked examples of notes/kernels, 2; on GPUs that put cuDNN first it is asked first."""
    found = choose(facts, Switches(), gpu)

    assert found.backend == backend
    assert {name: why[0] for name, why in found.refused.items()} == refused


def test_what_a_program_asks_for_changes_the_order() -> None:
    """Deterministic algorithms refuse cuDNN, a variable and an older cuDNN keep it last, switches come first."""
    deterministic = choose(on_gpu(), Switches(deterministic=True), H100)

    assert deterministic.backend == FLASH
    assert deterministic.refused == {CUDNN: ("deterministic algorithms are required",)}
    assert choose(on_gpu(), Switches(), replace(H100, cudnn_last=True)).backend == FLASH
    assert choose(on_gpu(), Switches(), replace(H100, cudnn=91500)).backend == FLASH
    assert choose(on_gpu(), Switches(order=CUDNN_FIRST), A100).backend == CUDNN
    assert choose(on_gpu(), Switches(order=(0, 1, 2)), A100).backend == MATH
    off = choose(on_gpu(), Switches(flash=False), A100)
    assert (off.backend, off.refused) == (
        EFFICIENT,
        {FLASH: ("the flash backend is switched off",)},
    )
    nothing = choose(
        on_gpu(), Switches(flash=False, efficient=False, cudnn=False, math=False), A100
    )
    assert (nothing.backend, nothing.raises) == (None, "RuntimeError: No available kernel")


def on_device(op: str, *, masked: bool = False, **flags: object) -> Pick:
    """What a trace from a GPU says of one attention op with heads of 512."""
    build = Builder(
        device="cuda:0",
        flags={"cuda.capability": "9.0", "sdp.priority": [1, 2, 0, 3, 4], **flags},
        versions={"cudnn": "91600", "cuda": "13.0"},
    )
    x = build.leaf("x", kind="input", shape=(2, 4, 128, 512), dtype="bfloat16")
    mask = build.leaf("mask", kind="input", shape=(128, 128), dtype="bfloat16")
    build.op(op, x, x, x, *([mask] if masked else []))
    found = Picks(build.build()).of(0)
    assert found is not None
    return found


def test_a_trace_from_a_gpu_says_why_the_backends_before_were_refused() -> None:
    """fairseq2#1481's head size: cuDNN and flash refuse it, whatever the batch."""
    found = on_device("_scaled_dot_product_efficient_attention")

    assert (found.backend, found.library) == (EFFICIENT, "CUTLASS")
    assert dict(found.refused) == {
        CUDNN: "head sizes must be at most 256 here, not 512",
        FLASH: "head sizes must be equal and at most 256, not 512",
    }


def test_a_mask_in_a_trace_from_a_gpu_is_a_reason() -> None:
    found = on_device("_scaled_dot_product_efficient_attention", masked=True)

    assert found.refused[FLASH].startswith("an attn_mask is given; also head sizes")


def test_a_refusal_that_the_rules_do_not_know_is_said_to_be_one() -> None:
    """Never a guess: torch refused cuDNN, and no rule says why."""
    small = Operand((2, 4, 128, 64), 1, "bfloat16")
    call = SdpaCall(Facts(small, small, small, device="cuda"), Switches(order=CUDNN_FIRST), H100)

    assert call.refused_before(FLASH) == {
        CUDNN: "torch refused it, for a reason that the trace does not hold"
    }


@pytest.mark.parametrize(
    "flags", [{"cuda.capability": None}, {"sdp.priority": [9, 0]}], ids=["gpu", "order"]
)
def test_what_is_not_known_of_a_gpu_is_not_guessed(flags: dict[str, object]) -> None:
    """A trace that does not name the GPU, or an order of backends from a torch to come."""
    found = on_device("_scaled_dot_product_efficient_attention", **flags)

    assert found.backend == EFFICIENT
    assert dict(found.refused) == {}


def test_an_order_that_could_not_be_read_is_taken_for_the_default() -> None:
    """The getter raised; the trace says so in place of a list."""
    found = on_device(
        "_scaled_dot_product_efficient_attention", **{"sdp.priority": "unreadable: RuntimeError"}
    )

    assert set(found.refused) == {CUDNN, FLASH}


# ---- what changed the choice --------------------------------------------------------------------------------


def called(**changes: object) -> SdpaCall:
    """A call on a CPU that flash takes, but for some changes of its facts."""
    same = Operand((2, 4, 8, 16), 1, "float32")
    return SdpaCall(replace(Facts(same, same, same), **changes), Switches(), None)  # type: ignore[arg-type]


def test_the_argument_that_changed_the_pick_is_named() -> None:
    """Also where other arguments differ that change nothing."""
    right = called(dropout=0.1, causal=True)

    assert decisive(called(), right) == ["dropout_p: 0 against 0.1"]


def test_arguments_that_differ_alike_are_named_together() -> None:
    flat = Operand((4, 8, 16), 1, "float32")

    assert decisive(called(), called(query=flat, key=flat, value=flat)) == [
        "query, key, value: float32[2, 4, 8, 16] against float32[4, 8, 16]"
    ]


def test_a_mask_that_requires_grad_is_named() -> None:
    plain = Operand((8, 8), 1, "float32")

    assert decisive(called(mask=plain), called(mask=replace(plain, requires_grad=True))) == [
        "attn_mask: float32[8, 8], without grad against float32[8, 8], requires grad"
    ]


def test_a_switch_is_named() -> None:
    off = replace(called(), switches=Switches(flash=False))

    assert decisive(called(), off) == ["the flash switch: on against off"]


def test_equal_picks_have_no_decisive_argument() -> None:
    assert decisive(called(), called(causal=True)) == []


def test_a_switch_that_a_failed_call_saw_is_seen_to_be_back(tmp_path: Path) -> None:
    """A call that raises before it attends shows a switch at its new line; the next one, at a known line, runs without."""
    q = torch.randn(5, 8)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    with opdrift.record(tmp_path / "trace"), torch.no_grad():
        attend()
        with sdpa_kernel(SDPBackend.MATH), contextlib.suppress(RuntimeError):
            torch.ones(2) @ torch.ones(3)
        attend()

    trace = opdrift.load(tmp_path / "trace")
    picks = Picks(trace).among(range(len(trace.ops)))
    refused = [dict(p.refused) for p in picks.values() if p.backend == "MATH"]
    assert len(refused) == 2
    assert refused[0] == refused[1]
