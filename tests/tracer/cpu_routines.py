"""A program for a process of its own: runs random products, convolutions and the like, recorded, with verbose libraries.

Its standard output is a file that oneDNN writes into, and MKL has one of its own. What each op made them
write is left beside the trace, one JSON list of lines a case.

    python cpu_routines.py FOLDER CASES
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor

import opdrift

DTYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.complex64,
)
SIZES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 33)

Case = Callable[[], object]


def ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape).to(dtype)


def product(rng: random.Random) -> Case:
    """mm, addmm, bmm, baddbmm, mv, dot, with turned operands."""
    dtype = rng.choice(DTYPES)
    b, m, n, k = (rng.choice(SIZES) for _ in range(4))
    left, right = ones(dtype, m, k), ones(dtype, k, n)
    if rng.random() < 0.5:
        right = ones(dtype, n, k).t()
    batches = ones(dtype, b, m, k), ones(dtype, b, k, n)
    wide = ones(dtype, 64 * m, k)
    return rng.choice(
        (
            lambda: torch.mm(left, right),
            lambda: torch.addmm(ones(dtype, n), left, right),
            lambda: torch.bmm(*batches),
            lambda: torch.baddbmm(ones(dtype, b, m, n), *batches),
            lambda: torch.mv(wide, ones(dtype, k)),
            lambda: torch.dot(ones(dtype, 300 * k), ones(dtype, 300 * k)),
            lambda: torch.mm(ones(dtype, 1, 64 * k), ones(dtype, n, 64 * k).t()),
        )
    )


def whole(rng: random.Random) -> Case:
    """linear and matmul under inference_mode, where they are one op."""
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    b, m, n, k = (rng.choice(SIZES) for _ in range(4))
    rows, weight = ones(dtype, b, m, k), ones(dtype, n, k)
    bias = ones(dtype, n) if rng.random() < 0.5 else None
    other = rng.choice((ones(dtype, k, n), ones(dtype, b, k, n)))
    call = rng.choice((lambda: F.linear(rows, weight, bias), lambda: torch.matmul(rows, other)))

    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def convolution(rng: random.Random) -> Case:
    """One to three dims, strided, dilated, grouped, transposed."""
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    dims, batch = rng.choice((1, 2, 2, 2, 3)), rng.choice((1, 1, 1, 2, 16))
    size, kernel = rng.choice((10, 12, 30)), rng.choice((1, 3, 5))
    stride, dilation, groups = (
        rng.choice((1, 1, 2)),
        rng.choice((1, 1, 1, 2)),
        rng.choice((1, 1, 2)),
    )
    if dims == 3:
        size = 10  # torch unfolds these by many small transposes, each a line
    image = ones(dtype, batch, 4, *(size,) * dims)
    if rng.random() < 0.3:
        weight = ones(dtype, 4, 6 // groups, *(kernel,) * dims)
        turned = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        call = turned
    else:
        weight = ones(dtype, 6, 4 // groups, *(kernel,) * dims)
        call = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def forward() -> Tensor:
        return call(image, weight, stride=stride, groups=groups, dilation=dilation)

    if rng.random() < 0.7:
        return forward
    image.requires_grad_()
    weight.requires_grad_()
    with torch.enable_grad():
        result = forward().sum()
    return result.backward


def other(rng: random.Random) -> Case:
    """gelu, and recurrent layers."""
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    x = ones(dtype, 4, 6, 8)
    x = rng.choice((x, x.transpose(1, 2), x[0, 0, :1]))
    form = rng.choice(("none", "none", "tanh"))
    kind = rng.choice((torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN))
    layer = kind(8, 8).to(torch.float32 if kind is not torch.nn.LSTM else dtype)
    steps = ones(next(layer.parameters()).dtype, 3, 2, 8)
    inference = rng.random() < 0.5

    def recurrent() -> object:
        with torch.inference_mode(inference):
            return layer(steps)

    return rng.choice((lambda: F.gelu(x, approximate=form), recurrent))


def eight_bits(rng: random.Random) -> Case:
    """Integers, float8, quantised linear layers, and sums of rows of a table."""
    m, n, k = (rng.choice((1, 8, 32)) for _ in range(3))
    kind = rng.randrange(4)
    if kind == 0:
        left, right = ones(torch.int8, m, k), ones(torch.int8, k, n)
        return lambda: torch._int_mm(left, right)
    if kind == 1:
        dtype = rng.choice((torch.float8_e4m3fn, torch.float8_e5m2))
        left, right = ones(dtype, 16 * m, 16 * k), ones(dtype, 16 * n, 16 * k).t()
        scales = rng.choice(((1, 1), (16 * m, 16 * n)))
        scale, other = torch.ones(scales[0], 1), torch.ones(1, scales[1])
        if scales == (1, 1):
            scale, other = torch.tensor(1.0), torch.tensor(1.0)
        return lambda: torch._scaled_mm(left, right, scale, other, out_dtype=torch.bfloat16)
    if kind == 2:
        table, mode = torch.ones(n + 1, k), rng.choice(("sum", "mean", "max"))
        return lambda: F.embedding_bag(torch.zeros(m, 3, dtype=torch.long), table, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves its quantised layers elsewhere
        layer = torch.ao.nn.quantized.Linear(k, n)
        steps = torch.quantize_per_tensor(torch.ones(m, k), 0.1, 0, torch.quint8)
    return lambda: layer(steps)


#: After so many fifths of the cases: what the program sets.
SETTINGS: dict[int, Callable[[], object]] = {
    2: lambda: torch.set_float32_matmul_precision("medium"),
    3: lambda: torch.set_float32_matmul_precision("highest"),
    4: lambda: torch._C._set_mkldnn_enabled(False),
}


def main(folder: Path, count: int) -> None:
    """Run the cases, and write down what each made the libraries say."""
    rng = random.Random(0)
    mkl = Path(os.environ["MKL_VERBOSE_OUTPUT_FILE"])
    mkl.touch()
    reader = os.open(mkl, os.O_RDONLY)
    makers = (product, product, whole, convolution, other, eight_bits)
    cases = [rng.choice(makers)(rng) for _ in range(count)]
    said = []
    with torch.no_grad(), opdrift.record(folder / "t", kernels="off", integrity="off") as recorder:
        for number, case in enumerate(cases):
            change = SETTINGS.get(number * 5 // count) if number * 5 % count < 5 else None
            if change is not None:
                change()
                torch.nn.Identity()(torch.ones(1))  # flags are looked at where a module is called
            recorder.mark("case")
            before = os.fstat(1).st_size, mkl.stat().st_size
            # e.g. convolutions of float16 without units for it
            with contextlib.suppress(RuntimeError):
                case()
            lines = [
                os.pread(descriptor, 1 << 20, start).decode()
                for descriptor, start in zip((1, reader), before, strict=True)
            ]
            said.append("".join(lines).splitlines())
        recorder.mark("case")
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
