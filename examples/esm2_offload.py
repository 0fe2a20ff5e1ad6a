"""ESM-2 under fairscale FSDP with CPU offload: other embeddings at every start (facebookresearch/esm#297).

The report blamed offloading. Two recorded runs and `diff-trace` say what it was: the flow of esm's own
example drops the state dict, so every start draws other random weights. With the fix (esm#298) two
runs are identical, and comparing with plain fp32 shows a second defect that nobody had reported: mixed
precision casts the rotary embeddings' `inv_freq` to half precision for good.

    python examples/esm2_offload.py                                # the whole story
    python examples/esm2_offload.py --world-size 2                 # the same on two ranks
    python examples/esm2_offload.py --flow broken -o mine.trace    # one run of your own

On a machine with a GPU this is the real `esm2_t33_650M_UR50D` from the hub. Without one, it is a
small ESM-2 of the same class and file format, and fairscale is told to do without CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import _small_esm2
import _story
import esm
import torch
import torch.distributed as dist
from _fairscale_on_cpu import fairscale_on_cpu
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: N817
from fairscale.nn.wrap import enable_wrap, wrap

import opdrift

HUB_MODEL = "esm2_t33_650M_UR50D"
ON_GPU = torch.cuda.is_available()

#: As in esm's examples/esm2_infer_fairscale_fsdp_cpu_offloading.py.
PROTEINS = [
    ("protein1", "MKTVRQERLKSIVRILERSKEPVSGAQLAEELSVSRQVIVQDIAYLRSLGYNIVATPRGYVLAGG"),
    ("protein2", "KALTARQQEVFDLIRDHISQTGMPPTRAEIAQRLGFRSPNAAEEHLKALARKGVIEIVSGASRGIRLLQEE"),
    ("protein3", "KALTARQQEVFDLIRD<mask>ISQTGMPPTRAEIAQRLGFRSPNAAEEHLKALARKGVIEIVSGASRGIRLLQEE"),
    ("protein4", "K A <mask> I S Q"),
]


# ---- the three flows -------------------------------------------------------------------------------


def broken(model_data: Any, regression_data: Any) -> tuple[Any, Any]:
    """The example before esm#298: the third value, the weights, is dropped."""
    with enable_wrap(wrapper_cls=FSDP, **fsdp_options()):
        model_data["model"].update(regression_data["model"])
        model, alphabet, _ = esm.pretrained._load_model_and_alphabet_core_v2(model_data)
        return shard(model), alphabet


def fixed(model_data: Any, regression_data: Any) -> tuple[Any, Any]:
    """The example after esm#298."""
    with enable_wrap(wrapper_cls=FSDP, **fsdp_options()):
        model, alphabet = esm.pretrained.load_model_and_alphabet_core(
            "esm2", model_data, regression_data
        )
        return shard(model), alphabet


def plain(model_data: Any, regression_data: Any) -> tuple[Any, Any]:
    """No FSDP, no offload, full precision."""
    model, alphabet = esm.pretrained.load_model_and_alphabet_core(
        "esm2", model_data, regression_data
    )
    return model.eval().to("cuda" if ON_GPU else "cpu"), alphabet


FLOWS = {"broken": broken, "fixed": fixed, "plain": plain}


def fsdp_options() -> dict[str, Any]:
    """What the example passes to FSDP; without a GPU also where to compute."""
    options: dict[str, Any] = {
        "mixed_precision": True,
        "flatten_parameters": True,
        "state_dict_device": torch.device("cpu"),
        "cpu_offload": True,
    }
    if not ON_GPU:
        options["compute_device"] = torch.device("cpu")
    return options


def shard(model: Any) -> Any:
    """Wrap each layer in FSDP separately, then the whole."""
    model.eval()
    for name, layer in model.layers.named_children():
        setattr(model.layers, name, wrap(layer))
    return wrap(model)


# ---- one run ----------------------------------------------------------------------------------------


