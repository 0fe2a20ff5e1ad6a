"""Facts that a trace lacks, or that this opdrift does not know: said as unknown, and never a failed answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import opdrift
from opdrift.picks import Picks
from opdrift.records import Pick
from opdrift.testing import Builder


def many_choices() -> None:
    """Ops of every family whose implementation is a choice."""
    torch.manual_seed(0)
    q, image = torch.randn(2, 4, 6, 8), torch.randn(1, 4, 10, 10)
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.randn(6, 6))
    with torch.inference_mode():
        F.scaled_dot_product_attention(q, q, q)
        nn.Linear(8, 8)(q)
    (nn.Conv2d(4, 4, 1)(image) + nn.Conv2d(4, 4, 3, padding=1)(image)).sum().backward()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(20, 20).to(dtype)
        F.gelu(x @ x), torch.mv(x, x[0]), torch.bmm(x[None], x[None]), x[:1] @ x.t()
    nn.LSTM(4, 4)(torch.randn(3, 2, 4))
    torch._int_mm(torch.ones(32, 32).char(), torch.ones(32, 32).char())
    F.embedding_bag(torch.zeros(2, 3).long(), torch.randn(4, 5))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> opdrift.Trace:
    path = tmp_path_factory.mktemp("choices") / "t"
    with opdrift.record(path):
        many_choices()
    return opdrift.load(path)


def picks_with(trace: opdrift.Trace, **header: Any) -> list[Pick | None]:
    """The picks of a trace whose header says something else."""
    original = trace.header
    trace.header = replace(original, **header)
    try:
        picks = Picks(trace)
        return [picks.of(i) for i in range(len(trace.ops))] + list(
            map(picks.of_region, picks.regions)
        )
    finally:
        trace.header = original


UNREADABLE = (None, "unreadable: RuntimeError", 99, [99, "x"], {"a": 1}, "", -1.5)


def test_no_value_of_a_flag_stops_an_answer(recorded: opdrift.Trace):
    """What a getter of another torch may return, or that it raised; and a flag that is not there."""
    flags = {
        n: v for n, v in recorded.header.flags.items() if not n.startswith(("autocast", "seed"))
    }
    known = sum(pick is not None for pick in picks_with(recorded))
    least = known
    for name in flags:
        kept = {n: v for n, v in flags.items() if n != name}
        for changed in (kept, *({**flags, name: value} for value in UNREADABLE)):
            least = min(
                least, sum(pick is not None for pick in picks_with(recorded, flags=changed))
            )

    assert known > 20
    assert 0 < least < known  # what depends on the flag is not told


@pytest.mark.parametrize(
    "header",
    [{"flags": {}}, {"versions": {}}, {"versions": {"mkl": "?", "cudnn": "soon"}}, {"flags": {}, "versions": {}, "variables": {}}],
    ids=["flags", "versions", "odd versions", "all"],
)  # fmt: skip
def test_a_trace_without_these_facts_compares_as_before(
    recorded: opdrift.Trace, header: Mapping[str, Any]
):
    """One of an opdrift that did not record them: the same verdict, both ways round."""
    bare = opdrift.load(recorded.path)
    bare.header = replace(bare.header, **header)

    assert opdrift.diff(recorded, bare).verdict == "identical"
    assert opdrift.diff(bare, recorded).verdict == "identical"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="rules of builds with MKL")
def test_a_library_is_not_named_where_the_switch_could_not_be_read(recorded: opdrift.Trace):
    flags = {**recorded.header.flags, "mkldnn.enabled": "unreadable: RuntimeError"}
    named = {
        pick.name.partition(":")[0]
        for pick in picks_with(recorded, flags=flags)
        if pick is not None and pick.library in ("oneDNN", "MKL")
    }

    assert named == {"aten.mkldnn_rnn_layer.default"}  # an op that is the library's own


def of_tomorrow(op: str, **settings: Any) -> opdrift.Trace:
    """One attention by an op of a torch to come."""
    build = Builder()
    q: list[int] = [build.leaf(n, kind="input", shape=(1, 2, 4, 8)) for n in "qkv"]
    build.output(build.op(f"aten.{op}.default", *q, settings=settings))
    return build.build()


def test_an_attention_op_that_is_not_known_is_named_and_has_no_backend():
    trace = of_tomorrow("_scaled_dot_product_photonic_attention")
    found = Picks(trace).of(0)

    assert found is not None
    assert (found.name, found.backend, found.library) == (
        "aten._scaled_dot_product_photonic_attention.default", None, None,
    )  # fmt: skip
    assert "does not know" in (found.reason or "")


def test_an_unknown_attention_against_a_known_one_is_compared_like_any_other():
    """The report names both; nothing is refused, for nobody knows the order."""
    left, right = (
        of_tomorrow(op)
        for op in (
            "_scaled_dot_product_photonic_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        )
    )
    found = opdrift.diff(left, right)

    assert found.first is not None
    assert found.first.kernel.left is None or found.first.kernel.left.backend is None
    assert found.verdict == "diverged"


def test_a_number_of_a_backend_that_is_not_known_is_shown_as_such(recorded: opdrift.Trace):
    """On a CPU the order has no say; elsewhere it is told by its number (test_sdpa_rules.py)."""
    before = picks_with(recorded)
    flags = {**recorded.header.flags, "sdp.priority": [7, 1, 0]}

    assert picks_with(recorded, flags=flags) == before
