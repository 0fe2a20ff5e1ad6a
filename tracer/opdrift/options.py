"""What `record` was asked for, checked at the door."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch.nn import Module

from opdrift.batch import Batch
from opdrift.errors import InvalidOptionError
from opdrift.plugins import Integration, installed_integrations

Effort = Literal["auto", "full", "off"]
_EFFORTS: Final = ("auto", "full", "off")


#: Environment variable: wait at once for what programs leave under way (docs/sharding.md, Races).
SYNCHRONISED: Final = "OPDRIFT_SYNCHRONISED"


@dataclass(frozen=True, slots=True)
class Options:
    """The checked arguments of `record`; and `synchronised`, from the environment.

    `integrations` holds those that were named or handed over, `automatic` says whether "auto" was among them.
    """

    path: Path
    models: Mapping[str, Module]
    inputs: Mapping[str, torch.Tensor]
    batch: Batch | None
    integrations: tuple[str | Integration, ...]
    automatic: bool
    kernels: Effort
    integrity: Effort
    label: str
    overwrite: bool
    synchronised: bool

    def described(self) -> dict[str, Any]:
        """The part that the trace's header keeps."""
        batch = self.batch
        return {
            "kernels": self.kernels,
            "integrity": self.integrity,
            "synchronised": self.synchronised,
            "batch": None
            if batch is None
            else {"size": batch.size, "lengths": batch.lengths, "pad_side": batch.pad_side},
        }


def check_options(
    path: object,
    *,
    model: object,
    inputs: object,
    batch: object,
    integrations: object,
    kernels: str,
    integrity: str,
    label: object,
    overwrite: object,
) -> Options:
    """Check what `record` was given.

    Raises:
        InvalidOptionError: An argument is of a type or value that opdrift does not accept.
    """
    if batch is not None and not isinstance(batch, Batch):
        raise InvalidOptionError(
            f"batch={batch!r} is no opdrift.Batch. Write batch=opdrift.Batch(size)."
        )
    if not isinstance(label, str):
        raise InvalidOptionError(f"label={label!r} is no text.")
    if not isinstance(overwrite, bool):
        raise InvalidOptionError(f"overwrite={overwrite!r}: say True or False.")
    chosen = _integrations(integrations)
    return Options(
        path=_path(path),
        models=_models(model),
        inputs=_inputs(inputs),
        batch=batch,
        integrations=tuple(each for each in chosen if each != "auto"),
        automatic="auto" in chosen,
        kernels=_effort("kernels", kernels),
        integrity=_effort("integrity", integrity),
        label=label,
        overwrite=overwrite,
        synchronised=os.environ.get(SYNCHRONISED, "") not in ("", "0"),
    )


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidOptionError(f"path={path!r} is no path: give a str or a pathlib.Path.")
    return Path(path)


def _models(model: object) -> Mapping[str, Module]:
    if model is None:
        return {}
    if isinstance(model, Module):
        return {"": model}
    if isinstance(model, Mapping) and all(isinstance(m, Module) for m in model.values()):
        return {str(name): module for name, module in model.items()}
    raise InvalidOptionError(
        f"model={type(model).__name__} is no nn.Module and no mapping of names to nn.Modules."
    )


def _inputs(inputs: object) -> Mapping[str, torch.Tensor]:
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping) and all(isinstance(x, torch.Tensor) for x in inputs.values()):
        return {str(name): tensor for name, tensor in inputs.items()}
    raise InvalidOptionError(
        "inputs= is a mapping of names to tensors, such as {'input_ids': ids}."
    )


def _integrations(given: object) -> tuple[str | Integration, ...]:
    """What was asked for, "auto" among it."""
    if given == "auto":
        return ("auto",)
    known = installed_integrations()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidOptionError(_wrong_integrations(given, known))
    for each in given:
        if isinstance(each, type) or not isinstance(each, str | Integration):
            raise InvalidOptionError(_wrong_integrations(given, known))
    unknown = [
        each for each in given if isinstance(each, str) and each not in known and each != "auto"
    ]
    if unknown:
        raise InvalidOptionError(
            f"There is no integration {', '.join(map(repr, unknown))}; installed are {', '.join(sorted(known)) or 'none'}."
        )
    return tuple(given)


def _wrong_integrations(given: object, known: Iterable[str]) -> str:
    return (
        f"integrations={given!r}: give 'auto', or a sequence of names from {', '.join(sorted(known))},"
        " of 'auto', and of integrations that you made yourself."
    )


def _effort(name: str, value: str) -> Effort:
    if value not in _EFFORTS:
        raise InvalidOptionError(
            f"{name}={value!r}: choose one of {', '.join(map(repr, _EFFORTS))}."
        )
    return cast("Effort", value)


def check_text(function: str, argument: str, text: object) -> None:
    """Refuse what is no text, or empty, as an argument of a function of the recorder."""
    if not isinstance(text, str) or not text:
        raise InvalidOptionError(f"{function}({argument}={text!r}): give a text that is not empty.")


def check_tensor(function: str, tensor: object) -> None:
    """Refuse what is no tensor as an argument of a function of the recorder."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidOptionError(f"{function}() was given a {type(tensor).__name__}, no tensor.")


def check_storage(function: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without a storage of its own, such as a sparse one, whose parts have one each."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        raise InvalidOptionError(
            f"{function}() was given a tensor of layout {tensor.layout}, which has no storage of its own. Ask about the"
            " tensors that it is made of, such as indices() and values() of a sparse one."
        ) from None


def check_stretches(function: str, tensor: torch.Tensor, sizes: Sequence[int]) -> None:
    """Refuse stretches that reach beyond a tensor's end."""
    if sum(sizes) > tensor.numel():
        raise InvalidOptionError(
            f"{function}() was given stretches of {', '.join(map(str, sizes))} elements of a tensor that has"
            f" {tensor.numel()}."
        )


def finite(value: Any) -> Any:
    """Fields of a mark, numbers that JSON has no word for as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
