"""Say what a transformers model was told to compute with: attention, precision, cache.

Which attention runs is a word in the model's settings (`config._attn_implementation`), far from the ops that differ. It is
written down when a model is called by the program, and again when it has changed. The marks:

`model-settings`  `library` "transformers", `module` (path, null if unknown), `model` (class), `attention` {part of the
                  settings: implementation; "" is the model's own, "vision_config" and the like those of its parts},
                  `dtype` (of the parameters), `use_cache`, `cache` (class of the cache that the call was given, null
                  without one: with `use_cache` the model makes its own).

transformers 4.57 and 5.24 were read for this; a model whose settings lack these names has null there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from opdrift.plugins import RecorderLike


class TransformersIntegration:
    """Marks that say with which attention, precision and cache a transformers model was called."""

    name = "transformers"
    #: Not the library itself: programs import that for tokenizers, too.
    library = "transformers.modeling_utils"

    def __init__(self) -> None:
        self._recorder: RecorderLike | None = None
        #: Root module -> the models of transformers in it.
        self._models: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()
        self._said: WeakKeyDictionary[nn.Module, Mapping[str, Any]] = WeakKeyDictionary()

    @contextlib.contextmanager
    def attach(self, recorder: RecorderLike) -> Iterator[None]:
        """Nothing is replaced: the recorder itself says when a module is called."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def called(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The program calls a module: note the settings of the models in it, if they are new."""
        recorder = self._recorder
        if recorder is None:
            return
        for reference in self._models_in(module):
            model = reference()
            if model is None:
                continue
            settings = _settings(model, args, kwargs)
            if self._said.get(model) != settings:
                self._said[model] = settings
                path = recorder.clean_path(model)
                recorder.mark("model-settings", library="transformers", module=path, **settings)

    def _models_in(self, module: nn.Module) -> list[ref[nn.Module]]:
        found = self._models.get(module)
        if found is None:
            found = self._models[module] = [ref(model) for model in _outermost(module)]
        return found


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """The models of transformers in a module that lie in no other one."""
    loaded = sys.modules.get("transformers.modeling_utils")
    kind = getattr(loaded, "PreTrainedModel", None)
    if kind is None:
        return
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _settings(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    config = model.config
    parts = {"": config, **{name: getattr(config, name, None) for name in _parts(config)}}
    return {
        "model": type(model).__name__,
        "attention": {
            name: implementation
            for name, part in parts.items()
            if (implementation := getattr(part, "_attn_implementation", None)) is not None
        },
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
        "use_cache": kwargs.get("use_cache", getattr(config, "use_cache", None)),
        "cache": _cache(args, kwargs),
    }


def _parts(config: Any) -> list[str]:
    """Names of the settings of parts, such as a vision tower's."""
    return list(getattr(config, "sub_configs", None) or ())


def _cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if kind is None:
        return None
    given = (*args, *kwargs.values())
    return next((type(each).__name__ for each in given if isinstance(each, kind)), None)
