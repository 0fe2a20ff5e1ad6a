"""What integrations ask a recorder about contents, and how they name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from opdrift import plugins
from opdrift.digesting import Digest, Digesting
from opdrift.errors import InvalidOptionError
from opdrift.naming import Naming
from opdrift.neutral import Unseen, silent
from opdrift.options import check_storage, check_tensor, check_text

if TYPE_CHECKING:
    from opdrift.spool import Spool
    from opdrift.values import Values

_LEAF_KINDS: Final = ("parameter", "buffer", "input", "constant", "shard")


class ContentCalls:
    """The calls of a recorder that are about contents."""

    _digesting: Digesting
    _naming: Naming
    _spool: Spool
    _values: Values
    _failed: Callable[[str, BaseException], None]
    _guarded: Callable[[str, Callable[[], object]], None]

    def _must_be_open(self, what: str) -> None:
        raise NotImplementedError

    def name_tensor(
        self, tensor: torch.Tensor, name: str, *, kind: str = "parameter"
    ) -> Digest | None:
        """Give a tensor's present content a name in the trace; it is fingerprinted now, also if it is a view.

        Args:
            tensor: A strided tensor on any device; one whose memory is freed is named without content.
            name: The leaf's name.
            kind: "parameter", "buffer", "input", "constant", or "shard" for this rank's part of a parameter.

        Returns:
            The digest of what it holds, where that was read for this, because nothing was known of its memory, or is the
            last that was read, because an op has just made it; else None.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: An argument is of another type or value.
        """
        self._must_be_open("name_tensor")
        check_text("name_tensor", "name", name)
        _check_kind("name_tensor", kind)
        check_tensor("name_tensor", tensor)
        with silent():
            try:
                read = self._naming.tensor(self._spool.thread(), tensor, name, kind, "gather")
            except Exception as error:
                self._failed("name_tensor", error)
                return None
            return None if read is None else Digest(*read)

    def name_tensors(
        self,
        named: Iterable[tuple[torch.Tensor, str, plugins.Digest | None]],
        *,
        kind: str = "parameter",
    ) -> None:
        """As `name_tensor`, of many, each with the digest of its present content where that was read just now.

        Such a content is not read once more if an op that has just written it left a fingerprint of it.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: `kind` is none of those.
        """
        self._must_be_open("name_tensors")
        _check_kind("name_tensors", kind)
        with silent():
            tell = partial(self._naming.tensors, self._spool.thread(), named, kind, "gather")
            self._guarded("name_tensors", tell)

    def digest(self, tensor: torch.Tensor) -> Digest | None:
        """The digest of a tensor's present content; None if it cannot be read now (freed, meta, in flight).

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: It is no tensor.
        """
        self._must_be_open("digest")
        check_tensor("digest", tensor)
        with silent():
            return self._digesting.one(tensor)

    def digests(
        self, contents: Iterable[tuple[torch.Tensor, Sequence[int]]]
    ) -> Sequence[plugins.Digest | None]:
        """As `digest`, of stretches that follow each other in tensors, looking at each tensor once.

        Args:
            contents: Tensors, and of how many elements each stretch is, from the first element on in row-major order.

        Returns:
            The digests of all stretches in order; None for those of a tensor that cannot be read now.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: Something else than a tensor is among them, or its stretches are longer than it.
        """
        self._must_be_open("digests")
        with Unseen():
            return self._digesting.many(contents)

    def cast_digests(
        self, contents: Iterable[tuple[torch.Tensor, Sequence[int]]], dtype: torch.dtype
    ) -> tuple[Sequence[plugins.Digest], Sequence[plugins.Digest]] | None:
        """As `digests`, and what the contents are in another precision; None if they have to be cast to know that.

        Raises:
            RecorderStateError: The recorder is not open.
        """
        self._must_be_open("cast_digests")
        with Unseen():
            return self._digesting.many_cast(contents, dtype)

    def digests_left(
        self, contents: Iterable[tuple[torch.Tensor, Sequence[int]]]
    ) -> Sequence[plugins.Digest] | None:
        """As `digests`, of what the ops left that were the last to write these contents, without reading them again.

        What has changed a content since then without an op is not in it, and so shows once it is read.

        Returns:
            None if not all of them were fingerprinted in one piece after they were written.

        Raises:
            RecorderStateError: The recorder is not open.
        """
        self._must_be_open("digests_left")
        with Unseen():
            return self._digesting.left(contents)

    def versions(self, tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
        """Of each tensor's storage a number that no other storage has, and how often it is known to have been written.

        Raises:
            RecorderStateError: The recorder is not open.
        """
        self._must_be_open("versions")
        return self._values.versions(tensors)

    def writes(self, tensor: torch.Tensor) -> int:
        """How often a tensor's storage is known to have been written; 0 if nothing is known of it.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: It is no tensor, or has no storage of its own.
        """
        self._must_be_open("writes")
        check_tensor("writes", tensor)
        check_storage("writes", tensor)
        return self._values.writes(tensor)


def _check_kind(function: str, kind: str) -> None:
    if kind not in _LEAF_KINDS:
        raise InvalidOptionError(
            f"{function}(kind={kind!r}): choose one of {', '.join(map(repr, _LEAF_KINDS))}."
        )
