"""What attention may see differs, whichever backend or path runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, X, attention, check, infer, twins
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import opdrift
from opdrift import Batch

BOOK = Book()
agrees, diverges, rounds = BOOK.agrees, BOOK.diverges, BOOK.rounds

TOKENS = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
PADDED = torch.zeros(2, 6, dtype=torch.bool)
PADDED[1, 4:] = True
LATER = torch.ones(6, 6, dtype=torch.bool).triu(1)
LOW = torch.zeros(6, 6).masked_fill(LATER, float("-inf"))


def heads(
    attend: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor], **more: object
) -> nn.Module:
    """Attention of two heads, of which `attend` does the middle."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = m.qkv(x).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        return m.out(attend(m, q, k, v).transpose(1, 2).reshape(b, t, d))

    return Of(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16), **more)


def differing(left: Callable[..., Tensor], right: Callable[..., Tensor], **more: object) -> Pair:
    return infer(twins(lambda: heads(left, **more), lambda: heads(right, **more)), TOKENS)


def encoder(*, nested: bool = False) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


# ---- a mask is missing -------------------------------------------------------------------------------------


@diverges(cause="mask", says=("masked in the left run only",))
def a_learned_bias_that_masks_is_left_out_and_flash_runs_instead_of_math() -> Pair:
    return differing(
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=m.bias),
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v),
        bias=nn.Parameter(LOW.clone()),
    )


@diverges(cause="mask", says=("is_causal=True",))
def causal_is_left_out_and_math_runs_instead_of_flash() -> Pair:
    def on_math(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v)

    return differing(
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), on_math
    )


@diverges(cause="mask")
def causal_is_left_out_on_the_math_path() -> Pair:
    def model(causal: bool) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            q, k, v = m.qkv(x).chunk(3, -1)  # three dims: flash refuses
            return m.out(scaled_dot_product_attention(q, k, v, is_causal=causal))

        return Of(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))

    return infer(twins(lambda: model(True), lambda: model(False)), TOKENS)


@diverges(cause="mask")
def attention_written_out_is_causal_and_flash_is_not() -> Pair:
    return infer(
        twins(lambda: attention(eager=True), lambda: attention(eager=False, is_causal=False)),
        TOKENS,
    )


@diverges(cause="mask")
def an_additive_mask_is_left_out() -> Pair:
    def model(masked: bool) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            q = m.q(x)
            scores = q @ q.t()
            return (scores + m.low if masked else scores).softmax(-1) @ q

        return Of(forward, q=nn.Linear(8, 8), low=LOW[:4, :4].clone())

    return infer(twins(lambda: model(True), lambda: model(False)), X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mask", [{"mask": LATER}, {"src_key_padding_mask": PADDED}])
def test_an_encoder_on_its_fast_path_that_gets_no_mask(
    nested: bool, mask: dict[str, Tensor], tmp_path: Path
):
    """Padded or causal, through a nested tensor or not: the fused layer runs in both."""
    model = encoder(nested=nested)
    pair = Pair(
        torch.no_grad()(lambda: model(TOKENS, **mask)),
        torch.no_grad()(lambda: model(TOKENS)),
        (model, model),
    )

    check(Scenario(lambda: pair, "diverged", causes=frozenset(["mask"])), tmp_path)


@diverges(cause="mask")
def a_mask_is_on_the_slow_path_and_none_on_the_fast_path() -> Pair:
    model = encoder()
    return Pair(
        lambda: model(TOKENS, mask=LATER).detach(),
        torch.no_grad()(lambda: model(TOKENS)),
        (model, model),
    )


@diverges("aten._native_multi_head_attention.default", cause="mask")
def multihead_attention_gets_no_padding_mask() -> Pair:
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = TOKENS
    return Pair(
        torch.no_grad()(lambda: model(x, x, x, key_padding_mask=PADDED, need_weights=False)[0]),
        torch.no_grad()(lambda: model(x, x, x, need_weights=False)[0]),
        (model, model),
    )


# ---- another mask ------------------------------------------------------------------------------------------


@diverges(cause="mask")
def true_means_the_opposite() -> Pair:
    keep = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    keep[1, ..., 4:] = keep[0, ..., 3:] = False
    return differing(
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=m.keep),
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=~m.keep),
        keep=keep,
    )


def windowed(width: int) -> Callable[..., Tensor]:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        near = i[:, None] - i[None, :]
        seen = (near >= 0) & (near < width) if width else near >= 0
        return scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return attend


@diverges("aten.lt.Scalar", cause="mask", says=("other: 3 against 2",))
def the_window_is_narrower() -> Pair:
    return differing(windowed(3), windowed(2))


@diverges(cause="mask")
def the_window_is_missing() -> Pair:
    return differing(windowed(3), windowed(0))


@diverges("keep", cause="mask")
def a_buffer_that_masks_differs() -> Pair:
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    left, right = twins(
        lambda: heads(
            lambda m, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=m.keep),
            keep=keep.clone(),
        )
    )
    right.keep[3, 0] = False
    return infer((left, right), TOKENS)


# ---- no mask's fault ---------------------------------------------------------------------------------------


