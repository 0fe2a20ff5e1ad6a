"""Show what a trace holds: an overview, ops, one op, leaves, findings.

Without options, an overview. GLOB is a pattern such as 'layers.*.self_attn'; a module's pattern takes
in what is below it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opdrift.commands.console import emit_all
from opdrift.commands.exit_codes import ExitCode
from opdrift.commands.options import natural
from opdrift.commands.progress import Elapsed
from opdrift.errors import InvalidOptionError
from opdrift.wording import some

if TYPE_CHECKING:
    from opdrift.records import Finding, Leaf
    from opdrift.tracefile.reader import Trace

EPILOG: Final = """\
exit status: 0; 1 if --findings found something, or --checkpoint that the model is not that of the file;
2 if the trace or the checkpoint cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `opdrift show`."""
    add = parser.add_argument
    add(
        "trace",
        metavar="TRACE",
        type=Path,
        help="a folder that record() wrote; of a distributed run, rank 0's unless a rank's own folder is given;"
        " --leaf, --findings and --checkpoint ask all ranks",
    )
    add("--op", metavar="N", type=natural, help="everything about op N")
    add(
        "--scope",
        metavar="GLOB",
        help="the ops of these modules; '(root)' is the root module's own",
    )
    add("--leaf", metavar="GLOB", help="these parameters, buffers, inputs and outputs over time")
    add("--kernels", action="store_true", help="which implementation ran, and why")
    add("--findings", action="store_true", help="only what the run alone shows to be wrong")
    add(
        "--checkpoint",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="which tensors of this file never reached the model, and which of the model's it lacks; may be repeated",
    )
    add("--format", choices=("text", "json"), default="text", help="text is the default")


def run(options: argparse.Namespace) -> int:
    """Print what is asked for."""
    with Elapsed(f"reading {options.trace.name}"):
        pieces, status = _asked(options)
    # on a terminal the report itself shows that it goes on
    with Elapsed("writing the report", quiet=sys.stdout.isatty()):
        emit_all(pieces)
    return status


def _asked(options: argparse.Namespace) -> tuple[Iterable[str], int]:
    """The report, and the exit status."""
    from opdrift.tracefile.opening import load

    trace = load(options.trace)
    if options.checkpoint:
        return _checkpoint(trace, options)
    ops = _ops(trace, options)
    others = _others(options.trace, trace) if options.leaf is not None else ()
    leaves = _leaves(trace, options.leaf, others)
    if options.format == "json":
        return _json(trace, ops, leaves, options)
    return _text(trace, ops, leaves, options)


def _ops(trace: Trace, options: argparse.Namespace) -> Sequence[int]:
    """Indices of the ops that are asked for; all of them if none is."""
    if options.op is not None:
        index = trace.index_of(options.op)
        if index is None:
            held = (
                f"{int(trace.ops.seq[0])} to {int(trace.ops.seq[-1])}" if len(trace.ops) else "none"
            )
            raise InvalidOptionError(f"{trace.path} has no op {options.op}; it holds {held}.")
        return [index]
    if options.scope is None:
        return range(len(trace.ops))
    from opdrift.export.selection import in_scope

    found: list[int] = in_scope(trace, options.scope).tolist()
    return found


def _named(trace: Trace, pattern: str) -> Sequence[Leaf]:
    return [leaf for leaf in trace.leaves if leaf.name and fnmatchcase(leaf.name, pattern)]


def _leaves(trace: Trace, pattern: str | None, others: Sequence[Trace]) -> Sequence[Leaf]:
    if pattern is None:
        return trace.leaves
    found = _named(trace, pattern)
    if not found and not any(_named(each, pattern) for each in others):
        names = sorted({leaf.name for leaf in trace.leaves if leaf.name})
        raise InvalidOptionError(
            f"{trace.path} has no leaf named {pattern!r}; it has {some(names, 3) or 'none with a name'}."
        )
    return found


def _findings(path: Path, trace: Trace) -> Sequence[Finding]:
    """Of all ranks, where the path holds several."""
    from opdrift.findings import findings
    from opdrift.tracefile.opening import load, rank_folders

    ranks = rank_folders(path)
    return findings([load(folder) for folder in ranks.values()] if ranks else [trace])


def _others(path: Path, trace: Trace) -> Sequence[Trace]:
    """The other ranks of a distributed trace."""
    from opdrift.tracefile.opening import load, rank_folders

    return [load(folder) for folder in rank_folders(path).values() if folder != trace.path]


def _json(
    trace: Trace, ops: Sequence[int], leaves: Sequence[Leaf], options: argparse.Namespace
) -> tuple[Iterable[str], int]:
    from opdrift.render import trace_json

    found = _findings(options.trace, trace)
    status = _status(found, options)
    if options.findings:
        return trace_json.render(trace, (), (), found, marks=()), status
    pieces = trace_json.render(
        trace,
        ops,
        leaves,
        found,
        marks=trace.marks,
        kernels=options.kernels,
        timelines=options.leaf is not None,
    )
    return pieces, status


def _text(
    trace: Trace, ops: Sequence[int], leaves: Sequence[Leaf], options: argparse.Namespace
) -> tuple[Iterable[str], int]:
    from opdrift.render import finding_text, kernels, leaf_text, trace_text
    from opdrift.render.page import Screen
    from opdrift.unfollowed import unfollowed
    from opdrift.world.work import notes_of_work

    screen = Screen.of(sys.stdout)
    if options.findings:
        found = _findings(options.trace, trace)
        ranks = [trace, *_others(options.trace, trace)]
        notes = [*unfollowed(ranks), *notes_of_work(ranks)]
        return [finding_text.finding_report(found, screen, notes=notes)], _status(found, options)
    pieces = []
    if options.kernels:
        pieces.append(kernels.kernel_report(trace, ops, screen))
    elif options.op is not None:
        pieces.append(trace_text.one_op(trace, trace.op(ops[0]), screen))
    elif options.scope is not None:
        pieces.append(trace_text.op_table(trace, ops, screen))
    if options.leaf is not None:
        others = [(each, _named(each, options.leaf)) for each in _others(options.trace, trace)]
        pieces.append(leaf_text.leaf_report(trace, leaves, screen, others=others))
    if not (options.op is not None or options.scope or options.leaf or options.kernels):
        found = _findings(options.trace, trace)
        pieces.append(trace_text.overview(trace, found, screen, path=options.trace))
    return pieces, ExitCode.SAME


def _checkpoint(trace: Trace, options: argparse.Namespace) -> tuple[Iterable[str], int]:
    import json

    from opdrift.checkpoints import check, check_ranks, dtypes_of, read
    from opdrift.render import checkpoint_text
    from opdrift.render.page import Screen
    from opdrift.tracefile.opening import load, rank_folders

    others = [f"--{name}" for name in ("op", "scope", "leaf") if getattr(options, name) is not None]
    others += [f"--{name}" for name in ("kernels", "findings") if getattr(options, name)]
    if others:
        raise InvalidOptionError(
            f"--checkpoint prints a report of its own; leave out {' and '.join(others)}, or ask twice."
        )
    ranks = {rank: load(folder) for rank, folder in rank_folders(options.trace).items()}
    held = frozenset[str]().union(*map(dtypes_of, ranks.values() or [trace]))
    checkpoint = read(options.checkpoint, dtypes=held)
    found = check_ranks(ranks, checkpoint) if ranks else check(trace, checkpoint)
    status = ExitCode.SAME if found.whole else ExitCode.DIFFER
    if options.format == "json":
        return [json.dumps(checkpoint_text.as_object(found), indent=2), "\n"], status
    return [checkpoint_text.checkpoint_report(found, Screen.of(sys.stdout))], status


def _status(found: Sequence[Finding], options: argparse.Namespace) -> int:
    return ExitCode.DIFFER if found and options.findings else ExitCode.SAME
