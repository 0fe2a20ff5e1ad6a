"""Run samples of every op that torch tests itself with, forward and backward, plain and recorded.

A program of its own, since importing torch's test-suite changes process-wide settings. Prints one JSON
object: how many samples ran, which ops gave other bits under recording, and the tracer's own failures.

    python every_op.py TRACE [SAMPLES]
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

import opdrift


def copied(value: Any) -> Any:
    """Fresh tensors with the same content, layout and `requires_grad`."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, value)


def digest(value: Any) -> str:
    """Everything about the tensors in a structure but version counters of new ones, which start anywhere."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            found.update(repr(leaf).encode())
            continue
        tensor = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
        tensor = tensor.clone() if tensor._is_zerotensor() else tensor
        found.update(
            repr((tensor.shape, tensor.stride(), tensor.dtype, leaf.requires_grad)).encode()
        )
        # a copy, since a tensor of one element may be contiguous with any stride
        dense = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
        found.update(dense.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def ran(op: Any, sample: Any) -> Any:
    """What the op returns, what became of what it was given, and gradients; or its exception."""
    torch.manual_seed(0)
    given, args, kwargs = copied((sample.input, sample.args, sample.kwargs))
    try:
        result = op(given, *args, **kwargs)
        heads = [
            leaf
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if heads:
            sum(
                (head.abs() if head.is_complex() else head).sum() * 1.37 for head in heads
            ).backward()
    except Exception as error:  # the comparison is about whatever the op raises
        return type(error).__name__, str(error)
    leaves = [
        leaf for leaf in pytree.tree_leaves((given, args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    gradients = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return result, gradients, leaves, [leaf._version for leaf in leaves]


def outcomes(samples: list[tuple[str, Any, Any]]) -> list[tuple[str, Any]]:
    return [(name, ran(op, sample)) for name, op, sample in samples]


def samples_of(per_op: int) -> Iterator[tuple[str, Any, Any]]:
    """The first samples of each op, in single precision and complex."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if "empty" in op.name:
            continue  # what it returns is not defined
        for dtype in (torch.float32, torch.complex64):
            if not op.supports_dtype(dtype, "cpu"):
                continue
            try:
                found = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
                for _, sample in zip(range(per_op), found, strict=False):
                    yield f"{op.full_name} {str(dtype).removeprefix('torch.')}", op, sample
            except (RuntimeError, NotImplementedError):
                continue  # no samples for this dtype here


def main() -> None:
    """Plain, recorded, plain; what differs between the plain runs already is left out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples = list(samples_of(int(sys.argv[2]) if len(sys.argv) > 2 else 3))
    plain = outcomes(samples)
    with opdrift.record(sys.argv[1]):
        recorded = outcomes(samples)
    again = outcomes(samples)

    def digests(runs: list[tuple[str, Any]]) -> list[str]:
        return [digest(run) for _, run in runs]

    rows = zip(samples, digests(plain), digests(recorded), digests(again), strict=True)
    differ = {name for (name, _, _), before, during, after in rows if before == after != during}
    trace = opdrift.load(sys.argv[1])
    assert trace.footer is not None
    sys.stdout.write(
        json.dumps(
            {
                "samples": len(samples),
                "differ": sorted(differ),
                "failures": [dict(failure) for failure in trace.footer.failures],
                "incomplete": trace.incomplete,
                "ops": len(trace.ops),
            }
        )
    )


if __name__ == "__main__":
    main()