@rounds
def the_fast_path_and_the_slow_one_have_the_same_mask() -> Pair:
    model = encoder()
    return Pair(
        lambda: model(TOKENS, mask=LATER).detach(),
        torch.no_grad()(lambda: model(TOKENS, mask=LATER)),
        (model, model),
    )


@rounds
def math_and_flash_have_the_same_mask() -> Pair:
    def on(backend: SDPBackend) -> Callable[..., Tensor]:
        def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    return differing(on(SDPBackend.MATH), on(SDPBackend.FLASH_ATTENTION))


@diverges(cause="op-args", says=("scale",))
def another_backend_with_the_same_mask_and_another_scale() -> Pair:
    def on_math(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return differing(
        on_math,
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0),
    )


def written(keep: Callable[[Tensor], Tensor], low: float = float("-inf")) -> Callable[..., Tensor]:
    """Attention written out, over the keys that `keep` makes of the truth values of the module."""

    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return scores.masked_fill(~keep(m.valid), low).softmax(-1) @ v

    return attend


def kept(keep: Callable[[Tensor], Tensor] = lambda valid: valid) -> Callable[..., Tensor]:
    return lambda m, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=keep(m.valid))


VALID = ~PADDED[:, None, None]
#: Padded on the left, and causal: the padding itself sees nothing.
LEFT_PADDED = (~LATER)[None, None] & ~PADDED.flip(1)[:, None, None]


@diverges(cause="mask", says=("hides what it keeps in the other", "33.3%", "66.7%"))
def a_mask_is_inverted_beside_attention_that_is_written_out() -> Pair:
    some = torch.tensor([True, True, False, True, True, False])[None, None, None]
    return differing(kept(torch.bitwise_not), written(lambda valid: valid), valid=some)


@diverges(cause="mask", says=("hides what it keeps in the other",))
def a_mask_is_inverted_where_attention_is_written_out() -> Pair:
    return differing(kept(), written(torch.bitwise_not), valid=VALID)


@diverges(cause="mask", says=("lets through other keys", "50.0%", "83.3%"))
def a_mask_hides_more_where_attention_is_written_out() -> Pair:
    more = torch.tensor([True, True, True, False, False, False])
    return differing(kept(), written(lambda valid: valid & more), valid=VALID)


@rounds
def one_mask_as_truth_values_and_as_low_numbers() -> Pair:
    return differing(kept(), written(lambda valid: valid, low=-1e9), valid=VALID)


@diverges(cause="mask", says=("2 of 12 queries", "sample 1 at 0, 1", "all of the difference"))
def padding_that_sees_nothing_is_returned_by_both_backends() -> Pair:
    return differing(kept(), written(lambda valid: valid, low=-1e9), valid=LEFT_PADDED)


@rounds
def padding_that_sees_nothing_is_read_by_nobody() -> Pair:
    def forward(attend: Callable[..., Tensor]) -> nn.Module:
        inner = heads(attend, valid=LEFT_PADDED)
        return Of(lambda m, x: m.inner(x)[:, 2:], inner=inner)

    return infer(
        twins(lambda: forward(kept()), lambda: forward(written(lambda valid: valid, low=-1e9))),
        TOKENS,
    )


@diverges(cause="kernel")
def padding_that_sees_nothing_and_values_that_are_scaled() -> Pair:
    attend = written(lambda valid: valid, low=-1e9)
    return differing(kept(), lambda m, q, k, v: attend(m, q, k, v * 1.1), valid=LEFT_PADDED)


@agrees
def a_mask_that_hides_nothing_against_none() -> Pair:
    return differing(
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=m.zero),
        lambda m, q, k, v: scaled_dot_product_attention(q, k, v),
        zero=torch.zeros(6, 6),
    )


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    """Mask where a mask is at fault, and nowhere else."""
    check(scenario, tmp_path)


# ---- one sample alone against a batch ------------------------------------------------------------------------


@pytest.mark.parametrize("inverted", [True, False])
@pytest.mark.parametrize("more", [{"requires_grad": True}, {}])
def test_a_padding_mask_of_the_wrong_polarity_hides_the_sample_itself(
    tmp_path: Path, inverted: bool, more: dict[str, bool]
):
    """nn.MultiheadAttention hides where True stands; a mask of the right polarity is no divergence."""
    torch.manual_seed(1)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(3, 6, 16)
    hidden = torch.zeros(3, 6, dtype=torch.bool)
    hidden[0, 4:] = True
    if inverted:
        hidden = ~hidden
        hidden[1:, 0] = False
    with torch.set_grad_enabled(bool(more)):
        for name, given, mask, batch in (
            ("left", x[:1, :4], None, Batch(1)),
            ("right", x, hidden, Batch(3, lengths=[4, 6, 6])),
        ):
            with opdrift.record(tmp_path / name, model=model, batch=batch):
                model(given, given, given, key_padding_mask=mask)

    found = opdrift.diff(tmp_path / "left", tmp_path / "right", samples="0:0")

    if not inverted:
        assert found.verdict in ("rounding", "identical")
        return
    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.cause.slug == "mask"
    assert "masked in the right run only" in found.first.cause.summary
    assert any("hides positions of the sample itself" in e for e in found.first.cause.evidence)
