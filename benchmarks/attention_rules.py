"""Hold the rules for attention backends against torch's own choosers, on a GPU or on the CPU.

Usage: python benchmarks/attention_rules.py [--device cuda|cpu] [--calls N] [--seed N]

Makes random calls of `scaled_dot_product_attention` (sizes, types, masks, dropout, layouts, gradients, switches),
and asks torch which backend it takes: `_fused_sdp_choice`, and on a GPU `can_use_*` of each backend. Nothing is
computed. Prints where the rules of `opdrift.picks` say something else, and exits with 1 if they do anywhere. Of the
first few, torch's own words follow on stderr.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from opdrift.picks.sdpa import CUDNN, EFFICIENT, FLASH, Facts, Gpu, Operand, Switches
from opdrift.picks.sdpa_rules import choose, cuda_rules, objections

DTYPES = (torch.float16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float64)
HEAD_SIZES = (8, 16, 64, 64, 96, 100, 128, 136, 192, 200, 224, 256, 264, 512)
LENGTHS = (1, 2, 64, 128, 129)
#: Disagreements that are shown.
SHOWN = 20


@dataclass(frozen=True)
class Call:
    """One call; the tensors hold memory and no numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    def facts(self) -> Facts:
        """What the rules look at."""
        query, key, value = (operand(t) for t in (self.query, self.key, self.value))
        return Facts(
            query,
            key,
            value,
            mask=None if self.mask is None else operand(self.mask),
            dropout=self.dropout,
            causal=self.causal,
            grouped=self.grouped,
            wants_grad=torch.is_grad_enabled()
            and any(o.requires_grad for o in (query, key, value)),
            device=self.query.device.type,
        )

    def arguments(self) -> tuple[Any, ...]:
        """As `torch.backends.cuda.SDPAParams` and `_fused_sdp_choice` take them."""
        return self.query, self.key, self.value, self.mask, self.dropout, self.causal


def operand(tensor: Tensor) -> Operand:
    """The facts of one tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Operand(tuple(tensor.shape), tensor.stride(-1), dtype, tensor.requires_grad)


def made(*shape: int, dtype: torch.dtype, device: str, step: int = 1, grad: bool = False) -> Tensor:
    """Memory without content; with a step, its last dim is not contiguous."""
    wide = torch.empty(*shape[:-1], shape[-1] * step, dtype=dtype, device=device)
    return wide[..., ::step].detach().requires_grad_(grad)


def calls(rng: random.Random, count: int, device: str) -> Iterator[Call]:
    """Random calls; most have one or two odd properties, so that each rule decides some of them."""
    for _ in range(count):
        dtype, size = rng.choice(DTYPES), rng.choice(HEAD_SIZES)
        batch, heads, queries = rng.choice((1, 2, 15)), rng.choice((4, 8)), rng.choice(LENGTHS)
        keys = queries if rng.random() < 0.6 else rng.choice(LENGTHS)
        grouped = rng.random() < 0.25
        few = rng.choice((1, 2, 3)) if grouped or rng.random() < 0.05 else heads
        last = size if rng.random() < 0.9 else rng.choice(HEAD_SIZES)
        spread = 2 if rng.random() < 0.1 else 1
        grad = rng.random() < 0.3

        make = partial(made, dtype=dtype, device=device)
        operands = partial(make, step=spread, grad=grad)
        mask = None
        if rng.random() < 0.4:
            leading = rng.choice(((), (1, 1), (batch, 1), (batch, heads), (heads,)))
            mask = make(*leading, queries, keys, grad=rng.random() < 0.2)
            if rng.random() < 0.3:
                mask = torch.empty(mask.shape, dtype=torch.bool, device=device)
        yield Call(
            operands(batch, heads, queries, size),
            operands(batch, few, keys, size),
            operands(batch, few, keys, last),
            mask,
            rng.choice((0.0, 0.0, 0.0, 0.1, 0.125)),
            rng.random() < 0.3 and mask is None,
            grouped,
        )


def gpu() -> Gpu:
    """The present one."""
    major, minor = torch.cuda.get_device_capability()
    version = (torch.version.cuda or "0.0").split(".")
    return Gpu(
        major,
        minor,
        cudnn=torch.backends.cudnn.version() or 0,
        cuda=int(version[0]) * 1000 + int(version[1]) * 10,
    )


def switches() -> Switches:
    """Those in force; the order as torch has it after its first choice."""
    return Switches(
        flash=torch.backends.cuda.flash_sdp_enabled(),
        efficient=torch.backends.cuda.mem_efficient_sdp_enabled(),
        cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
        math=torch.backends.cuda.math_sdp_enabled(),
        order=tuple(torch._C._get_sdp_priority_order()),
    )


def torchs_choice(call: Call) -> str | None:
    """The backend that torch takes; None if it raises."""
    try:
        number = torch._fused_sdp_choice(*call.arguments(), enable_gqa=call.grouped)
    except (RuntimeError, IndexError):
        return None
    return None if number < 0 else SDPBackend(number).name


CAN_USE: dict[str, Callable[[Any, bool], bool]] = {
    FLASH: torch.backends.cuda.can_use_flash_attention,
    EFFICIENT: torch.backends.cuda.can_use_efficient_attention,
    CUDNN: torch.backends.cuda.can_use_cudnn_attention,
}


def disagreements(call: Call, device: Gpu | None, *, aloud: bool) -> Iterator[str]:
    """Where torch and the rules part, in words; aloud with torch's own, on stderr."""
    facts = call.facts()
    torchs, ours = torchs_choice(call), choose(facts, switches(), device)
    if torchs != ours.backend:
        yield f"torch takes {torchs}, the rules {ours.backend}: {dict(ours.refused)}"
    if device is None:
        return
    params = torch.backends.cuda.SDPAParams(*call.arguments(), call.grouped)
    for backend, can_use in CAN_USE.items():
        rules = cuda_rules(backend, nested=False)
        assert rules is not None
        why = objections(rules, facts, switches(), device)
        if can_use(params, False) == bool(why):
            yield f"{backend}: torch {'takes' if why else 'refuses'} it, the rules say {why or 'nothing'}"
            if aloud:
                can_use(params, True)


def hold(device: str, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Make calls on a device: how often torch took each backend, and every disagreement, with the call."""
    rng, capability = random.Random(seed), gpu() if device == "cuda" else None
    chosen: Counter[str] = Counter()
    wrong: list[str] = []
    for call in calls(rng, count, device):
        chosen[torchs_choice(call) or "raises"] += 1
        wrong += [
            f"{found}\n  {call.facts()}"
            for found in disagreements(call, capability, aloud=len(wrong) < SHOWN)
        ]
    return chosen, wrong


def main() -> int:
    """Make the calls, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here, so nothing was checked.")
        return 2
    chosen, wrong = hold(options.device, options.calls, options.seed)
    for found in wrong[:SHOWN]:
        print(found)
    where = gpu() if options.device == "cuda" else "the CPU"
    print(f"{options.calls} calls on {where}: {dict(chosen)}; {len(wrong)} disagreements")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
