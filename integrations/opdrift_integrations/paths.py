"""Module paths as the model's author wrote them."""

from __future__ import annotations

#: Path segments that wrappers add; the model's own names do not have them.
_WRAPPERS = frozenset(
    {"_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_orig_mod"}
)


def join(*segments: str) -> str:
    """Join parts of a module path, without what wrappers add to it."""
    names = (name for segment in segments for name in segment.split("."))
    return ".".join(name for name in names if name and name not in _WRAPPERS)


def with_class(path: str, kind: str) -> str:
    """How the spans of a module's calls are called: `layers.0.fc1 (Linear)`; the class alone of the root module."""
    return f"{path} ({kind})" if path and kind else path or kind or "module"
