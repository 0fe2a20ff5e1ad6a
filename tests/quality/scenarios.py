"""What tests of whole runs share: pairs of runs, what is to be said of them, and the check."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import opdrift

Body = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """Two runs and their models.

    What is entered `around` a run is outside the recorder, which takes what it does for torch's own.
    """

    left: Body
    right: Body
    models: tuple[nn.Module, nn.Module] | None = None
    integrity: str = "auto"
    around: tuple[AbstractContextManager[object], ...] = (nullcontext(), nullcontext())


Make = Callable[[], Pair]


@dataclass(frozen=True)
class Scenario:
    """How to make a pair, and what is to be said of it.

    Attributes:
        causes: Slugs of which the first divergence's cause is one.
        says: Words of its summary or evidence.
    """

    make: Make
    verdict: str
    places: frozenset[str] = frozenset()
    module: str | None = None
    causes: frozenset[str] = frozenset()
    says: tuple[str, ...] = ()
    origins: int | None = None


class Book:
    """The scenarios of one test module."""

    def __init__(self) -> None:
        self.scenarios: list[Scenario] = []

    def diverges(
        self,
        *places: str,
        cause: str | tuple[str, ...],
        module: str | None = None,
        says: tuple[str, ...] = (),
        origins: int | None = None,
    ) -> Callable[[Make], Make]:
        """The runs diverge, first at one of these leaves or ops, for one of these causes."""
        causes = frozenset([cause] if isinstance(cause, str) else cause)

        def keep(make: Make) -> Make:
            self.scenarios.append(
                Scenario(make, "diverged", frozenset(places), module, causes, says, origins)
            )
            return make

        return keep

    def agrees(self, make: Make) -> Make:
        """The runs are identical in all that counts."""
        self.scenarios.append(Scenario(make, "identical"))
        return make

    def rounds(self, make: Make) -> Make:
        """The runs differ by rounding at most."""
        self.scenarios.append(Scenario(make, "rounding"))
        return make


def check(scenario: Scenario, folder: Path) -> None:
    """Record both runs, compare them, and hold the answer against what is to be said."""
    torch.manual_seed(3)
    pair = scenario.make()
    for number, (name, body) in enumerate((("left", pair.left), ("right", pair.right))):
        model = pair.models[number] if pair.models else None
        with (
            suppress(RunError),
            pair.around[number],
            opdrift.record(folder / name, model=model, integrity=pair.integrity),
        ):  # type: ignore[arg-type]
            body()

    found = opdrift.diff(folder / "left", folder / "right")

    if scenario.verdict == "rounding":
        assert found.verdict in ("rounding", "identical")  # the kernels may happen to agree
        return
    assert found.verdict == scenario.verdict
    if scenario.verdict == "identical":
        return
    assert found.first is not None
    if scenario.places:
        assert scenario.places & {found.first.name, found.first.op}
    assert found.first.cause.slug in scenario.causes
    if scenario.module is not None and found.first.name is None:
        assert found.first.module == scenario.module
    text = " | ".join([found.first.cause.summary, *found.first.cause.evidence])
    for words in scenario.says:
        assert words in text
    assert (
        re.search(r"\{\w+\}", f"{text} | {found.first.cause.try_}") is None
    )  # a blank left unfilled
    if scenario.origins is not None:
        assert len(found.origins) == scenario.origins


class RunError(Exception):
    """What a run of a scenario raises on purpose."""


def twins(
    make: Callable[[], nn.Module], other: Callable[[], nn.Module] | None = None
) -> tuple[nn.Module, nn.Module]:
    """Two models in evaluation mode with the same weights."""
    left, right = make().eval(), (other or make)().eval()
    right.load_state_dict(left.state_dict(), strict=False)
    return left, right


def infer(
    models: tuple[nn.Module, nn.Module], *x: Tensor, right: tuple[Tensor, ...] | None = None
) -> Pair:
    """Both models on the same input, without gradients."""
    return Pair(
        torch.no_grad()(lambda: models[0](*x)),
        torch.no_grad()(lambda: models[1](*(right or x))),
        models,
    )


class Of(nn.Module):
    """A module whose forward is a function of itself and the input."""

    def __init__(self, forward: Callable[..., Tensor], **children: object) -> None:
        super().__init__()
        self._forward = forward
        for name, child in children.items():
            if isinstance(child, nn.Module | nn.Parameter):
                setattr(self, name, child)
            elif isinstance(child, Tensor):
                self.register_buffer(name, child)

    def forward(self, *x: Tensor) -> Tensor:
        return self._forward(self, *x)


def mlp(out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, out))


#: An input of four rows.
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def attention(*, eager: bool, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = m.qkv(x).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        if eager:
            scores = (q @ k.transpose(-1, -2)) * (d // 2) ** -0.5
            scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
            y = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(
                q, k, v, **{"is_causal": True, **options}
            )  # type: ignore[arg-type]
        return m.out(y.transpose(1, 2).reshape(b, t, d))

    return Of(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)).to(dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 2, zero: bool = True
) -> None:
    for _ in range(steps):
        if zero:
            optimizer.zero_grad()
        model(X).pow(2).mean().backward()
        optimizer.step()


def residual(layers: list[int], *, add: bool = True) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for i in layers:
            y = m.layers[i](x).tanh()
            x = x + y if add else y
        return x

    return Of(forward, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
