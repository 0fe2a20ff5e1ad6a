"""A program for a process of its own: runs random products, convolutions and the like, recorded, with verbose libraries.

Its standard output is a file that oneDNN writes into, and MKL has one of its own. What each op made them
write is left beside the trace, one JSON list of lines a case.

    python cpu_routines.py FOLDER CASES
"""

from __future__ import annotations

import json
import os
import random
import sys
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
        )
    )


def whole(rng: random.Random) -> Case:
    """linear and matmul under inference_mode, where they are one op."""
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
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
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    dims, batch = rng.choice((1, 2, 2, 2, 3)), rng.choice((1, 1, 1, 2, 16))
    size, kernel = rng.choice((10, 12, 30)), rng.choice((1, 3, 5))
    stride, dilation, groups = (
        rng.choice((1, 1, 2)),
        rng.choice((1, 1, 1, 2)),
        rng.choice((1, 1, 2)),
    )
    image = ones(dtype, batch, 4, *(size,) * dims)
    if rng.random() < 0.3:
        weight = ones(dtype, 4, 6 // groups, *(kernel,) * dims)
        turned = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        return lambda: turned(image, weight, stride=stride, groups=groups, dilation=dilation)
    weight = ones(dtype, 6, 4 // groups, *(kernel,) * dims)
    plain = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    return lambda: plain(image, weight, stride=stride, groups=groups, dilation=dilation)


def other(rng: random.Random) -> Case:
    """gelu, recurrent layers, int8 products."""
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
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

    integers = torch.ones(32, 32, dtype=torch.int8)
    return rng.choice(
        (lambda: F.gelu(x, approximate=form), recurrent, lambda: torch._int_mm(integers, integers))
    )


def main(folder: Path, count: int) -> None:
    """Run the cases, and write down what each made the libraries say."""
    rng = random.Random(0)
    mkl = Path(os.environ["MKL_VERBOSE_OUTPUT_FILE"])
    mkl.touch()
    makers = (product, product, whole, convolution, other)
    cases = [rng.choice(makers)(rng) for _ in range(count)]
    said = []
    with torch.no_grad(), opdrift.record(folder / "t", kernels="off", integrity="off") as recorder:
        for number, case in enumerate(cases):
            if number == count * 4 // 5:
                torch._C._set_mkldnn_enabled(False)
                torch.nn.Identity()(torch.ones(1))  # flags are looked at where a module is called
            recorder.mark("case")
            before = os.fstat(1).st_size, mkl.stat().st_size
            case()
            lines = [
                os.pread(descriptor, 1 << 20, start).decode()
                for descriptor, start in zip((1, os.open(mkl, os.O_RDONLY)), before, strict=True)
            ]
            said.append("".join(lines).splitlines())
        recorder.mark("case")
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
