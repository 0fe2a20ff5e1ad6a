"""State and seed of a random generator, looked at before an op that may draw from it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from opdrift.neutral import silent

_MASK: Final = (1 << 63) - 1
_ODD: Final = 0x9E3779B97F4A7C15


def digest_before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A number that is equal for equal states of the generator that the op would use; never 0.

    A CPU generator's whole state (5,056 bytes) goes through CRC-32: 2.5 us. A CUDA generator's state is
    exactly (seed, offset), without a synchronisation.
    """
    return generator_digest(_generator_of(args, kwargs))


class Seeds:
    """Notices that the program seeded a default generator; asked at each op that may draw."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {"cpu": torch.default_generator.initial_seed()}

    def changed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Device and seed, if the default generator that the op uses has another seed than when last asked.

        A seed that is set to what it was is not noticed: the state that it brings back is in the digest.
        """
        generator = _generator_of(args, kwargs)
        if generator is not _default_for(args, kwargs):
            return None  # one of the program's own
        device, seed = str(generator.device), generator.initial_seed()
        if self._seen.setdefault(device, seed) == seed:
            return None
        self._seen[device] = seed
        return {"device": device, "seed": seed}


def _generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    found = next((a for a in args if isinstance(a, torch.Generator)), None)
    return _default_for(args, kwargs) if found is None else found


def generator_digest(generator: torch.Generator) -> int:
    """Digest of a generator's present state."""
    if generator.device.type == "cuda":
        return ((generator.initial_seed() * _ODD) ^ (generator.get_offset() + 1)) & _MASK or 1
    with silent():  # `.numpy()` is four ops
        return zlib.crc32(generator.get_state().numpy().data) + 1


def _default_for(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    given: Any = kwargs.get("device")
    if given is None:
        given = next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
    device = torch.device(given)
    if device.type == "cuda" and torch.cuda.is_initialized():
        index: int | None = device.index
        return torch.cuda.default_generators[
            torch.cuda.current_device() if index is None else index
        ]
    return torch.default_generator
