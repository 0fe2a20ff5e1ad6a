"""A recorder that only remembers, and what fairscale needs to run here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fairscale.internal import parallel
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
WRAPPERS = {"_fsdp_wrapped_module", "_fpw_module"}


@dataclass(frozen=True)
class FakeDigest:
    raw: int
    n: int
    code: int


@dataclass
class FakeRecorder:
    """What an integration may use of a recorder, kept in lists."""

    model: nn.Module | None = None
    marks: list[dict[str, Any]] = field(default_factory=list)
    names: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    paused: int = 0

    def mark(self, kind: str, **fields: Any) -> None:
        self.marks.append({"kind": kind, **fields})

    def form(
        self,
        kind: str,
        shared: dict[str, Any],
        rest: Callable[[], dict[str, Any]] = dict,
    ) -> Callable[..., None]:
        return lambda **given: self.mark(kind, **shared, **rest(), **given)

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        with self.pause(), torch.no_grad():
            yield

    def name_tensor(
        self, tensor: torch.Tensor, name: str, *, kind: str = "parameter"
    ) -> FakeDigest | None:
        self.names.append((kind, name, tensor.detach().clone()))
        return None

    def name_tensors(
        self,
        named: Iterable[tuple[torch.Tensor, str, FakeDigest | None]],
        *,
        kind: str = "parameter",
    ) -> None:
        for tensor, name, _ in named:
            self.name_tensor(tensor, name, kind=kind)

    def digest(self, tensor: torch.Tensor) -> FakeDigest | None:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < needed:
            return None
        # Of a copy: numpy() would pin the storage's size, and fairscale could not free it.
        content = tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
        raw = int.from_bytes(hashlib.sha256(content).digest()[:7], "little") if any(content) else 0
        return FakeDigest(raw, tensor.numel(), tensor.element_size())

    def digests(
        self, contents: Iterable[tuple[torch.Tensor, Sequence[int]]]
    ) -> list[FakeDigest | None]:
        return [
            self.digest(piece)
            for tensor, sizes in contents
            for piece in tensor.reshape(-1)[: sum(sizes)].split(list(sizes))
        ]

    def cast_digests(self, contents: Any, dtype: torch.dtype) -> None:
        return None

    def digests_left(self, contents: Any) -> None:
        return None

    def versions(self, tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
        return [(tensor.untyped_storage()._cdata, tensor._version) for tensor in tensors]

    def writes(self, tensor: torch.Tensor) -> int:
        return tensor._version

    def clean_path(self, module: nn.Module) -> str | None:
        if self.model is None:
            return None
        for name, candidate in self.model.named_modules():
            if candidate is module:
                return ".".join(part for part in name.split(".") if part and part not in WRAPPERS)
        return None

    def of(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """The marks of a kind whose fields have these values."""
        return [
            mark
            for mark in self.marks
            if mark["kind"] == kind and all(mark[key] == value for key, value in wanted.items())
        ]

    def content(self, name: str) -> torch.Tensor:
        """The content last given this name."""
        return next(tensor for _, known, tensor in reversed(self.names) if known == name)


@pytest.fixture
def recorder() -> FakeRecorder:
    return FakeRecorder()


@pytest.fixture
def make_recorder() -> type[FakeRecorder]:
    return FakeRecorder


def example(name: str) -> Any:
    """A module of the examples' folder."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_example() -> Callable[[str], Any]:
    return example


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo process group of this process alone, and fairscale able to run without a GPU."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        with example("_fairscale_on_cpu").fairscale_on_cpu():
            yield
    finally:
        dist.destroy_process_group()
        # fairscale caches groups for the life of the process, destroyed ones too.
        if hasattr(parallel.get_process_group_cached, "_global_group_cache"):
            del parallel.get_process_group_cached._global_group_cache


def run_ranks(count: int, script: str, folder: Path, *arguments: str) -> None:
    """Run a script of this folder as so many ranks: it is given its rank, `folder` and the arguments."""
    here = Path(__file__).parent
    roots = (here.parents[1] / "tracer", here.parents[1] / "integrations")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, here / script, str(rank), str(folder), *arguments], env=environment
        )
        for rank in range(count)
    ]
    try:
        assert [rank.wait(300) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="session")
def two_processes() -> Callable[..., None]:
    return functools.partial(run_ranks, 2)


@pytest.fixture(scope="session")
def four_processes() -> Callable[..., None]:
    return functools.partial(run_ranks, 4)
