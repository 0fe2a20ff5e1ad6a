"""What an op costs on disk: at most 250 bytes on average in models, and no sketch where the sample is everything."""

from pathlib import Path

import pyarrow.ipc as ipc
import pytest
import torch
from torch import nn

import opdrift


def tensors_of(path: Path) -> list[dict]:
    return ipc.open_stream(path / "tensors.arrows").read_all().to_pylist()


def bytes_per_op(path: Path) -> float:
    """Of the tables; header and footer are the same for any number of ops."""
    return sum(file.stat().st_size for file in path.glob("*.arrows")) / len(opdrift.load(path).ops)


@pytest.mark.parametrize(
    ("dtype", "sketch"), [(torch.float32, 80), (torch.float64, 80), (torch.bfloat16, 128)]
)
def test_a_sketch_is_stored_from_33_components_on(tmp_path: Path, dtype, sketch):
    """Up to 32 the sample is the whole content; below 4096 half of the buckets are kept."""
    with opdrift.record(tmp_path / "run.trace"):
        for n in (1, 32, 33, 4095, 4096):
            torch.ones(n, dtype=dtype)

    stored = {
        row["n"]: (len(row["sketch"]), len(row["sample"]))
        for row in tensors_of(tmp_path / "run.trace")
    }
    width = dtype.itemsize
    assert stored == {
        1: (0, width),
        32: (0, 32 * width),
        33: (sketch, 32 * width),
        4095: (sketch, 32 * width),
        4096: (2 * sketch, 32 * width),
    }


def test_ops_on_small_tensors_take_tens_of_bytes(tmp_path: Path):
    """Four elements, new ones at every op."""
    x, y = torch.randn(4), torch.randn(4)
    with opdrift.record(tmp_path / "run.trace"):
        for _ in range(4000):
            x = torch.sub(y, x, alpha=0.999)

    assert bytes_per_op(tmp_path / "run.trace") < 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [33, 256, 4095])
def test_an_op_that_makes_a_small_content_anew_takes_no_more_than_250_bytes(
    tmp_path: Path, dtype, n: int
):
    """What nothing compresses: other numbers at every op."""
    x, y = torch.randn(2, n, dtype=dtype)
    with opdrift.record(tmp_path / "run.trace"):
        for _ in range(3000):
            x = torch.sub(y, x, alpha=0.999)

    assert bytes_per_op(tmp_path / "run.trace") < 250


def test_a_transformer_takes_no_more_than_250_bytes_an_op(tmp_path: Path):
    """Every content is new, and stored once; views are stored without one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).train()
    with opdrift.record(tmp_path / "run.trace", model=model):
        for _ in range(4):
            model(torch.randn(2, 16, 64))

    assert bytes_per_op(tmp_path / "run.trace") < 250
