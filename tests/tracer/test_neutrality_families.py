"""Recording leaves every family of ops alone: bits, layouts, version counters, and the routines of CPU libraries.

Each op runs forward and backward, under no_grad, inference_mode and autocast (`op_families`). What no dispatch mode
can keep is at the end, in test_neutrality.py, and in docs/tricky-cases.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from op_families import COMPUTED_BY_LIBRARIES, FAMILIES, run
from torch.nn.attention import SDPBackend, sdpa_kernel

import opdrift

PROGRAM = Path(__file__).with_name("op_families.py")


@pytest.mark.filterwarnings("ignore")  # prototypes of torch's say that they are
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_layouts_and_versions_are_the_same(
    family: str, unchanged: Callable[..., opdrift.Trace]
):
    """The counters of given tensors, that is: those of new ones begin anywhere, and a view has two names in autograd."""
    trace = unchanged(lambda: run(family), but=("version", "graph"))

    assert len(trace.ops) > 2 * len(FAMILIES[family])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """By family what oneDNN and MKL said of a run: plain, and recorded."""
    folder = tmp_path_factory.mktemp("said")
    variables = {
        **os.environ,
        "ONEDNN_VERBOSE": "1",
        "MKL_VERBOSE": "1",
        "MKL_VERBOSE_OUTPUT_FILE": str(folder / "mkl.txt"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with (folder / "stdout.txt").open("w+") as stdout:
        subprocess.run(
            [sys.executable, PROGRAM, folder], env=variables, stdout=stdout, check=True, timeout=120
        )
    found: list[dict[str, list[str]]] = json.loads((folder / "said.json").read_text())
    return found


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="MKL and oneDNN say what they run"
)
@pytest.mark.parametrize("family", COMPUTED_BY_LIBRARIES)
def test_the_cpu_libraries_run_the_same_routines(family: str, said: list[dict[str, list[str]]]):
    """Implementation, sizes, layouts and threads of each call, in order."""
    plain, recorded = (each[family] for each in said)

    assert recorded == plain
    assert plain


def foreach_writes() -> Iterator[tuple[str, Callable[..., object], list[object]]]:
    """Every `_foreach_*_` overload, with arguments by its schema; two tensors in each list."""
    by_type: dict[str, Callable[[], object]] = {
        "List[Tensor]": lambda: [torch.full((3,), 0.5), torch.full((2, 2), 0.25)],
        "List[number]": lambda: [2.0, 3.0],
        "number": lambda: 2.0,
        "float": lambda: 2.0,
        "Tensor": lambda: torch.tensor([2.0, 3.0]),
    }
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith("aten::_foreach_") and name.endswith("_"):
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            needed = [a for a in op._schema.arguments if not a.has_default_value()]
            arguments = [by_type[str(a.type)]() for a in needed if not a.kwarg_only]
            if overload == "Tensor" and name != "_foreach_addcdiv_" and name != "_foreach_addcmul_":
                arguments[-1] = torch.tensor(2.0)  # one number for all
            yield f"{name}.{overload}", op, arguments


def test_every_foreach_write_moves_the_counters_that_it_moves_without_a_mode(tmp_path: Path):
    """Under a bare mode none moves, and autograd would take stale contents for fresh ones."""

    def outcome(op: Callable[..., object], arguments: list[object]) -> list[object]:
        op(*arguments)
        tensors = [
            t for a in arguments if isinstance(a, list) for t in a if isinstance(t, torch.Tensor)
        ]
        return [(t._version, t.tolist()) for t in tensors]

    plain = {name: outcome(op, arguments) for name, op, arguments in foreach_writes()}
    with opdrift.record(tmp_path / "t"):
        recorded = {name: outcome(op, arguments) for name, op, arguments in foreach_writes()}

    assert recorded == plain
    assert len(plain) > 60
    assert all(versions[0][0] > 0 for versions in plain.values())


def test_autocast_is_off_inside_an_op_that_it_casts_for(tmp_path: Path):
    """Its own ops run as it chose, whatever they are made of; and it is off where the program switched it off."""

    def run_() -> list[torch.Tensor]:
        theta, x = torch.full((1, 2, 3), 0.3), torch.full((2, 4, 6, 8), 0.1)
        found = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with sdpa_kernel(SDPBackend.MATH):
                found.append(F.scaled_dot_product_attention(x, x, x))
            with torch.autocast("cpu", enabled=False):
                found.append(F.affine_grid(theta, (1, 1, 4, 4), align_corners=False))
            found.append(F.affine_grid(theta, (1, 1, 4, 4), align_corners=False))
        return found

    plain = run_()
    with opdrift.record(tmp_path / "t"):
        recorded = run_()

    assert [t.dtype for t in recorded] == [t.dtype for t in plain]
    assert [t.dtype for t in plain[1:]] == [torch.float32, torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


class TestWhatNoDispatchModeCanKeep:
    """As in test_neutrality.py: each fails when torch stops doing so, or when the tracer prevents it."""

    @staticmethod
    def both(folder: Path, run_: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        plain = run_()
        with opdrift.record(folder / "t"):
            return plain, run_()

    @pytest.mark.parametrize("function", [torch.linalg.eigvalsh, torch.linalg.svdvals])
    def test_values_alone_are_computed_with_vectors(
        self, tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor]
    ):
        """Without gradients LAPACK is asked for values only, under a mode for both: the last bits differ."""
        x = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
        plain, recorded = self.both(tmp_path, lambda: function(x @ x.mT))

        assert not torch.equal(plain, recorded)
        torch.testing.assert_close(plain, recorded, rtol=1e-4, atol=1e-4)

    def test_pinverse_is_taken_for_pinv_under_autocast(self, tmp_path: Path):
        """Autocast lists the first for float32 and not the second, which is all that a mode sees."""
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))

        def inverse() -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.pinverse(x)

        plain, recorded = self.both(tmp_path, inverse)

        assert (plain.dtype, recorded.dtype) == (torch.float32, torch.bfloat16)

    def test_unsafe_split_under_inference_mode_gives_no_views(self, tmp_path: Path):
        x = torch.ones(4, requires_grad=True)

        def part() -> torch.Tensor:
            with torch.inference_mode():
                return x.unsafe_split(2)[0]

        plain, recorded = self.both(tmp_path, part)

        assert (plain.requires_grad, recorded.requires_grad) == (True, False)
