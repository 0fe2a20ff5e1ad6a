"""Read the text logs of torchtitan's numerics debugger: `rank_0_activations.log`.

Written by `dump_captures_to_file` in torchtitan's agent_tooling/numerics_debugging/activation_tracer.py: a
count, the ops that were left out, and one block an op, headed `[module/op_3_mm]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from opdrift.errors import DamagedTraceError
from opdrift.foreign.model import Hash, Log, LoggedOp, LoggedTensor
from opdrift.records import Phase

FIRST_LINE: Final = re.compile(r"Total captured activations: (\d+)")
#: Norms are printed with `%.6e`.
DIGITS: Final = 7
_KEY: Final = re.compile(r"\[(?:(?P<module>.*)/)?op_\d+_(?P<op>[^/\]]+)\]")
_FIELD: Final = re.compile(r"\s+([A-Z][\w ]*): (.*)")
_SHAPE: Final = re.compile(r"torch\.Size\(\[([\d, ]*)\]\), Dtype: torch\.(\w+)")
_STATISTICS: Final = ("L1 norm", "L2 norm", "Min", "Max", "Mean")
#: How the tracer names the module of an op that it cannot place.
_NOWHERE: Final = "<none>"
_RANK: Final = re.compile(r"rank_(\d+)_activations")


@dataclass(slots=True)
class _Block:
    line: int
    module: str
    op: str
    fields: dict[str, str] = field(default_factory=dict)


def parse(path: str, text: str) -> Log:
    """The log in a file's text.

    Raises:
        DamagedTraceError: A part of it is not as the tracer writes it, or ops are missing at its end.
    """
    lines = text.splitlines()
    promised = FIRST_LINE.fullmatch(lines[0]) if lines else None
    if promised is None:
        raise DamagedTraceError(
            f"{path} is no log of torchtitan's numerics debugger: its first line is not `Total captured activations: N`."
        )
    try:
        left_out, blocks = _blocks(lines)
        ops = tuple(_op(number, block) for number, block in enumerate(blocks, 1))
    except ValueError as error:
        raise DamagedTraceError(f"{path} is damaged ({error}). Capture the step again.") from None
    if len(ops) != int(promised[1]):
        raise DamagedTraceError(
            f"{path} promises {promised[1]} activations and holds {len(ops)}: it was cut off or edited."
            " Capture the step again."
        )
    rank = _RANK.search(Path(path).name)
    return Log(
        path,
        "torchtitan",
        ops,
        rank=int(rank[1]) if rank else None,
        digits=DIGITS,
        left_out=left_out,
    )


def _blocks(lines: list[str]) -> tuple[tuple[str, ...], list[_Block]]:
    left_out: tuple[str, ...] = ()
    blocks: list[_Block] = []
    for number, line in enumerate(lines[1:], 2):
        if line.startswith("["):
            key = _KEY.fullmatch(line)
            if key is None:
                raise ValueError(f"line {number} is {line!r}, not [module/op_N_name]")
            module = key["module"] or ""
            blocks.append(_Block(number, "" if module == _NOWHERE else module, key["op"]))
        elif blocks and (found := _FIELD.fullmatch(line)):
            blocks[-1].fields[found[1]] = found[2].strip()
        elif line.startswith("Excluded ops dispatched:"):
            names = line.partition(":")[2].strip()
            left_out = (
                () if names == "(none)" else tuple(n.strip() for n in names.split(",") if n.strip())
            )
        elif line.strip("= \t"):
            raise ValueError(f"line {number} is {line!r}")
    return left_out, blocks


def _op(number: int, block: _Block) -> LoggedOp:
    fields = block.fields
    phase: Phase = "backward" if fields.get("Phase") == "backward" else "forward"
    outputs = [LoggedTensor("", (h,)) for h in _hashes(block, "Output hash")]
    if (shape := fields.get("Shape")) is not None:
        found = _SHAPE.fullmatch(shape)
        if found is None:
            raise ValueError(f"the shape in the block of line {block.line} is {shape!r}")
        statistics: dict[str, float] = {
            name: _number(block, name) for name in _STATISTICS if name in fields
        }
        first = LoggedTensor(
            f"{found[2]}[{found[1]}]", outputs[0].hashes if outputs else None, statistics
        )
        outputs[:1] = [first]
    return LoggedOp(
        seq=number,
        name=block.op,  # neither namespace nor overload is in the log
        module=block.module,
        call=0,
        phase=phase,
        source=fields.get("Location"),
        arguments={},
        inputs=tuple(LoggedTensor("", (h,)) for h in _hashes(block, "Input hashes")),
        outputs=tuple(outputs),
    )


def _number(block: _Block, name: str) -> float:
    try:
        return float(block.fields[name])
    except ValueError:
        raise ValueError(
            f"{name} in the block of line {block.line} is {block.fields[name]!r}, not a number"
        ) from None


def _hashes(block: _Block, name: str) -> Iterator[Hash]:
    for part in block.fields.get(name, "").split(","):
        text = part.strip()
        if not text:
            continue
        try:
            yield Hash("norm", float(text)) if not text.isdecimal() else Hash("xor", int(text))
        except ValueError:
            yield Hash("other", text)
