"""Read what a run ran with: settings, variables, versions, seeds, device. Nothing here sets anything.

No getter initialises CUDA, warns, or runs an op, so a snapshot may be taken in the middle of a run.
Which settings matter, and what each read costs, was measured in torch 2.13 (notes: kernels, 7).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from opdrift.fingerprint.engine import load_engine

Reader = Callable[[], object]

#: Environment variables that steer numerics, kernels or threads. Most libraries read theirs once, at
#: load or at first use, so a change during the run is a fact and no cause.
VARIABLES: Final = tuple(
    """
    CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE NVIDIA_TF32_OVERRIDE CUDA_LAUNCH_BLOCKING
    CUDA_VISIBLE_DEVICES CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING TORCH_BLAS_PREFER_CUBLASLT
    TORCH_LINALG_PREFER_CUSOLVER TORCH_CUBLASLT_UNIFIED_WORKSPACE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    DISABLE_ADDMM_CUDA_LT TORCH_CUDNN_SDPA_DEPRIORITIZED TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED
    TORCH_CUDNN_V8_API_DISABLED CUDNN_LOGLEVEL_DBG TORCH_ROCM_FA_PREFER_CK
    TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL HIPBLASLT_ALLOW_TF32 MIOPEN_FIND_MODE MIOPEN_FIND_ENFORCE
    PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_TUNING NCCL_ALGO NCCL_PROTO NCCL_NVLS_ENABLE
    NCCL_COLLNET_ENABLE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_P2P_DISABLE NCCL_BUFFSIZE MKL_CBWR
    MKL_ENABLE_INSTRUCTIONS MKL_DEBUG_CPU_TYPE MKL_NUM_THREADS MKL_DYNAMIC MKL_THREADING_LAYER
    MKL_VERBOSE MKL_VERBOSE_OUTPUT_FILE ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ONEDNN_CPU_ISA_HINTS
    ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE ONEDNN_VERBOSE DNNL_VERBOSE
    ONEDNN_PRIMITIVE_CACHE_CAPACITY TORCH_MKLDNN_MATMUL_MIN_DIM TORCH_MKLDNN_MATMUL_MIN_SIZE
    TORCH_MKLDNN_ADDMM_MIN_DIM TORCH_MKLDNN_ADDMM_MIN_SIZE TORCH_MKLDNN_BMM_BADDBMM_THRESHOLD
    OMP_NUM_THREADS OMP_DYNAMIC OMP_PROC_BIND OMP_PLACES OMP_WAIT_POLICY OMP_SCHEDULE GOMP_CPU_AFFINITY
    KMP_AFFINITY KMP_BLOCKTIME KMP_DETERMINISTIC_REDUCTION KMP_FORCE_REDUCTION KMP_SETTINGS
    OPENBLAS_NUM_THREADS OPENBLAS_CORETYPE BLIS_NUM_THREADS VECLIB_MAXIMUM_THREADS ATEN_CPU_CAPABILITY
    TORCHINDUCTOR_DETERMINISTIC TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_FREEZING TORCH_COMPILE_DISABLE
    TORCHDYNAMO_DISABLE PYTHONHASHSEED PYTORCH_JIT LD_PRELOAD TRANSFORMERS_SDPA_FORCE_GQA
    TORCH_SHOW_CPP_STACKTRACES XLA_FLAGS
    """.split()  # noqa: SIM905 (a literal would take a line a name)
)

#: Flag -> getter of `torch._C`; one that this torch does not have is left out.
_PRIVATE_GETTERS: Final = {
    # floating-point precision by the old API: raises once the new one was used in a way it cannot say
    "float32_matmul_precision": "_get_float32_matmul_precision",
    "cuda.matmul.allow_tf32": "_get_cublas_allow_tf32",
    "cudnn.allow_tf32": "_get_cudnn_allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation": "_get_cublas_allow_fp16_accumulation",
    "cpu.allow_fp16_reduced_precision_reduction": "_get_cpu_allow_fp16_reduced_precision_reduction",
    "cuda.preferred_linalg_library": "_get_linalg_preferred_backend",
    "cuda.preferred_blas_library": "_get_blas_preferred_backend",
    "cuda.preferred_rocm_fa_library": "_get_rocm_fa_preferred_backend",
    "cuda.sm_carveout": "_get_sm_carveout_experimental",
    # determinism
    "deterministic_algorithms": "_get_deterministic_algorithms",
    "deterministic_algorithms_warn_only": "_get_deterministic_algorithms_warn_only",
    "fill_uninitialized_memory": "_get_deterministic_fill_uninitialized_memory",
    # cuDNN, MIOpen, oneDNN, NNPACK
    "cudnn.enabled": "_get_cudnn_enabled",
    "cudnn.benchmark": "_get_cudnn_benchmark",
    "cudnn.deterministic": "_get_cudnn_deterministic",
    "cudnn.depthwise_kernel": "_get_cudnn_depthwise_kernel",
    "cudnn.benchmark_limit": "_cuda_get_cudnn_benchmark_limit",
    "miopen.immediate": "_get_miopen_immediate",
    "mkldnn.enabled": "_get_mkldnn_enabled",
    "mkldnn.deterministic": "_get_mkldnn_deterministic",
    "nnpack.enabled": "_get_nnpack_enabled",
    # attention
    "sdp.flash": "_get_flash_sdp_enabled",
    "sdp.mem_efficient": "_get_mem_efficient_sdp_enabled",
    "sdp.math": "_get_math_sdp_enabled",
    "sdp.cudnn": "_get_cudnn_sdp_enabled",
    "sdp.overrideable": "_get_overrideable_sdp_enabled",
    "sdp.fa3": "_get_fa3_sdp_enabled",
    "sdp.math_reduced_precision": "_get_math_sdp_allow_fp16_bf16_reduction",
    "sdp.priority": "_get_sdp_priority_order",
    # modes
    "multithreaded_backward": "_is_multithreading_enabled",
    "torch_function_mode": "_is_torch_function_mode_enabled",
    "dispatch_modes": "_len_torch_dispatch_stack",
}

#: Backends and ops of torch's fp32_precision settings; "generic" knows only "all".
_PRECISIONS: Final = {
    "generic": ("all",),
    "cuda": ("all", "matmul", "conv", "rnn"),
    "mkldnn": ("all", "matmul", "conv", "rnn"),
}
#: Units of x86 CPUs by which torch and oneDNN choose a kernel, as `torch.cpu.get_capabilities` names them.
_UNITS: Final = (
    "avx2",
    "avx512_f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
)
_AUTOCAST_DEVICES: Final = ("cpu", "cuda", "mps", "xpu", "hpu")
_LIBRARIES: Final = ("fairscale", "esm", "transformers", "accelerate")
_CONFIG_LINES: Final = {
    "mkl": re.compile(r"Math Kernel Library Version (\S+)"),
    "onednn": re.compile(r"MKL-DNN v(\S+)"),
    "openmp": re.compile(r"OpenMP \d+ \(a\.k\.a\. OpenMP ([\d.]+)\)"),
}


class Flags:
    """Process and thread settings that steer numerics; the getters are looked up once.

    `snapshot` reads all of them (20 us), `changed` those that programs toggle often and that steer what is
    computed (7 us).
    """

    #: Read by `changed`: thread modes that many programs toggle, and the switches of attention.
    OFTEN: Final[tuple[str, ...]] = (
        "grad_mode",
        "inference_mode",
        "autocast.cpu",
        "autocast.cuda",
        "autocast.cpu.dtype",
        "autocast.cuda.dtype",
        "deterministic_algorithms",
        "sdp.flash",
        "sdp.mem_efficient",
        "sdp.math",
        "sdp.cudnn",
        "cudnn.enabled",
        "cudnn.benchmark",
        "mkldnn.enabled",
        "num_threads",
        "fp32_precision.cuda.matmul",
        "fp32_precision.mkldnn.matmul",
        "fp32_precision.mkldnn.conv",
        "autocast.cache",
        "cudnn.deterministic",
        "cudnn.allow_tf32",
        "default_dtype",
        "fill_uninitialized_memory",
        "flush_denormal",
        "mha.fastpath",
        "mkldnn.deterministic",
        "sdp.priority",
        "sdp.math_reduced_precision",
        "cuda.capability",
        "cuda.matmul.allow_fp16_reduced_precision_reduction",
        "cuda.matmul.allow_bf16_reduced_precision_reduction",
        "cpu.allow_fp16_reduced_precision_reduction",
        "fp32_precision.cuda.conv",
        "nnpack.enabled",
        "quantized.engine",
    )

    def __init__(self) -> None:
        self._readers = _flag_readers()
        self._often = {name: self._readers[name] for name in self.OFTEN if name in self._readers}
        self._often_readers = tuple(self._often.values())
        self._above = tuple([name.startswith("autocast.") for name in self._often])
        self._last = threading.local()
        self._snapshot: dict[str, Any] = {}

    def snapshot(self) -> dict[str, Any]:
        """Every setting as JSON types; `unreadable: RuntimeError` where its getter raised."""
        self._snapshot = {name: _read(reader) for name, reader in self._readers.items()}
        return dict(self._snapshot)

    def changed_since_snapshot(self) -> dict[str, tuple[Any, Any]]:
        """What changed, among all that `changed` does not look at, since the last snapshot: name -> (old, new)."""
        seldom = [name for name in self._snapshot if name not in self._often]
        both = [(name, self._snapshot[name], _read(self._readers[name])) for name in seldom]
        return {name: (old, new) for name, old, new in both if old != new}

    def changed(self, *, in_op: bool = False) -> dict[str, tuple[Any, Any]]:
        """What changed in this thread, among `OFTEN`, since its last call: name -> (old, new).

        Args:
            in_op: Asked from below an op, where autocast is always off.
        """
        try:
            new = tuple([read() for read in self._often_readers])
        except Exception:  # as in `_raw`; guarding each would double the cost of the usual case
            new = tuple([_raw(read) for read in self._often_readers])
        old: tuple[object, ...] | None = getattr(self._last, "values", None)
        if in_op and old is not None:
            new = tuple(
                [o if hidden else n for n, o, hidden in zip(new, old, self._above, strict=True)]
            )
        self._last.values = new
        if old is None or new == old:
            return {}
        both = zip(self._often, old, new, strict=True)
        return {name: (_json(a), _json(b)) for name, a, b in both if a != b}


def snapshot() -> dict[str, Any]:
    """Every setting that steers numerics, as JSON types. `Flags` is cheaper for more than one."""
    return Flags().snapshot()


def variables() -> dict[str, str]:
    """The environment variables of `VARIABLES` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def changed_variables(before: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """What the program set or deleted since `before` was read: name -> (old, new), None for unset."""
    now = variables()
    return {
        name: (before.get(name), now.get(name))
        for name in VARIABLES
        if before.get(name) != now.get(name)
    }


def versions() -> dict[str, str]:
    """Versions of Python, opdrift, torch and what torch was built with, and of imported libraries."""
    found = {
        "python": platform.python_version(),
        "opdrift": _distribution_version("opdrift"),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    built["cudnn"] = _read(torch.backends.cudnn.version) if torch.version.cuda else None
    found |= {name: str(version) for name, version in built.items() if version is not None}
    config = torch.__config__.show()
    found |= {
        name: match[1] for name, line in _CONFIG_LINES.items() if (match := line.search(config))
    }
    for name in _LIBRARIES:
        if (library := sys.modules.get(name)) is not None:
            found[name] = str(getattr(library, "__version__", "unknown"))
    return found


def seeds() -> dict[str, str]:
    """Per device, the seed that its default generator began with and a digest of its present state."""
    generator = torch.default_generator
    # The state is read as a tensor: without this guard an enclosing dispatch mode would see ops.
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        state = generator.get_state().numpy().tobytes()
    digest = hashlib.blake2b(state, digest_size=8).hexdigest()
    found = {"cpu": f"seed {generator.initial_seed()}, state {digest}"}
    if _cuda_initialised():
        for index, cuda in enumerate(torch.cuda.default_generators):
            # Seed and offset are the whole state of a Philox generator.
            found[f"cuda:{index}"] = f"seed {cuda.initial_seed()}, offset {cuda.get_offset()}"
    return found


def device() -> str:
    """Where the run computes: `cuda:NVIDIA H200` once the program has initialised CUDA, else `cpu`.

    Asking an uninitialised CUDA for its name would initialise it, and break a later fork.
    """
    if not _cuda_initialised():
        return "cpu"
    return f"cuda:{torch.cuda.get_device_name()}"


def report() -> dict[str, Any]:
    """What `opdrift env` prints: for a bug report, and to see which fingerprint engine is active."""
    return {
        "fingerprint_engine": load_engine().name,
        "device": device(),
        "platform": platform.platform(),
        "versions": versions(),
        "flags": snapshot(),
        "variables": variables(),
        "seeds": seeds(),
    }


def _cuda_initialised() -> bool:
    return bool(torch.cuda.is_initialized())


def _flag_readers() -> dict[str, Reader]:
    """Name -> getter of each flag that this torch has."""
    found: dict[str, Reader] = {}
    # One getter for the new precision API; it neither warns nor raises, whatever API the program used.
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is not None:
        for backend, ops in _PRECISIONS.items():
            for op in ops:
                found[f"fp32_precision.{backend}.{op}"] = _bound(precision, backend, op)
    for name, attribute in _PRIVATE_GETTERS.items():
        if (getter := getattr(torch._C, attribute, None)) is not None:
            found[name] = getter
    if "torch.nn.attention._registry" in sys.modules:
        found["sdp.flash_implementation"] = torch.nn.attention.current_flash_attention_impl
    found |= {
        "mha.fastpath": torch.backends.mha.get_fastpath_enabled,
        "quantized.engine": lambda: torch.backends.quantized.engine,
        "num_threads": torch.get_num_threads,
        "num_interop_threads": torch.get_num_interop_threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability,
        **_cpu_readers(),
        "cuda.capability": _capability_reader(),
        "flush_denormal": _flushes_denormals,
        "grad_mode": torch.is_grad_enabled,
        "inference_mode": torch.is_inference_mode_enabled,
        "anomaly_mode": torch.is_anomaly_enabled,
        "default_dtype": torch.get_default_dtype,
        "default_device": _default_device,
        "autocast.cache": torch.is_autocast_cache_enabled,
        "opt_einsum": lambda: (
            torch.backends.opt_einsum.enabled,
            torch.backends.opt_einsum.strategy,
        ),
    }
    for name in _AUTOCAST_DEVICES:
        if torch.amp.is_autocast_available(name):
            found[f"autocast.{name}"] = _bound(torch.is_autocast_enabled, name)
            found[f"autocast.{name}.dtype"] = _bound(torch.get_autocast_dtype, name)
    return found


def _bound(function: Callable[..., object], *arguments: str) -> Reader:
    return lambda: function(*arguments)


def _cpu_readers() -> dict[str, Reader]:
    """What this CPU can do, which is read once: its units, and the 16-bit types that torch hands to oneDNN on it."""
    found: dict[str, Reader] = {}
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in every torch
    if capabilities is not None:
        found["cpu.units"] = cache(lambda: _units(capabilities()))
    for name in ("bf16", "fp16"):
        supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        if supported is not None:
            found[f"cpu.onednn_{name}"] = cache(_unseen(supported))
    return found


def _units(capabilities: Mapping[str, Any]) -> str:
    """`avx2 avx512_f amx_tile`; empty on a CPU that has none of `_UNITS`."""
    return " ".join(unit for unit in _UNITS if capabilities.get(unit) is True)


def _unseen(op: Callable[[], object]) -> Reader:
    """Calls an op without tensors so that no mode of the program sees it."""

    def read() -> object:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return op()

    return read


def _capability_reader() -> Reader:
    """Reads the compute capability of the current GPU, as `9.0`, once the program has initialised CUDA."""
    known: list[str] = []

    def read() -> str | None:
        if not known and _cuda_initialised():
            known.append("{}.{}".format(*torch.cuda.get_device_capability()))
        return known[0] if known else None

    return read


def _flushes_denormals() -> bool:
    """Whether this thread treats denormals as zero. torch has no getter, but Python's floats obey too."""
    smallest = float("5e-324")
    return smallest == 0.0


def _default_device() -> str:
    """As `torch.get_default_device`, which runs an op for a device without an index."""
    modes = reversed(_get_current_function_mode_stack())
    return next((str(mode.device) for mode in modes if isinstance(mode, DeviceContext)), "cpu")


def _raw(reader: Reader) -> object:
    try:
        return reader()
    except Exception as error:  # any getter may refuse, and none may stop the user's program
        return f"unreadable: {type(error).__name__}"


def _read(reader: Reader) -> Any:
    return _json(_raw(reader))


def _json(value: object) -> Any:
    """`value` in JSON's types; what has none as torch writes it, without the "torch."."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    return str(value).removeprefix("torch.")


@cache
def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a source tree
