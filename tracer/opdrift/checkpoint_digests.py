"""Digest the tensors of a checkpoint file: a process of its own, since it needs torch and may read a bad file.

Usage: python -m opdrift.checkpoint_digests [--as DTYPE]... FILE

Prints one JSON object a line: {"part": name or null} once, then for each tensor {"name", "dtype", "shape",
"digests": {dtype: [raw as hex digits, n, code]}}, with the tensor's own dtype and, of floats, what it is when it is
cast to each DTYPE, and "sample": a few components, at the places where a fingerprint samples its own; then {"tensors": how many}. Nothing in the file is run: safetensors hold no code, and torch's own
files are read with `weights_only`. What cannot be read ends the process with status 2 and a sentence on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from opdrift.fingerprint.engine import load_engine
from opdrift.tfp1 import sample_positions

#: The dtypes of the safetensors format (its README, "Format").
_SAFETENSORS: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}  # fmt: skip
#: The longest header that the safetensors library accepts.
_LONGEST_HEADER: Final = 100_000_000
_INDEX: Final = ".index.json"
#: What a folder is looked through for, as transformers and accelerate name their files.
_IN_FOLDER: Final = (
    f"model.safetensors{_INDEX}",
    "model.safetensors",
    f"pytorch_model.bin{_INDEX}",
    "pytorch_model.bin",
)

#: How a file of torch.save begins, since torch 1.6; the list of its parts stands at its end.
_ZIP: Final = b"PK\x03\x04"
#: How torch names what it refuses to unpickle.
_REFUSED: Final = re.compile(r"GLOBAL (\S+) was not an allowed global")

Named = Iterator[tuple[str, torch.Tensor]]


class UnreadableError(Exception):
    """The file cannot be read; the message is for the user."""


class _Contents(NamedTuple):
    """The tensors of a checkpoint, and under which key of the file they lie."""

    part: str | None
    tensors: Named


def read(path: Path) -> _Contents:
    """The named tensors of a file, of a folder with one, or of the files that an index lists.

    Raises:
        UnreadableError: It is no checkpoint, is damaged, or holds what only running code could read.
    """
    if path.is_dir():
        found = next((path / name for name in _IN_FOLDER if (path / name).is_file()), None)
        if found is None:
            raise UnreadableError(
                f"{path} is a folder without {', '.join(_IN_FOLDER)}. Give the file."
            )
        path = found
    if not path.is_file():
        raise UnreadableError(f"{path} does not exist.")
    if path.name.endswith(_INDEX):
        return _Contents(None, _of_index(path))
    if path.suffix == ".safetensors":
        return _Contents(None, _of_safetensors(path))
    return _of_torch(path)


def _of_index(path: Path) -> Named:
    try:
        files = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UnreadableError(
            f"{path} lists no files under weight_map: it is no index of a checkpoint."
        ) from None
    for name in files:
        if Path(name).name != name:
            raise UnreadableError(f"{path} lists {name!r}, which is no file beside it.")
        if not (path.parent / name).is_file():
            raise UnreadableError(f"{path} lists {name!r}, which does not exist. Copy it as well.")
        yield from read(path.parent / name).tensors


def _of_safetensors(path: Path) -> Named:
    """Eight bytes that say how long the header is, the header as JSON, and the contents."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise UnreadableError(f"{path} is no safetensors file, or is cut off. Copy it again.")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise UnreadableError(
                f"{path} is no safetensors file: its header is no JSON."
            ) from None
        # private: torch asks for memory that could be written
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            for name, entry in header.items():
                if name != "__metadata__":
                    yield name, _stored(path, memory, 8 + length, name, entry)


