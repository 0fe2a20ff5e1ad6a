"""Follow an ESM checkpoint from its file to the model, and say when it never gets there.

`esm.pretrained._load_model_and_alphabet_core_v1` and `_v2` look as if they loaded a model, but they
only build one and hand back the state dict beside it (fair-esm 2.0.0, `esm/pretrained.py`). Dropping
that third value leaves every weight at its random initial value: facebookresearch/esm#297. The marks,
all with `library` "esm":

`checkpoint`          One of these functions returned: `source`, `model` (class), `tensors`
                      [[name, dtype, shape, digest]] of the state dict.
`load`                `load_state_dict` ran on that model, on a part of it or on what wraps it: `module`
                      (path, null if unknown), `strict`, `copied`, `missing`, `unexpected` (names),
                      `raised`. What it copied before it raised is not known: `copied` is null.
`checkpoint-dropped`  The recording ended and `load_state_dict` was never called: `source`,
                      `tensors` (how many), `summary` and `try` in words.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from opdrift.plugins import RecorderLike
from opdrift_integrations.digests import as_field
from opdrift_integrations.failures import Failures
from opdrift_integrations.patching import watch
from opdrift_integrations.paths import join

_BUILDERS = ("_load_model_and_alphabet_core_v1", "_load_model_and_alphabet_core_v2")


class EsmIntegration:
    """Marks that say whether an ESM checkpoint reached its model."""

    name = "esm"
    library = "esm"

    @contextlib.contextmanager
    def attach(self, recorder: RecorderLike) -> Iterator[None]:
        """Watch the functions that build ESM models, and `load_state_dict`."""
        # Not above: recorders load this class to learn its library, installed or not.
        import esm  # noqa: PLC0415

        watcher = _Watcher(recorder)
        # Another library is called esm too (EvolutionaryScale's); it has none of these functions.
        pretrained = getattr(esm, "pretrained", None)
        builders = [name for name in _BUILDERS if hasattr(pretrained, name)]
        with contextlib.ExitStack() as stack:
            for name in builders:
                observer = functools.partial(watcher.build, name)
                stack.enter_context(watch(pretrained, name, observer, watcher.failed))
            if builders:
                stack.enter_context(
                    watch(nn.Module, "load_state_dict", watcher.load, watcher.failed)
                )
            try:
                yield
            finally:
                watcher.finish()


@dataclass(slots=True)
class _Checkpoint:
    """A state dict that was handed out beside a model."""

    source: str
    model: ref[nn.Module]
    tensors: int
    loaded: bool = False


class _Watcher:
    """The observers of one recorder."""

    def __init__(self, recorder: RecorderLike) -> None:
        self._recorder = recorder
        self._checkpoints: list[_Checkpoint] = []
        self.failed = Failures(recorder, "esm")

    def build(self, source: str, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """A model was built, and its state dict handed out."""
        model, _, state = yield
        self._checkpoints.append(_Checkpoint(source, ref(model), len(state)))
        self._recorder.mark(
            "checkpoint",
            library="esm",
            source=source,
            model=type(model).__name__,
            tensors=[
                [
                    name,
                    str(tensor.dtype).removeprefix("torch."),
                    list(tensor.shape),
                    as_field(self._recorder.digest(tensor)),
                ]
                for name, tensor in state.items()
                if isinstance(tensor, torch.Tensor)
            ],
        )

    def load(
        self, module: nn.Module, state_dict: Any, strict: bool = True, *args: Any, **kwargs: Any
    ) -> Generator[None, Any, None]:
        """`load_state_dict` of any module; only those that have to do with a watched model count."""
        concerned = [
            checkpoint
            for checkpoint in self._checkpoints
            if (model := checkpoint.model()) is not None and _overlap(model, module)
        ]
        if not concerned:
            return
        # Taken before the call: wrappers rename the keys of the dict they are given.
        given = [join(name) for name in state_dict]
        copied: list[str] | None = None
        missing: list[str] = []
        unexpected: list[str] = []
        try:
            result = yield
            missing = [join(name) for name in result.missing_keys]
            unexpected = [join(name) for name in result.unexpected_keys]
            copied = [name for name in given if name not in set(unexpected)]
        finally:
            for checkpoint in concerned:
                checkpoint.loaded = True
            self._recorder.mark(
                "load",
                library="esm",
                module=self._recorder.clean_path(module),
                strict=strict,
                copied=copied,
                missing=missing,
                unexpected=unexpected,
                raised=copied is None,
            )

    def finish(self) -> None:
        """Say which checkpoints nobody loaded."""
        for checkpoint in self._checkpoints:
            if checkpoint.loaded:
                continue
            self._recorder.mark(
                "checkpoint-dropped",
                library="esm",
                source=checkpoint.source,
                tensors=checkpoint.tensors,
                summary=(
                    f"esm.pretrained.{checkpoint.source} returned a state dict of"
                    f" {checkpoint.tensors} tensors beside the model, and load_state_dict was never"
                    " called"
                ),
                **{
                    "try": "load the third return value: model.load_state_dict(state_dict);"
                    " or build the model with esm.pretrained.load_model_and_alphabet_core"
                },
            )


def _overlap(one: nn.Module, other: nn.Module) -> bool:
    """Whether one of two modules is the other one or a part of it."""
    return any(module is other for module in one.modules()) or any(
        module is one for module in other.modules()
    )
