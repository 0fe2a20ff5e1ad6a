"""Reading checkpoint files of every kind, and the commands that ask about them."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

import opdrift
from opdrift import checkpoint_digests
from opdrift.commands import main
from opdrift.fingerprint.engine import load_engine

TENSORS = {
    "a.weight": torch.linspace(-2, 2, 12).view(3, 4),
    "a.half": torch.linspace(-2, 2, 6).bfloat16(),
    "steps": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}


def safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A file in the format of safetensors: the length of the header, the header, the contents."""
    words = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        span = [len(data), len(data) + len(content)]
        header[name] = {
            "dtype": words[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def index(folder: Path) -> Path:
    """Two files, and an index that lists them."""
    names = list(TENSORS)
    for number, part in enumerate((names[:2], names[2:])):
        safetensors(folder / f"model-{number}.safetensors", {name: TENSORS[name] for name in part})
    listed = {name: f"model-{int(i >= 2)}.safetensors" for i, name in enumerate(names)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": listed}))
    return path


def torch_file(folder: Path, *, zipped: bool = True) -> Path:
    """As training scripts save: a state dict beside settings and an optimizer."""
    saved = {
        "cfg": {"model": argparse.Namespace(layers=3)},
        "model": TENSORS,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "lr": 1e-3},
    }
    path = folder / "checkpoint.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda folder: safetensors(folder / "model.safetensors", TENSORS), None),
        (index, None),
        (lambda folder: index(folder).parent, None),
        (torch_file, "model"),
        (lambda folder: torch_file(folder, zipped=False), "model"),
    ],
    ids=["safetensors", "index", "folder", "torch", "torch before 1.6"],
)
def test_every_kind_of_file_gives_the_same_digests(tmp_path, capsys, make, part):
    status = checkpoint_digests.main(["--as", "float16", "--as", "int8", "--", str(make(tmp_path))])

    first, *rows, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (status, first, last) == (0, {"part": part}, {"tensors": 4})
    found = {row["name"]: row for row in rows}
    assert {name: (row["dtype"], row["shape"]) for name, row in found.items()} == {
        name: (str(tensor.dtype)[6:], list(tensor.shape)) for name, tensor in TENSORS.items()
    }
    assert {name: set(row["digests"]) for name, row in found.items()} == {
        "a.weight": {"float32", "float16"},
        "a.half": {"bfloat16", "float16"},
        "steps": {"int64"},
        "empty": {"float32", "float16"},
    }
    assert {name: row.get("sample") for name, row in found.items()} == {
        "a.weight": TENSORS["a.weight"].flatten().tolist(),
        "a.half": TENSORS["a.half"].tolist(),
        "steps": None,
        "empty": [],
    }
    wanted = load_engine().fingerprint(TENSORS["a.weight"].half())
    assert found["a.weight"]["digests"]["float16"] == [
        f"{int(wanted['raw']):016x}", int(wanted["n"]), int(wanted["code"])
    ]  # fmt: skip


def damaged(folder: Path, how: str) -> Path:
    path = folder / "model.safetensors"
    if how == "missing":
        return path
    safetensors(path, TENSORS)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    changed = {
        "cut off": content[:-7],
        "no header": b"abc",
        "header too long": struct.pack("<Q", 1 << 40) + content[8:],
        "no JSON": content[:8] + b"x" * length + content[8 + length :],
        "unknown type": content.replace(b'"BF16"', b'"Q4_0"'),
        "beyond the end": content.replace(b"[0, 48]", b"[0, 99]"),
    }
    path.write_bytes(changed[how])
    return path


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "does not exist"),
        ("cut off", "cut off"),
        ("no header", "no safetensors file"),
        ("header too long", "no safetensors file"),
        ("no JSON", "its header is no JSON"),
        ("unknown type", "'a.half' has an entry that is not known"),
        ("beyond the end", "'a.weight' does not lie where the header says"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, capsys, how, said):
    status = checkpoint_digests.main([str(damaged(tmp_path, how))])

    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1)
    assert said in error


