"""One fault planted at each op of small models is found at exactly that op."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import opdrift
from opdrift.tracefile.reader import Trace

Fault = Callable[[Tensor], None]


class Plant(TorchDispatchMode):
    """Spoils the result of one op; entered around the recorder, so that the recorder sees the spoiled one."""

    def __init__(self, at: int, fault: Fault) -> None:
        super().__init__()
        self._at = at
        self._fault = fault
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        if self.count == self._at:
            first = out[0] if isinstance(out, tuple | list) else out
            with torch._C._DisableTorchDispatch():
                self._fault(first)
        return out


class Decoder(nn.Module):
    """One layer: norm, attention written out, gated feed-forward, rotary angles."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.gate, self.up, self.down = (nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16))
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        q, k = self.rotate(q), self.rotate(k)
        scores = q @ k.transpose(1, 2) * 0.25
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        h = h + self.out(scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v)
        h = h + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return self.head(h)

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        angle = angle.to(x.dtype)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class ConvNet(nn.Module):
    """Convolution, batch norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 3)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().mean((2, 3)))


def flip(x: Tensor) -> None:
    """Another sign of the largest element."""
    flat = x.reshape(-1) if x.is_contiguous() else x.flatten()
    if x.dtype == torch.bool:
        x.logical_not_()
    elif x.is_contiguous():
        where = flat.abs().nan_to_num(0.0, 0.0, 0.0).argmax()
        flat[where] = -flat[where] - 1 if x.dtype == torch.int64 else -flat[where]


def reverse(x: Tensor) -> None:
    """Rows in another order."""
    if x.dim() and len(x) > 1:
        x.copy_(x.flip(0).clone())


def spoil_with_nan(x: Tensor) -> None:
    """One NaN."""
    if x.is_floating_point() and x.is_contiguous():
        x.view(-1)[0] = float("nan")


MODELS = {
    "decoder": (Decoder, lambda: torch.arange(10).view(2, 5) % 7),
    "conv": (ConvNet, lambda: torch.randn(2, 3, 9, 9)),
}


def record(path: Path, model: nn.Module, x: Tensor, plant: Plant | None = None) -> Trace:
    with torch.no_grad():
        if plant is None:
            with opdrift.record(path, model=model):
                model(x)
        else:
            with plant, opdrift.record(path, model=model):
                model(x)
    return opdrift.load(path)


def places(trace: Trace) -> list[int]:
    """Ops that compute: their results are fingerprinted, and no constant or fresh memory."""
    found = []
    for i in range(len(trace.ops)):
        op = trace.op(i)
        info = op.signature.op
        if (
            op.inputs
            and not info.view
            and not info.uninitialised
            and trace.fingerprint(op.outputs[0]) is not None
        ):
            found.append(i)
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "fault"),
    [
        pytest.param("decoder", torch.float32, flip, marks=pytest.mark.slow),
        pytest.param("decoder", torch.bfloat16, reverse, marks=pytest.mark.slow),
        pytest.param("decoder", torch.float32, spoil_with_nan, marks=pytest.mark.slow),
        ("conv", torch.float32, reverse),
        ("conv", torch.bfloat16, flip),
    ],
)
def test_a_fault_is_found_at_its_op(tmp_path: Path, name: str, fault: Fault, dtype: torch.dtype):
    """For every op that computes: the first divergence is that op, material, and its inputs match."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make().eval().to(dtype), inputs()
    x = x.to(dtype) if x.is_floating_point() else x
    plain = record(tmp_path / "plain", model, x)

    wrong, found = [], 0
    for index in places(plain):
        plant = Plant(index + 1, fault)
        spoiled = record(tmp_path / f"spoiled {index}", model, x, plant)
        diagnosis = opdrift.diff(plain, spoiled)
        outputs = [t.fingerprint(t.op(index).outputs[0]) for t in (plain, spoiled)]
        if outputs[0] is not None and outputs[1] is not None and outputs[0].key == outputs[1].key:
            continue  # the fault changed nothing here
        if diagnosis.verdict == "identical":
            continue  # it was masked or rounded away before the output
        found += 1
        first = diagnosis.first_bitwise
        if (
            first is None
            or not first.material
            or (first.seq.left, first.seq.right) != (index + 1, index + 1)
        ):
            wrong.append(
                (plain.op(index).name, first and first.op, first and first.seq, diagnosis.verdict)
            )

    assert wrong == []
    assert found > 5
