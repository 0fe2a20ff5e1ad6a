"""A small ESM-2 in the file format of the real ones, for machines that cannot fetch those."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import esm
import torch
from esm.model.esm2 import ESM2

NAME = "esm2_t3_small"
LAYERS, WIDTH, HEADS = 3, 64, 4


def write(folder: Path) -> None:
    """Write the two files of a checkpoint: the model, and the regression of its contact head.

    Every parameter is moved off its initial value (LayerNorm weights off 1, biases off 0), as
    training would, so that a weight that was not loaded shows. The same bytes each time, whatever
    the state of the random generators, which stay as they are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = ESM2(num_layers=LAYERS, embed_dim=WIDTH, attention_heads=HEADS, token_dropout=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    weights: dict[str, torch.Tensor] = {}
    regression: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("contact_head."):
            regression[name] = tensor
        elif name.startswith("lm_head."):
            weights[f"encoder.{name}"] = tensor
        else:
            weights[f"encoder.sentence_encoder.{name}"] = tensor
    options = Namespace(
        encoder_layers=LAYERS,
        encoder_embed_dim=WIDTH,
        encoder_attention_heads=HEADS,
        token_dropout=True,
    )
    torch.save({"cfg": {"model": options}, "model": weights}, folder / f"{NAME}.pt")
    torch.save({"model": regression}, folder / f"{NAME}-contact-regression.pt")


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read them back: (model_data, regression_data), as esm.pretrained's functions take them."""
    with torch.serialization.safe_globals([Namespace]):
        model_data = torch.load(folder / f"{NAME}.pt", weights_only=True)
    return model_data, torch.load(folder / f"{NAME}-contact-regression.pt", weights_only=True)


def download(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A real checkpoint from the hub instead, through esm's own function."""
    model_data, regression_data = esm.pretrained._download_model_and_regression_data(name)
    return model_data, regression_data
