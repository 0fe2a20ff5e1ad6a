"""How a content came to be, in words."""

from __future__ import annotations

from opdrift.provenance import Provenance


def made_words(found: Provenance) -> str:
    """After the name of what holds it: `was drawn at random by ...`."""
    if found.kind == "drawn":
        chosen = {True: "a chosen seed", False: "a seed that nobody chose", None: "a generator"}
        return f"was drawn at random by {found.first_op} (op {found.first_seq}), from {chosen[found.seeded]}"
    if found.kind == "copied":
        return f"was copied from {found.root_name or 'a tensor without a name'} (op {found.seq})"
    if found.op is None:
        return "was there before the recording"
    return f"was {found.kind} by {found.op} (op {found.seq})"
