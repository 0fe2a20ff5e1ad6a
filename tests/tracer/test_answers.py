"""torch is asked which backends could have taken an attention, and what it says goes into the pick's reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch.nn.attention import SDPBackend, sdpa_kernel

import opdrift
from opdrift import recorder
from opdrift.kernels import answers
from opdrift.kernels.answers import Answers
from opdrift.picks import Picks
from opdrift.records import GRAD_ENABLED, OPERAND_GRAD, Mark, Pick
from opdrift.testing import Builder

FLASH, EFFICIENT, CUDNN = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"


# ---- asking ----------------------------------------------------------------------------------------------


@pytest.fixture
def cpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host in place of a GPU: torch answers no to everything there."""
    monkeypatch.setattr(
        recorder, "Answers", lambda write, failed: Answers(write, failed, device="cpu")
    )


def asked(path: Path) -> list[Mark]:
    trace = opdrift.load(path)
    assert trace.footer is not None
    assert trace.footer.failures == ()
    return [mark for mark in trace.marks if mark.kind == "can-use"]


@pytest.mark.usefixtures("cpu_is_asked")
def test_torch_is_asked_once_for_each_kind_of_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Again for other shapes, gradients or switches, and where a switch is back; nothing is printed or warned."""
    x = torch.randn(2, 4, 8, 16)
    wants = x.clone().requires_grad_()
    with opdrift.record(tmp_path / "t"):
        for _ in range(3):
            F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x[:1], x[:1], x[:1])
        F.scaled_dot_product_attention(wants, x, x)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, x, x)

    marks = asked(tmp_path / "t")

    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    trace = opdrift.load(tmp_path / "t")
    calls = [op.seq for i in range(len(trace.ops)) if (op := trace.op(i)).name == attention]
    assert [mark.fields["op"] for mark in marks] == [calls[i] for i in (0, 3, 4, 5, 6)]
    assert all(mark.fields["backends"] == {FLASH: False, EFFICIENT: False, CUDNN: False} for mark in marks)  # fmt: skip
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("cpu_is_asked")
def test_it_is_asked_with_what_the_call_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whole under inference_mode, where the op still has all arguments; grouped heads are seen from the shapes."""
    seen: list[tuple[Any, ...]] = []

    def can_use(params: Any, debug: bool) -> bool:
        assert not debug  # its words would go to stderr, or become a warning at the user's line
        seen.append(
            (*params.query.shape, params.key.shape[1], params.attn_mask is not None, params.dropout, params.is_causal, params.enable_gqa)
        )  # fmt: skip
        return True

    monkeypatch.setattr(answers, "_ASKED", {FLASH: can_use})
    q, k, mask = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.zeros(8, 8)
    with torch.inference_mode(), opdrift.record(tmp_path / "t"):
        F.scaled_dot_product_attention(q, k, k, dropout_p=0.25, is_causal=True, enable_gqa=True)
        F.scaled_dot_product_attention(q, q, q, mask)
    with opdrift.record(tmp_path / "u"):
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    assert seen == [
        (2, 4, 8, 16, 2, False, 0.25, True, True),
        (2, 4, 8, 16, 4, True, 0.0, False, False),
        (2, 4, 8, 16, 2, False, 0.0, False, True),
    ]
    assert [m.fields["backends"] for m in asked(tmp_path / "u")] == [{FLASH: True}]


@pytest.mark.usefixtures("cpu_is_asked")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_would_end_the_process_is_not_asked(tmp_path: Path):
    """No heads; and what torch has no answer for: a nested tensor, a call on another device."""
    none = torch.randn(2, 0, 8, 16)
    nested = torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 5, 8)])
    meta = torch.randn(2, 4, 8, 16, device="meta")
    with torch.inference_mode(), opdrift.record(tmp_path / "t"):
        F.scaled_dot_product_attention(none, none, none)
        F.scaled_dot_product_attention(meta, meta, meta)
    with opdrift.record(tmp_path / "u"):
        F.scaled_dot_product_attention(nested, nested, nested)

    assert asked(tmp_path / "t") == asked(tmp_path / "u") == []


def test_nothing_is_asked_on_a_cpu_or_with_kernels_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    x = torch.randn(2, 4, 8, 16)
    with opdrift.record(tmp_path / "cpu"):
        F.scaled_dot_product_attention(x, x, x)
    monkeypatch.setattr(
        recorder, "Answers", lambda write, failed: Answers(write, failed, device="cpu")
    )
    with opdrift.record(tmp_path / "off", kernels="off"):
        F.scaled_dot_product_attention(x, x, x)

    assert asked(tmp_path / "cpu") == asked(tmp_path / "off") == []


@pytest.mark.usefixtures("cpu_is_asked")
@pytest.mark.filterwarnings("ignore")
def test_a_check_that_raises_is_noted_and_the_op_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(answers, "_ASKED", {FLASH: lambda params, debug: 1 / 0})
    x = torch.randn(2, 4, 8, 16)
    plain = F.scaled_dot_product_attention(x, x, x)

    with opdrift.record(tmp_path / "t"):
        recorded = F.scaled_dot_product_attention(x, x, x)

    assert torch.equal(plain, recorded)
    footer = opdrift.load(tmp_path / "t").footer
    assert footer is not None
    assert [failure["where"] for failure in footer.failures] == ["can_use_*"]


# ---- reading ---------------------------------------------------------------------------------------------


