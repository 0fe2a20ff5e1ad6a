"""What integrations ask of contents: their digests, many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from opdrift.fingerprint.engine import CODES
from opdrift.fingerprint.tensors import stretches
from opdrift.options import check_stretches, check_tensor
from opdrift.tfp1 import Code

if TYPE_CHECKING:
    from opdrift.fingerprint.devices import Devices
    from opdrift.fingerprint.engine import Engine
    from opdrift.values import Values

_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})


#: Tensors, and of how many elements each stretch is that follows in them.
Contents = Iterable[tuple[Tensor, Sequence[int]]]


class Digest(NamedTuple):
    """A content as tfp1 sees it."""

    raw: int
    n: int
    code: int


class _Spans(NamedTuple):
    """Memory to be read: where, how many elements, of which kinds; and (place, tensor, sizes) of what takes more."""

    addresses: list[int]
    lengths: list[int]
    kinds: list[int]
    others: list[tuple[int, Tensor, Sequence[int]]]


class Digesting:
    """Digests for the integrations of one recorder. To be called with dispatch and torch functions switched off."""

    def __init__(self, engine: Engine, values: Values, devices: Devices) -> None:
        self._engine = engine
        self._values = values
        self._devices = devices

    def one(self, tensor: Tensor) -> Digest | None:
        """The digest of a tensor's present content; None if it cannot be read now."""
        if self._engine.can_fingerprint(tensor) is not None or self._values.is_pending(tensor):
            return None
        if not self._values.is_elsewhere(tensor):
            return Digest(*self._engine.digest(tensor))
        row = self._devices.now(tensor)
        return None if row is None else Digest(int(row["raw"]), int(row["n"]), int(row["code"]))

    def many(self, contents: Contents) -> list[Digest | None]:
        """The digests of stretches that follow each other in tensors, in order.

        What lies in the host's memory as it is to be read is read in one call; the rest, tensor by tensor.
        """
        spans = self._spans(contents)
        raws = self._engine.raws(spans.addresses, spans.lengths, spans.kinds)
        codes = map(CODES.__getitem__, spans.kinds)
        found: list[Digest | None] = list(map(Digest, raws, spans.lengths, codes))
        for place, tensor, sizes in spans.others:
            found[place:place] = self._singly(tensor, sizes)
        return found

    def many_cast(self, contents: Contents, dtype: torch.dtype) -> list[Digest] | None:
        """As `many`, of what contents are in another precision; None if they have to be cast to know."""
        if dtype is not torch.bfloat16 or not self._rounds_as_torch:
            return None
        spans = self._spans(contents)
        if spans.others or any(kind != Code.F32 for kind in spans.kinds):
            return None
        raws = self._engine.bfloat16_raws(spans.addresses, spans.lengths)
        if raws is None:
            return None
        return list(map(Digest, raws, spans.lengths, repeat(int(Code.BF16))))

    @cached_property
    def _rounds_as_torch(self) -> bool:
        """Whether torch rounds to bfloat16 here as the engine does: some processors can take subnormals for zero."""
        # signs, exponents of all sorts, and around each half of what bfloat16 resolves
        bits = torch.arange(-(2**31), 2**31, 2**31 // 300 * 2 + 1)[:, None] // 2**16 * 2**16
        bits = (bits + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000])).reshape(-1)
        numbers = bits.clamp(-(2**31), 2**31 - 1).to(torch.int32).view(torch.float32)
        numbers = numbers[~numbers.isnan()].contiguous()
        raws = self._engine.bfloat16_raws([numbers.data_ptr()], [numbers.numel()])
        cast = self.one(numbers.to(torch.bfloat16))
        return raws is not None and cast is not None and raws[0] == cast.raw

    def _spans(self, contents: Contents) -> _Spans:
        spans = _Spans([], [], [], [])
        place = 0
        for tensor, sizes in contents:
            address = self._address(tensor, sum(sizes))
            if address:
                width = tensor.element_size()
                for size in sizes:
                    spans.addresses.append(address)
                    address += size * width
                spans.lengths.extend(sizes)
                spans.kinds.extend(repeat(self._engine.kinds[tensor.dtype], len(sizes)))
            else:
                spans.others.append((place, tensor, sizes))
            place += len(sizes)
        return spans

    def _address(self, tensor: Tensor, count: int) -> int:
        """Where so many elements of a tensor can be read as they are; 0 if it takes more than that to read it.

        As `can_fingerprint`, which says why, in a fifth of the time.
        """
        if (
            type(tensor) not in _TYPES
            or tensor.dtype not in self._engine.kinds
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return 0
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # inside a functorch transform
            return 0
        if count > tensor.numel():
            return 0
        needed = (tensor.storage_offset() + count) * tensor.element_size()
        if storage.nbytes() < needed or self._values.is_filled_later(storage):
            return 0
        return tensor.data_ptr()  # 0: a functional tensor, autograd's zeros

    def _singly(self, tensor: Tensor, sizes: Sequence[int]) -> list[Digest | None]:
        check_tensor("digests", tensor)
        check_stretches("digests", tensor, sizes)
        if self._engine.can_fingerprint(tensor) is not None or self._values.is_pending(tensor):
            return [None] * len(sizes)
        if self._values.is_elsewhere(tensor):
            return [self.one(stretch) for stretch in stretches(tensor, sizes)]
        return [Digest(*each) for each in self._engine.digests(tensor, sizes)]
