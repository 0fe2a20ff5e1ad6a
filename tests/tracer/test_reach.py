"""Whether the difference at the output is what rounding grows to is said in a sentence, with its numbers."""

from __future__ import annotations

import opdrift
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace


def stack(layers: int, *, change: str = "", dtype: str = "float32") -> Trace:
    """Numbered layers of one product each; `change` in every one."""
    build = Builder()
    value = build.leaf("x", kind="input", dtype=dtype)
    for number in range(layers):
        weight = build.leaf(f"layers.{number}.weight", shape=(8, 8), dtype=dtype)
        with build.scope(f"layers.{number}"):
            value = build.op("mm", value, weight, change=change)  # type: ignore[arg-type]
    build.output(value)
    return build.build()


def test_the_outputs_difference_is_held_against_what_rounding_grows_to():
    """Both numbers, the depth and the arithmetic are in one sentence."""
    diagnosis = opdrift.diff(stack(4), stack(4, change="~"))

    assert diagnosis.verdict == "rounding"
    assert diagnosis.final_explained is not None
    assert diagnosis.first is not None
    assert diagnosis.first.final_relative_difference is not None
    assert diagnosis.first.final_relative_difference <= diagnosis.final_explained
    (sentence,) = [n for n in diagnosis.notes if "at the output" in n]
    assert "behind 4 layers in float32: rounding explains up to 2.4e-6" in sentence
    assert diagnosis.first.arithmetic == "float32"


def test_depth_counts_the_layers_that_differ():
    """sqrt L: four times as many layers explain twice as much."""
    shallow, deep = (opdrift.diff(stack(n), stack(n, change="~")).final_explained for n in (2, 8))

    assert shallow is not None
    assert deep is not None
    assert deep == 2 * shallow


def test_nothing_is_said_of_rounding_beside_a_defect():
    """Where something is material, the output's difference is its work."""
    diagnosis = opdrift.diff(stack(4), stack(4, change="*"))

    assert diagnosis.verdict == "diverged"
    assert diagnosis.final_explained is None
    assert not any("rounding explains" in note for note in diagnosis.notes)


def test_nothing_is_said_of_equal_runs():
    diagnosis = opdrift.diff(stack(4), stack(4))

    assert (diagnosis.verdict, diagnosis.final_explained, diagnosis.notes) == (
        "identical",
        None,
        (),
    )
