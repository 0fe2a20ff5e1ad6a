"""What torch itself says of the backends that an attention on a GPU could have taken.

`torch.backends.cuda.can_use_*` is the chooser's own code, so its answer holds for this torch and this device, which
rules written down elsewhere may not. It is asked after the op: the first choice of a process may change the order
of backends, and that must be the program's. And only for yes or no: its words go to stderr, or become a warning at
the user's line (notes: kernels, 2.2 and 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.backends import cuda

from opdrift.memory import Use
from opdrift.neutral import silent
from opdrift.records import GRAD_ENABLED, MASK_GRAD, OPERAND_GRAD

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers

#: torch's name of a backend -> what to ask.
_ASKED: Final[Mapping[str, Callable[[Any, bool], bool]]] = {
    "FLASH_ATTENTION": cuda.can_use_flash_attention,
    "EFFICIENT_ATTENTION": cuda.can_use_efficient_attention,
    "CUDNN_ATTENTION": cuda.can_use_cudnn_attention,
}
_GRADIENTS: Final = GRAD_ENABLED | OPERAND_GRAD | MASK_GRAD
#: So many signatures are remembered.
_MOST: Final = 4096


class Answers:
    """Asks once for each signature, gradients and state of the switches, and writes a mark of kind `can-use`.

    Args:
        write_mark: Writes a mark: (thread buffers, kind, fields).
        failed: Notes a failure of the tracer itself.
        device: Type of the device whose calls are asked about.
    """

    def __init__(
        self,
        write_mark: Callable[[ThreadBuffers, str, Mapping[str, Any]], None],
        failed: Callable[[str, BaseException], None],
        *,
        device: str = "cuda",
    ) -> None:
        self._write_mark = write_mark
        self._failed = failed
        self._device = device
        #: signature and gradients -> the switches that torch was asked under
        self._known: dict[tuple[int, int], tuple[object, ...]] = {}

    def after(
        self,
        t: ThreadBuffers,
        seq: int,
        use: Use,
        *,
        signature: int,
        flags: int,
        switches: tuple[object, ...],
    ) -> None:
        """Ask about an attention that has just run.

        Args:
            t: Buffers of its thread.
            seq: Its number.
            use: The op and its arguments.
            signature: Number of its signature.
            flags: What requires grad, and whether autograd records.
            switches: State of the process that steers the choice.
        """
        key = signature, flags & _GRADIENTS
        if self._known.get(key) == switches:
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = switches
        try:
            with silent():
                answers = self._ask(use)
        except Exception as error:
            self._failed("can_use_*", error)
            return
        if answers:
            self._write_mark(t, "can-use", {"op": seq, "backends": answers})

    def _ask(self, use: Use) -> dict[str, bool]:
        """Backend -> whether it would take the call; empty where torch cannot be asked.

        That is a call elsewhere, and one over a nested or an empty tensor: without heads the chooser ends the process.
        """
        if "scaled_dot_product" not in use.plan.name:
            return {}  # ops below those have the dims of their operands in another order
        names = [argument.name for argument in use.plan.func._schema.arguments]
        given: dict[str, Any] = {**dict(zip(names, use.args, strict=False)), **use.kwargs}
        query, key, value = (given.get(name) for name in ("query", "key", "value"))
        mask = given.get("attn_mask", given.get("attn_bias"))
        if not (
            isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
        ):
            return {}
        tensors = [query, key, value, *([mask] if isinstance(mask, Tensor) else [])]
        if any(t.device.type != self._device or t.is_nested or 0 in t.shape for t in tensors):
            return {}
        grouped = given.get("enable_gqa")
        if grouped is None:  # a backend's op no longer has it; it would not have run without
            grouped = query.shape[-3:-2] != key.shape[-3:-2]
        dropout, causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
        params = cuda.SDPAParams(query, key, value, mask, dropout, causal, grouped)
        return {backend: bool(can_use(params, False)) for backend, can_use in _ASKED.items()}