def run(
    flow: str, trace: Path, checkpoint: Path | None, rank: int, ranks: int, store: Path
) -> None:
    """Build the model, embed four proteins, and record both."""
    quieten()
    if checkpoint is None:
        model_data, regression_data = _small_esm2.download(HUB_MODEL)
    else:
        model_data, regression_data = _small_esm2.read(checkpoint)
    if ON_GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    with contextlib.nullcontext() if ON_GPU else fairscale_on_cpu():  # nothing of it on a GPU
        # Around the building too: only so the trace knows where the weights came from.
        with opdrift.record(trace, label=f"ESM-2 {flow}"):
            model, alphabet = FLOWS[flow](model_data, regression_data)
            _, _, tokens = alphabet.get_batch_converter()(PROTEINS)
            last = model_data["cfg"]["model"].encoder_layers
            with torch.no_grad():
                results = model(
                    tokens.to("cuda" if ON_GPU else "cpu"), repr_layers=[last], return_contacts=True
                )
        embedding = results["representations"][last][0].float().mean(0)
    if rank == 0:
        numbers = " ".join(f"{value:+.4f}" for value in embedding[:5])
        print(f"{trace.name:16} embedding of {PROTEINS[0][0]}: {numbers} ...")
    dist.destroy_process_group()


def start(flow: str, trace: Path, checkpoint: Path | None, ranks: int) -> None:
    """Run a flow in fresh processes, one a rank."""
    with tempfile.TemporaryDirectory(prefix="opdrift-store-") as folder:
        arguments: list[str | Path] = ["--flow", flow, "-o", trace, "--store", f"{folder}/store"]
        if checkpoint is not None:
            arguments += ["--checkpoint", checkpoint]
        _story.together(
            [
                (__file__, [*arguments, "--world-size", str(ranks), "--rank", str(rank)])
                for rank in range(ranks)
            ]
        )


def quieten() -> None:
    """Silence what fairscale 0.4.13 sets off: it is older than these warnings of torch."""
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    warnings.filterwarnings("ignore", message=".*_all_gather_base", category=FutureWarning)


# ---- the story ---------------------------------------------------------------------------------------


def story(ranks: int, small: bool, keep: Path | None) -> None:
    """Broken twice, fixed twice, plain once; each compared with the next."""
    with _story.workspace(keep) as folder:
        checkpoint = folder / "checkpoint" if small else None
        if checkpoint is not None:
            checkpoint.mkdir(exist_ok=True)
            _small_esm2.write(checkpoint)

        def record(flow: str, name: str, world_size: int = ranks) -> None:
            start(flow, folder / name, checkpoint, world_size)

        _story.heading("The example before esm#298, started twice")
        record("broken", "broken-1.trace")
        record("broken", "broken-2.trace")
        _story.diff_trace(folder, "broken-1.trace", "broken-2.trace")

        _story.heading("After esm#298, started twice")
        record("fixed", "fixed-1.trace")
        record("fixed", "fixed-2.trace")
        _story.diff_trace(folder, "fixed-1.trace", "fixed-2.trace")

        _story.heading("After esm#298, compared with plain full precision")
        record("plain", "plain.trace", 1)
        right = "fixed-1.trace" if ranks == 1 else "fixed-1.trace/rank-00000"
        _story.diff_trace(folder, "plain.trace", right)


def main() -> None:
    """Read the options, and run one flow or the whole story."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flow", choices=FLOWS, help="run only this one; needs -o")
    parser.add_argument("-o", "--output", type=Path, metavar="TRACE", help="where to record it")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks (default 1)")
    parser.add_argument(
        "--small", action="store_true", default=not ON_GPU, help="the small ESM-2 on a GPU too"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the story's traces here")
    # What one rank's process is told.
    for option in ("--checkpoint", "--store"):
        parser.add_argument(option, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.flow is None:
        story(options.world_size, options.small, options.keep)
        return
    if options.output is None:
        parser.error("--flow needs -o TRACE")
    if options.rank is not None:
        run(
            options.flow,
            options.output,
            options.checkpoint,
            options.rank,
            options.world_size,
            options.store,
        )
        return
    with tempfile.TemporaryDirectory(prefix="opdrift-checkpoint-") as folder:
        checkpoint = Path(folder) if options.small else None
        if checkpoint is not None:
            _small_esm2.write(checkpoint)
        start(options.flow, options.output.resolve(), checkpoint, options.world_size)


if __name__ == "__main__":
    main()
