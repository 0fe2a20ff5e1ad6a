"""Each way in which accelerate offloads a model, as its users call it: nothing is found, and nothing differs from the plain run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    attach_align_device_hook,
)
from safetensors.torch import save_file
from torch import nn

import opdrift
from opdrift.findings import findings
from opdrift.tracefile.reader import Trace

CPU = torch.device("cpu")
TOKENS = torch.arange(10).view(2, 5)

Offload = Callable[[Path], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) * self.scale * self.mask


class Body(nn.Module):
    """Holds a parameter of its own beside its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gain


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(11, 8), Body()
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Narrow(nn.Module):
    """Weights of eight bits, which NumPy knows, and does not know."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8, dtype=torch.bfloat16)
        whole = torch.arange(-32, 32, dtype=torch.int8).view(8, 8)
        self.whole = nn.Parameter(whole, requires_grad=False)
        self.eighth = nn.Parameter(torch.randn(8).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("step", torch.tensor(0.01))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens).float() @ (self.whole * self.step) + self.eighth.float()


MIXED = {
    "embedding": "cpu",
    "body.blocks.0": "disk",
    "body.blocks.1": "cpu",
    "body.gain": "disk",
    "head": "disk",
}
KEPT = {**MIXED, "head": "cpu"}


def mixed(folder: Path, model: nn.Module, places: dict[str, str], **options: Any) -> nn.Module:
    return dispatch_model(
        model, device_map=places, main_device="cpu", offload_dir=folder, **options
    )


def by_hand(folder: Path) -> nn.Module:
    model = Net()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, execution_device=CPU, offload=True, weights_map=weights)
    return model


def whole_body(folder: Path) -> nn.Module:
    model = Net()
    hook = AlignDevicesHook(CPU, offload=True, place_submodules=True, io_same_device=True)
    add_hook_to_module(model.body, hook)
    return model


def in_sequence(folder: Path) -> nn.Module:
    model = Net()
    add_hook_to_module(model.head, AlignDevicesHook(CPU, offload=True))
    add_hook_to_module(model.head, ModelHook(), append=True)
    return model


def from_checkpoint(folder: Path, name: str) -> nn.Module:
    folder.mkdir()
    weights = Net().state_dict()
    if name.endswith(".safetensors"):
        save_file(weights, folder / name)
    else:
        torch.save(weights, folder / name)
    with init_empty_weights():
        model = Net()
    return load_checkpoint_and_dispatch(
        model,
        str(folder / name),
        device_map={"embedding": "cpu", "body": "disk", "head": "disk"},
        offload_folder=str(folder / "offloaded"),
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], Offload]] = {
    "memory, tied": (
        lambda: Net(tied=True),
        lambda _: cpu_offload(Net(tied=True), execution_device=CPU),
    ),
    "memory, with buffers": (
        Net,
        lambda _: cpu_offload(Net(), execution_device=CPU, offload_buffers=True),
    ),
    "disk, tied, with buffers": (
        lambda: Net(tied=True),
        lambda folder: disk_offload(
            Net(tied=True), folder, execution_device=CPU, offload_buffers=True
        ),
    ),
    "mixed": (Net, lambda folder: mixed(folder, Net(), MIXED)),
    "mixed, tied": (lambda: Net(tied=True), lambda folder: mixed(folder, Net(tied=True), KEPT)),
    "mixed, with buffers": (
        Net,
        lambda folder: mixed(folder, Net(), MIXED, offload_buffers=True),
    ),
    "hooks by hand": (Net, by_hand),
    "a module with all below it": (Net, whole_body),
    "hooks in sequence": (Net, in_sequence),
    "checkpoint of safetensors": (
        Net,
        lambda folder: from_checkpoint(folder, "model.safetensors"),
    ),
    "checkpoint of torch": (Net, lambda folder: from_checkpoint(folder, "model.bin")),
    "bfloat16 on disk": (
        lambda: Net().bfloat16(),
        lambda folder: disk_offload(Net().bfloat16(), folder, execution_device=CPU),
    ),
    "eight bits on disk": (
        Narrow,
        lambda folder: disk_offload(Narrow(), folder, execution_device=CPU, offload_buffers=True),
    ),
}


def run(path: Path, make: Callable[[], nn.Module]) -> tuple[Trace, list[torch.Tensor]]:
    """The trace of a model's making and two forwards, and what it returned."""
    with opdrift.record(path), torch.no_grad():
        model = make()
        outputs = [model(TOKENS), model(TOKENS)]
    return opdrift.load(path), outputs


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_offload_computes_the_same_and_has_no_findings(tmp_path, kind):
    """Recorded from before the model is offloaded; the outputs are those of an offloaded run that nobody recorded."""
    plain, offload = KINDS[kind]
    with torch.no_grad():
        unrecorded = offload(tmp_path / "unrecorded")(TOKENS)

    left, expected = run(tmp_path / "plain", plain)
    right, outputs = run(tmp_path / "offloaded", lambda: offload(tmp_path / "weights"))

    assert findings([right]) == ()
    assert opdrift.diff(left, right).verdict == "identical"
    for each in (*outputs, unrecorded):
        assert torch.equal(each, expected[0])
    moves = [mark.fields for mark in right.marks if mark.fields.get("library") == "accelerate"]
    names = {name for name, _ in (*plain().named_parameters(), *plain().named_buffers())}
    tied = {"head.weight"}
    assert {move["direction"] for move in moves} >= {"load", "drop"}
    for move in moves:
        ((name, offset, shape),) = move["parameters"]
        # a hook that is put on before the model's first call has no path yet
        assert name in names | tied or (move["phase"] != "forward" and move["unit"] is None)
        assert offset == 0
        size = torch.Size(shape).numel()
        assert move["bytes"] in {size, 2 * size, 4 * size}
        assert move["blocking"] is True
    assert right.footer is not None
    assert right.footer.failures == ()


@pytest.mark.parametrize("where", ["memory", "disk", "mixed"])
def test_a_model_that_writes_text_with_a_cache_is_followed_at_every_token(tmp_path, where):
    transformers = pytest.importorskip("transformers")

    def llama() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        return transformers.LlamaForCausalLM(config).eval()

    def offloaded() -> Any:
        if where == "memory":
            return cpu_offload(llama(), execution_device=CPU)
        if where == "disk":
            return disk_offload(llama(), tmp_path / "weights", execution_device=CPU)
        inner = ("embed_tokens", "layers.1", "norm", "rotary_emb")
        places = {**{f"model.{name}": "cpu" for name in inner}, "model.layers.0": "disk"}
        return mixed(tmp_path / "weights", llama(), {**places, "lm_head": "disk"})

    def written(name: str, model: Any) -> tuple[Trace, torch.Tensor]:
        prompt = torch.tensor([[1, 5, 7]])
        with opdrift.record(tmp_path / name, model=model):
            tokens = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return opdrift.load(tmp_path / name), tokens

    left, expected = written("plain", llama())
    right, tokens = written("offloaded", offloaded())

    assert torch.equal(tokens, expected)
    assert findings([right]) == ()
    assert opdrift.diff(left, right).verdict == "identical"
    loads = [
        mark.fields["nth"]
        for mark in right.marks
        if mark.fields.get("direction") == "load"
        and mark.fields["parameters"][0][0] == "model.layers.0.mlp.up_proj.weight"
    ]
    assert loads == [1, 2, 3]
