"""What integrations ask of contents: their digests, many at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from opdrift import plugins
from opdrift.composition import Digests
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

    @property
    def kind(self) -> int | None:
        """The kind of all; None if they are of several, or if something takes more, or if there is nothing."""
        first = self.kinds[0] if self.kinds else None
        alike = first is not None and self.kinds.count(first) == len(self.kinds)
        return first if alike and not self.others else None


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

    def many(self, contents: Contents) -> Sequence[plugins.Digest | None]:
        """The digests of stretches that follow each other in tensors, in order.

        What lies in the host's memory as it is to be read is read in one call; the rest, tensor by tensor.
        """
        spans = self._spans(contents)
        raws, kind = self._engine.raws(spans.addresses, spans.lengths, spans.kinds), spans.kind
        if kind is not None:
            return Digests(raws, tuple(spans.lengths), CODES[kind])
        codes = map(CODES.__getitem__, spans.kinds)
        found: list[Digest | None] = list(map(Digest, raws, spans.lengths, codes))
        for place, tensor, sizes in spans.others:
            found[place:place] = self._singly(tensor, sizes)
        return found

    def many_cast(self, contents: Contents, dtype: torch.dtype) -> tuple[Digests, Digests] | None:
        """As `many`, and what the contents are in another precision; None if they have to be cast to know."""
        if dtype is not torch.bfloat16 or not self._rounds_as_torch:
            return None
        spans = self._spans(contents)
        if spans.kind != Code.F32:
            return None
        raws = self._engine.bfloat16_raws(spans.addresses, spans.lengths)
        if raws is None:
            return None
        lengths = tuple(spans.lengths)
        return Digests(raws[0], lengths, int(Code.F32)), Digests(raws[1], lengths, int(Code.BF16))

    def left(self, contents: Contents) -> Digests | None:
        """As `many`, what the fingerprint after the last write of each says that was left; None if not of all it does."""
        raws, lengths, codes = array("Q"), [], set()
        for tensor, sizes in contents:
            left = self._values.left(tensor) if len(sizes) == 1 else None
            if left is None or left[1] != sizes[0]:
                return None
            raws.append(left[0])
            lengths.append(left[1])
            codes.add(left[2])
        return Digests(raws, tuple(lengths), codes.pop()) if len(codes) == 1 else None

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
        return raws is not None and cast is not None and raws[1][0] == cast.raw

    def _spans(self, contents: Contents) -> _Spans:
        spans = _Spans([], [], [], [])
        addresses, lengths, kinds, known = *spans[:3], self._engine.kinds
        place = 0
        for tensor, sizes in contents:
            kind = known.get(tensor.dtype) if type(tensor) in _TYPES else None
            address = 0 if kind is None else self._address(tensor, sizes)
            if kind is None or not address:
                spans.others.append((place, tensor, sizes))
            elif len(sizes) == 1:
                addresses.append(address)
                kinds.append(kind)
                lengths += sizes
            else:
                width = tensor.element_size()
                for size in sizes:
                    addresses.append(address)
                    kinds.append(kind)
                    address += size * width
                lengths += sizes
            place += len(sizes)
        return spans

    def _address(self, tensor: Tensor, sizes: Sequence[int]) -> int:
        """Where stretches of a tensor can be read as they are; 0 if it takes more than that to read them.

        As `can_fingerprint`, which says why, in a fifth of the time.
        """
        if (
            not tensor.is_cpu
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
        count = sum(sizes)
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