@pytest.mark.parametrize(
    ("kept", "said"),
    [(0.6, "is cut off: the end of its archive is missing"), (0.0, "is empty")],
)
def test_a_file_of_torch_that_is_cut_off_is_one_sentence(tmp_path, capsys, kept, said):
    path = torch_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])

    assert checkpoint_digests.main([str(path)]) == 2
    assert capsys.readouterr().err == f"{path} {said}. Copy it again.\n"


def test_a_file_that_only_the_index_knows_is_named(tmp_path, capsys):
    path = index(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()

    assert checkpoint_digests.main([str(path)]) == 2
    assert capsys.readouterr().err == (
        f"{path} lists 'model-1.safetensors', which does not exist. Copy it as well.\n"
    )


def test_an_index_leads_to_no_file_elsewhere(tmp_path, capsys):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))

    assert checkpoint_digests.main([str(path)]) == 2
    assert "'../secret.safetensors', which is no file beside it" in capsys.readouterr().err


class RanError(Exception):
    """What must not happen."""


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return RanError, ("code of the file was run",)


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save({"model": {"a": torch.ones(2)}, "extra": Trap()}, tmp_path / "bad.pt")

    assert checkpoint_digests.main([str(tmp_path / "bad.pt")]) == 2
    assert "a Python object that only running code could read" in capsys.readouterr().err


def test_what_torch_cannot_load_is_one_sentence(tmp_path, capsys):
    (tmp_path / "junk.pt").write_bytes(b"hello")

    assert checkpoint_digests.main([str(tmp_path / "junk.pt")]) == 2
    assert "is no file of torch.save, or is damaged" in capsys.readouterr().err


# ---- the commands --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was loaded, in half precision; one that was not; and the file."""
    folder = tmp_path_factory.mktemp("story")
    torch.manual_seed(0)
    loaded = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    random = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    state = {
        f"module.{name}": tensor.detach().clone() for name, tensor in loaded.named_parameters()
    }
    safetensors(folder / "model.safetensors", state)
    for name, model in (("loaded", loaded.half()), ("random", random)):
        with opdrift.record(folder / name, model=model), torch.no_grad():
            model(torch.ones(1, 4, dtype=next(model.parameters()).dtype))
    return folder


def test_show_reads_the_file_in_a_process_of_its_own(story, capsys):
    status = main.opdrift(
        ["show", str(story / "loaded"), "--checkpoint", str(story / "model.safetensors")]
    )

    out = capsys.readouterr().out
    assert status == 0
    assert "4 of 4 tensors of" in out
    assert "4 of them cast to float16" in out
    assert "module. is left out of 4 names" in out


def test_diff_trace_says_it_of_both_runs(story, capsys):
    status = main.diff_trace(
        [str(story / "loaded"), str(story / "random"), "--format", "json",
         "--checkpoint", str(story / "model.safetensors")]
    )  # fmt: skip

    told = json.loads(capsys.readouterr().out)
    said = told["notes"] + [line for cause in told["causes"] for line in cause["evidence"]]
    assert status == 1
    assert any(line.startswith("left: 4 of 4 tensors of") for line in said)
    assert any(
        line.startswith("right: 4 of 4 tensors of") and "never reached" in line for line in said
    )


def test_a_file_that_cannot_be_read_ends_with_status_2(story, capsys):
    status = main.opdrift(
        ["show", str(story / "loaded"), "--checkpoint", str(story / "nothing.pt")]
    )

    assert status == 2
    assert "nothing.pt does not exist" in capsys.readouterr().err


def test_a_second_question_is_refused(story, capsys):
    """One report a command: which part an exit status is of must be plain."""
    status = main.opdrift(
        ["show", str(story / "loaded"), "--checkpoint", "model.safetensors", "--findings"]
    )

    assert status == 2
    assert "leave out --findings" in capsys.readouterr().err