def _stored(path: Path, memory: mmap.mmap, start: int, name: str, entry: Any) -> torch.Tensor:
    try:
        dtype, shape = _SAFETENSORS[entry["dtype"]], [int(n) for n in entry["shape"]]
        first, end = (start + int(at) for at in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise UnreadableError(
            f"{path}: {name!r} has an entry that is not known: {entry}."
        ) from None
    count = math.prod(shape)
    if not start <= first <= end <= len(memory) or count * dtype.itemsize != end - first:
        raise UnreadableError(
            f"{path}: {name!r} does not lie where the header says. The file is cut off: copy it again."
        )
    if not count:
        return torch.empty(shape, dtype=dtype)
    # a copy: the map cannot be closed while a tensor looks into it
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=end - first, offset=first).clone()
    return flat.view(dtype).reshape(shape)


def _of_torch(path: Path) -> _Contents:
    with path.open("rb") as file:
        start = file.read(len(_ZIP))
    if not start:
        raise UnreadableError(f"{path} is empty. Copy it again.")
    if start == _ZIP and not zipfile.is_zipfile(path):
        raise UnreadableError(
            f"{path} is cut off: the end of its archive is missing. Copy it again."
        )
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # fairseq's and ESM's settings
            loaded = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except (
        Exception
    ) as error:  # whatever the bytes make of torch.load, it is the file that is to blame
        held = _REFUSED.search(str(error))
        if held is not None:
            raise UnreadableError(
                f"{path} holds {held[1]}, a Python object that only running code could read. Save the state dict"
                " alone, or as safetensors."
            ) from None
        said = str(error).splitlines()[0][:200] if str(error) else ""
        raise UnreadableError(
            f"{path} is no file of torch.save, or is damaged ({type(error).__name__}: {said}). Give a file of"
            " safetensors or torch.save."
        ) from None
    part, tensors = max(_parts(loaded, ()), key=lambda found: len(found[1]), default=((), {}))
    if not tensors:
        raise UnreadableError(f"{path} holds no named tensors. Give the file of a state dict.")
    return _Contents(".".join(part) or None, iter(tensors.items()))


def _parts(
    tree: object, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, torch.Tensor]]]:
    """Each mapping of names to tensors, wherever it lies: files keep state dicts beside other things."""
    if isinstance(tree, torch.nn.Module) or not isinstance(tree, Mapping):
        return
    found = {
        name: each
        for name, each in tree.items()
        if isinstance(name, str) and isinstance(each, torch.Tensor)
    }
    if found:
        yield path, found
    for name, each in tree.items():
        if isinstance(name, str):
            yield from _parts(each, (*path, name))


def digests(tensor: torch.Tensor, casts: Sequence[torch.dtype]) -> dict[str, list[Any]]:
    """Dtype -> (digest, components, kind of component): as it is, and cast."""
    engine = load_engine()
    wanted = [tensor.dtype]
    if tensor.is_floating_point():
        wanted += [dtype for dtype in casts if dtype != tensor.dtype]
    found = {}
    for dtype in wanted:
        content = tensor.detach() if dtype == tensor.dtype else tensor.detach().to(dtype)
        if engine.can_fingerprint(content) is None:
            raw, n, code = engine.digest(content)
            found[str(dtype).removeprefix("torch.")] = [f"{raw:016x}", n, code]
    return found


def sample(tensor: torch.Tensor) -> list[float]:
    """The components at the places where a fingerprint samples them."""
    places = torch.tensor(sample_positions(tensor.numel()), dtype=torch.int64)
    found: list[float] = tensor.detach().reshape(-1)[places].double().tolist()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the digests of one file."""
    parser = argparse.ArgumentParser(prog="opdrift.checkpoint_digests")
    parser.add_argument("--as", dest="casts", action="append", default=[])
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    dtypes = [getattr(torch, name, None) for name in options.casts]
    casts = [d for d in dtypes if isinstance(d, torch.dtype) and d.is_floating_point]
    say = sys.stdout.write
    number = 0
    try:
        contents = read(options.file)
        say(json.dumps({"part": contents.part}) + "\n")
        for name, tensor in contents.tensors:
            entry = {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "digests": digests(tensor, casts),
            }
            if tensor.is_floating_point():
                entry["sample"] = sample(tensor)
            say(json.dumps(entry) + "\n")
            number += 1
    except UnreadableError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    say(json.dumps({"tensors": number}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
