"""Traces built by hand behave like recorded ones."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from opdrift.errors import InvalidOptionError
from opdrift.records import REREAD, Leaf
from opdrift.testing import Builder, plant, trace
from opdrift.tracefile.reader import Trace


def test_words_become_a_chain_of_ops():
    """Each op takes what the one before returned; products take a weight of their own."""
    built = trace("mm relu mm")

    ops = [built.op(i) for i in range(3)]

    assert [op.name for op in ops] == ["aten.mm.default", "aten.relu.default", "aten.mm.default"]
    assert ops[1].inputs == ops[0].outputs
    assert ops[2].inputs[0] == ops[1].outputs[0]
    assert [leaf.name for leaf in built.leaves] == ["x", "w0", "w1", "output"]


def test_the_same_words_give_the_same_contents():
    """Two traces of the same words agree in every digest."""
    one, other = trace("mm relu mm"), trace("mm relu mm")

    assert one.fingerprints.raw.tolist() == other.fingerprints.raw.tolist()


@pytest.mark.parametrize("change", ["*", "~", "!"])
def test_a_change_flows_downstream(change: str):
    """What follows a changed op, or reads a changed weight, differs as well; what precedes it does not."""
    plain, changed = trace("relu mm relu"), trace(f"relu mm{change} relu")

    outputs = [
        [t.fingerprint(t.op(i).outputs[0]).key for i in range(3)]  # type: ignore[union-attr]
        for t in (plain, changed)
    ]

    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1] != outputs[1][1]
    assert outputs[0][2] != outputs[1][2]


def test_a_change_in_the_last_bits_is_small():
    """`~` moves a few elements by one unit in the last place."""
    plain, changed = trace("mm"), trace("mm~")

    before, after = (t.fingerprint(t.op(0).outputs[0]) for t in (plain, changed))

    assert before is not None
    assert after is not None
    values = [np.asarray(p.sample, "<u4").view("<f4") for p in (before, after)]
    assert 0 < np.abs(values[0] - values[1]).max() < 1e-6


def test_scopes_give_ops_their_module():
    """`fc{ ... }` runs ops in a call of the module `fc`; a second one is its second call."""
    built = trace("fc{ mm } relu fc{ mm }")

    places = [(built.op(i).call.path, built.op(i).call.number) for i in range(3)]

    assert places == [("fc", 0), ("", 0), ("fc", 1)]


def test_an_op_in_place_makes_a_new_value_of_the_same_storage():
    """The written value comes first among the outputs, and what was returned repeats it."""
    build = Builder()
    x = build.leaf("x", kind="input")
    y = build.op("add_", x, build.leaf("b"))
    built = build.build()

    op = built.op(0)

    assert (op.outputs, op.mutated) == ((y, y), 1)
    assert built.values.storage[x] == built.values.storage[y]
    assert built.values.write[y] == built.values.write[x] + 1
    assert op.signature.op.mutates == ("self",)


def test_views_have_no_fingerprint_and_share_the_write():
    """A view is a new value of the same state."""
    build = Builder()
    w = build.leaf("w")
    v = build.op("t", w)
    built = build.build()

    assert built.fingerprint(v) is None
    assert (built.values.storage[v], built.values.write[v]) == (
        built.values.storage[w],
        built.values.write[w],
    )
    assert built.meta(v).shape == built.meta(w).shape[::-1]


def test_a_hidden_write_shows_as_a_changed_leaf():
    """No op wrote; the next op that reads it carries the flag."""
    build = Builder()
    w = build.leaf("fc.slot", kind="buffer")
    changed = build.hidden_write(w, "fc.slot", content="other")
    build.op("relu", changed)
    built = build.build()

    assert built.leaves[-1] == Leaf("fc.slot", "buffer", "changed", changed, 0, 0)
    assert built.op(0).flags & REREAD
    assert built.producer[changed] == -1


def test_settings_and_marks_are_kept():
    """Non-tensor arguments, source lines and marks read back as they were given."""
    build = Builder(flags={"num_threads": 2}, label="right")
    x = build.leaf("x", kind="input")
    build.op("native_layer_norm", x, settings={"eps": 1e-5}, source=("net.py", 7, "forward"))
    build.mark("move", name="fc.weight")
    built = build.build()

    assert dict(built.op(0).signature.arguments)["eps"] == 1e-5
    assert str(built.op(0).source) == "net.py:7 in forward"
    assert (built.marks[0].kind, built.marks[0].fields) == ("move", {"name": "fc.weight"})
    assert (built.header.label, built.header.flags["num_threads"]) == ("right", 2)


def test_large_contents_have_a_sketch():
    """More than 32 elements: the record holds a sketch beside the sample, as a recorder's does."""
    build = Builder()
    w = build.leaf("w", shape=(16, 16))

    found = build.build().fingerprint(w)

    assert found is not None
    assert found.sketch is not None
    assert len(found.sketch) == 16
    # (e) of the specification: the norm of the sketch estimates that of the content
    assert np.linalg.norm(found.sketch) == pytest.approx(found.ssq**0.5, rel=0.4)


def test_a_killed_run_has_no_footer():
    """`complete=False` reads as a trace that was cut off."""
    built = trace("mm", complete=False)

    assert built.footer is None
    assert not built.complete


@pytest.mark.parametrize("change", ["*", "~", "!"])
def test_a_planted_fault_is_the_word_with_its_sign(change: str):
    """Op 2 of these words is the product in the scope."""
    words = "relu fc{ mm } gelu"

    by_hand, planted = trace(f"relu fc{{ mm{change} }} gelu"), plant(words, 2, change)

    assert planted.fingerprints.raw.tolist() == by_hand.fingerprints.raw.tolist()
    assert planted.fingerprints.raw.tolist() != trace(words).fingerprints.raw.tolist()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: trace("mm $ relu"), r"from '\$ relu' on"),
        (lambda: trace("fc{ mm"), "leaves 1 of its scopes open"),
        (lambda: trace("mm }"), "closes a scope that was not opened"),
        (lambda: trace("mm**"), r"from '\*' on"),
        (lambda: plant("mm relu", 3), "has ops 1 to 2"),
        (lambda: plant("mm relu", 0), "has ops 1 to 2"),
        (lambda: plant("mm relu", 1, "?"), "is none of"),
        (lambda: plant("mm relu", 2, "!"), "relu has none"),
    ],
)
def test_words_that_cannot_be_read_are_refused_with_the_place(call: Callable[[], Trace], said: str):
    """A sign that is skipped in silence would plant nothing, and the test of a fault would pass."""
    with pytest.raises(InvalidOptionError, match=said):
        call()


def test_the_page_for_users_runs_and_needs_no_torch():
    """All examples of docs/testing.md, one after the other, in a process of their own."""
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)

    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*examples, "import sys; print('torch' in sys.modules)"])],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert len(examples) == 3
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