def a_call(
    op: str,
    backends: Mapping[str, bool] | None,
    *,
    dim: int = 64,
    order: tuple[int, ...] = (1, 2, 0, 3, 4),
    versions: Mapping[str, str] | None = None,
) -> Pick:
    """What a trace from an A100 says of an attention, and of what torch answered after it."""
    build = Builder(
        device="cuda:0",
        flags={"cuda.capability": "8.0", "sdp.priority": list(order)},
        versions={"cudnn": "91000", "cuda": "12.8"} if versions is None else versions,
    )
    x = build.leaf("x", kind="input", shape=(2, 4, 128, dim), dtype="bfloat16")
    build.op(op, x, x, x)
    if backends is not None:
        build.mark("can-use", op=1, backends=dict(backends))
    found = Picks(build.build()).of(0)
    assert found is not None
    return found


EFFICIENT_OP = "_scaled_dot_product_efficient_attention"


def test_a_reason_that_torch_agrees_to_is_confirmed():
    found = a_call(EFFICIENT_OP, {FLASH: False, EFFICIENT: True, CUDNN: False}, dim=512)

    assert found.refused == {
        FLASH: "head sizes must be equal and at most 256, not 512 (confirmed by torch)"
    }
    assert found.reason == found.refused[FLASH]


def test_a_refusal_without_a_rule_is_torchs_word():
    found = a_call(EFFICIENT_OP, {FLASH: False, EFFICIENT: True})

    assert found.refused == {
        FLASH: "torch's own check refuses it, for a reason that opdrift does not know"
    }


@pytest.mark.parametrize(
    ("dim", "said"),
    [
        (512, "head sizes must be equal and at most 256, not 512 (by opdrift's rules; torch's own check, asked after the op, takes it)"),
        (64, "torch refused it, but its own check takes what the op got: heads may have been padded, or a mask expanded, in between"),
    ],
    ids=["rule", "no rule"],
)  # fmt: skip
def test_where_torch_and_the_rules_part_both_are_told(dim: int, said: str):
    assert a_call(EFFICIENT_OP, {FLASH: True, EFFICIENT: True}, dim=dim).refused == {FLASH: said}


def test_without_an_answer_the_rules_stand_alone():
    """A trace of an earlier version, or with kernels='off'."""
    assert a_call(EFFICIENT_OP, None, dim=512).refused == {
        FLASH: "head sizes must be equal and at most 256, not 512"
    }


def test_a_call_that_is_not_split_runs_what_torch_answers():
    """The rules would have said flash."""
    whole = a_call("scaled_dot_product_attention", {FLASH: False, EFFICIENT: True, CUDNN: True})

    assert (whole.backend, whole.library) == (EFFICIENT, "CUTLASS")
    assert whole.refused == {
        FLASH: "torch's own check refuses it, for a reason that opdrift does not know"
    }
    by_rules = a_call("scaled_dot_product_attention", None)
    assert (by_rules.backend, by_rules.reason) == (FLASH, "by torch's rules; the op is not split here")  # fmt: skip


def test_on_an_amd_device_only_torchs_answers_count():
    """The rules are those of CUDA, and so is the order."""
    hip = {"hip": "6.4"}

    assert a_call(EFFICIENT_OP, None, dim=512, versions=hip).refused == {}
    assert a_call(EFFICIENT_OP, {FLASH: False, EFFICIENT: True}, versions=hip).refused == {
        FLASH: "torch's own check refuses it, for a reason that opdrift does not know"
    }


def test_an_answer_counts_for_later_calls_of_its_kind():
    """The same signature with the same gradients, until torch was asked anew."""
    build = Builder(device="cuda:0", flags={"cuda.capability": "8.0"}, versions={"cuda": "12.8"})
    x = build.leaf("x", kind="input", shape=(2, 4, 128, 512), dtype="bfloat16")
    training = GRAD_ENABLED | OPERAND_GRAD
    build.op(EFFICIENT_OP, x, x, x)
    build.mark("can-use", op=1, backends={FLASH: False})
    build.op(EFFICIENT_OP, x, x, x)
    build.op(EFFICIENT_OP, x, x, x, flags=training)
    build.op(EFFICIENT_OP, x, x, x)
    build.mark("can-use", op=4, backends={FLASH: True})
    build.op(EFFICIENT_OP, x, x, x)
    picks = Picks(build.build())

    found = [picks.of(i) for i in range(5)]
    said = [each.refused[FLASH].partition(" (")[2] for each in found if each is not None]
    rules = "by opdrift's rules; torch's own check, asked after the op, takes it)"

    assert said == ["confirmed by torch)", "confirmed by torch)", "", rules, rules]


@pytest.mark.parametrize(
    "fields",
    [{}, {"op": "1", "backends": {}}, {"op": 1, "backends": [FLASH]}, {"op": 99, "backends": {FLASH: True}}],
)  # fmt: skip
def test_a_mark_of_that_kind_that_is_none_of_the_recorders_is_left_alone(fields: dict[str, Any]):
    build = Builder(device="cuda:0", flags={"cuda.capability": "8.0"}, versions={"cuda": "12.8"})
    x = build.leaf("x", kind="input", shape=(2, 4, 128, 512), dtype="bfloat16")
    build.op(EFFICIENT_OP, x, x, x)
    build.mark("can-use", **fields)

    found = Picks(build.build()).of(0)

    assert found is not None
    assert found.refused == {FLASH: "head sizes must be equal and at most 256, not 512"}
