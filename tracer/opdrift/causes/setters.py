"""What to type to give a flag a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

#: Flag of a header -> the statement that sets it; `{}` stands for the value as Python writes it.
_STATEMENTS: Final = {
    "autocast.cpu": 'with torch.autocast("cpu", enabled={}): ...',
    "autocast.cuda": 'with torch.autocast("cuda", enabled={}): ...',
    "cuda.matmul.allow_fp16_accumulation": "torch.backends.cuda.matmul.allow_fp16_accumulation = {}",
    "cuda.matmul.allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = {}",
    "cudnn.allow_tf32": "torch.backends.cudnn.allow_tf32 = {}",
    "cudnn.benchmark": "torch.backends.cudnn.benchmark = {}",
    "cudnn.deterministic": "torch.backends.cudnn.deterministic = {}",
    "cudnn.enabled": "torch.backends.cudnn.enabled = {}",
    "default_dtype": "torch.set_default_dtype(torch.{})",
    "deterministic_algorithms": "torch.use_deterministic_algorithms({})",
    "fill_uninitialized_memory": "torch.utils.deterministic.fill_uninitialized_memory = {}",
    "float32_matmul_precision": "torch.set_float32_matmul_precision({})",
    "flush_denormal": "torch.set_flush_denormal({})",
    "fp32_precision.cuda.all": "torch.backends.cudnn.fp32_precision = {}",
    "fp32_precision.cuda.conv": "torch.backends.cudnn.conv.fp32_precision = {}",
    "fp32_precision.cuda.matmul": "torch.backends.cuda.matmul.fp32_precision = {}",
    "fp32_precision.cuda.rnn": "torch.backends.cudnn.rnn.fp32_precision = {}",
    "fp32_precision.generic.all": "torch.backends.fp32_precision = {}",
    "fp32_precision.mkldnn.all": "torch.backends.mkldnn.fp32_precision = {}",
    "fp32_precision.mkldnn.conv": "torch.backends.mkldnn.conv.fp32_precision = {}",
    "fp32_precision.mkldnn.matmul": "torch.backends.mkldnn.matmul.fp32_precision = {}",
    "fp32_precision.mkldnn.rnn": "torch.backends.mkldnn.rnn.fp32_precision = {}",
    "mha.fastpath": "torch.backends.mha.set_fastpath_enabled({})",
    "mkldnn.deterministic": "torch.backends.mkldnn.deterministic = {}",
    "mkldnn.enabled": "torch.backends.mkldnn.enabled = {}",
    "nnpack.enabled": "torch.backends.nnpack.set_flags({})",
    "num_threads": "torch.set_num_threads({})",
    "quantized.engine": "torch.backends.quantized.engine = {}",
    "sdp.cudnn": "torch.backends.cuda.enable_cudnn_sdp({})",
    "sdp.flash": "torch.backends.cuda.enable_flash_sdp({})",
    "sdp.math": "torch.backends.cuda.enable_math_sdp({})",
    "sdp.math_reduced_precision": "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp({})",
    "sdp.mem_efficient": "torch.backends.cuda.enable_mem_efficient_sdp({})",
}


def statement(flag: str, value: Any) -> str | None:
    """The statement that gives a flag a value; None for a flag without one, and a value that was not read."""
    template = _STATEMENTS.get(flag)
    if template is None or not isinstance(value, bool | int | str) or "unreadable" in str(value):
        return None
    return template.format(value if flag == "default_dtype" else _literal(value))


def statements(flags: Sequence[tuple[str, Any]]) -> str:
    """The statements of several flags, in order: `a = 1; b = 2`; empty for none."""
    found = [text for name, value in flags if (text := statement(name, value)) is not None]
    return "; ".join(dict.fromkeys(found))


def _literal(value: bool | int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
