"""What the reports say, from diagnoses built by hand."""

from __future__ import annotations

import fnmatch
import io
import json
import math
import os
import re
import subprocess
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from opdrift.records import (
    Alignment,
    Amplifier,
    ArgumentDifference,
    Cause,
    Diagnosis,
    Divergence,
    EnvironmentDifference,
    GrowthPoint,
    Pick,
    Sides,
    TraceSummary,
    UnpairedGroup,
)
from opdrift.render import card, markdown, text, words
from opdrift.render import json as json_report
from opdrift.render.growth import stretches
from opdrift.render.page import Page, Screen

WIDE = Screen(width=100, unicode=True)


def summary(path: str, **changes: object) -> TraceSummary:
    base = TraceSummary(
        path, "5f1c2a9e", "", "2026-03-02T09:00:00Z", "2.13.0", "cpu", 1204, True, None, None
    )
    return replace(base, **changes)


def divergence(**changes: object) -> Divergence:
    base = Divergence(
        kind="op",
        name=None,
        op="aten.mm.default",
        module="layers.6.self_attn.q_proj",
        call=0,
        phase="forward",
        source="model.py:312 in forward",
        seq=Sides(812, 812),
        output=0,
        inputs_match=True,
        material=True,
        relative_difference=3.1e-3,
        explained=7e-6,
        conditioning=12.5,
        max_abs_difference=1.95e-3,
        ulp=4.0,
        nonfinite=Sides(0, 0),
        kernel=Sides(None, None),
        arguments=(),
        final_relative_difference=2.1e-2,
        cause=Cause(
            "kernel", "likely", "another kernel ran", (), "run both sides with the same kernel"
        ),
        tensors=Sides("float32[4, 64]", "float32[4, 64]"),
        how="sketch",
    )
    return replace(base, **changes)


def diagnosis(verdict: str, first: Divergence | None = None, **changes: object) -> Diagnosis:
    base = Diagnosis(
        verdict=verdict,  # type: ignore[arg-type]
        left=summary("monday.trace"),
        right=summary("tuesday.trace"),
        first=first,
        first_bitwise=first,
        origins=(first,) if first else (),
        amplifiers=(),
        causes=(first.cause,) if first else (),
        environment=(),
        unpaired=Sides((), ()),
        alignment=Alignment(1204, 0, 0, "tree", None),
    )
    return replace(base, **changes)


def identical() -> Diagnosis:
    return diagnosis("identical")


def weights() -> Diagnosis:
    """esm#297: the state dict was dropped."""
    cause = Cause(
        "weights",
        "certain",
        "39 of 62 tensors of the model differ before the first op; all were drawn at random and never loaded",
        (
            "39 were last written by aten.uniform_ or aten.normal_, from a generator that was never seeded",
            "0 of 62 were written by a copy from a checkpoint",
            "12 of 12 gathers and 36 of 36 moves are intact: offload and sharding are innocent",
        ),
        "_load_model_and_alphabet_core_v2 returns (model, alphabet, state_dict): pass the third one to model.load_state_dict()",
    )
    first = divergence(
        kind="leaf",
        name="embed_tokens.weight",
        op="aten.embedding.default",
        module="embed_tokens",
        seq=Sides(3, 3),
        phase=None,
        inputs_match=None,
        relative_difference=1.41,
        explained=None,
        conditioning=None,
        max_abs_difference=3.7,
        ulp=None,
        final_relative_difference=0.87,
        cause=cause,
        members=tuple(f"layers.{i}.self_attn.{p}_proj.weight" for i in range(3) for p in "kqv"),
        tensors=Sides("float32[33, 64]", "float32[33, 64]"),
        how="sketch",
        source=None,
        output=None,
    )
    return diagnosis("diverged", first, growth=growth(everything=True))


def growth(*, everything: bool = False) -> tuple[GrowthPoint, ...]:
    start = (
        GrowthPoint("embed_tokens", 3, 3, 1.41)
        if everything
        else GrowthPoint("embed_tokens", 3, 0, 0.0)
    )
    return (
        start,
        GrowthPoint("layers.0", 380, 371 if everything else 0, 0.98 if everything else 0.0),
        GrowthPoint("layers.6", 391, 290, 2.6e-6),
        GrowthPoint("layers.11.a_module_with_a_long_name", 391, 391, 3.1e-3),
        GrowthPoint("lm_head", 39, 39, 2.1e-2),
    )


def kernel() -> Diagnosis:
    """fairseq2#1481: the batch size changes the SDPA backend."""
    flash = Pick(
        "_scaled_dot_product_flash_attention",
        "aten",
        "FLASH_ATTENTION",
        "first in the priority order that accepts the operands",
        source="dispatcher",
    )
    math = Pick(
        "_scaled_dot_product_attention_math",
        "aten",
        "MATH",
        "the only backend left",
        {
            "FLASH_ATTENTION": "head_dim 512 is above 256",
            "EFFICIENT_ATTENTION": "the mask's last stride is 3, it must be 1",
        },
    )
    first = divergence(
        op="aten._scaled_dot_product_flash_attention.default",
        module="layers.0.self_attn",
        call=2,
        material=True,
        kernel=Sides(flash, math),
        tensors=Sides("bfloat16[1, 8, 56, 512]", "bfloat16[15, 8, 56, 512]"),
        cause=Cause(
            "kernel",
            "certain",
            "SDPA ran FLASH_ATTENTION on the left and MATH on the right",
            ("the inputs are equal, the picks are not",),
            "with torch.nn.attention.sdpa_kernel([SDPBackend.MATH]): on both sides",
        ),
    )
    silu = divergence(
        op="aten.silu.default",
        module="layers.0.ffn",
        seq=Sides(71, 71),
        material=False,
        relative_difference=9e-10,
        explained=3.1e-7,
        cause=Cause("rounding", "certain", "the last bit", (), ""),
    )
    others = tuple(
        divergence(
            module=f"layers.{i}.norm",
            op="aten.mul.Tensor",
            seq=Sides(200 + i, 200 + i),
            relative_difference=10.0**-i,
        )
        for i in range(1, 5)
    )
    return diagnosis(
        "diverged",
        first,
        first_bitwise=silu,
        origins=(silu, first, *others),
        causes=(first.cause, Cause("flags", "possible", "TF32 is on in one run", (), "")),
        amplifiers=(
            Amplifier(
                "aten.native_layer_norm.default",
                "layers.9.norm",
                Sides(901, 903),
                1e-6,
                3e-3,
                3000.0,
            ),
        ),
        environment=(
            EnvironmentDifference("torch.backends.cuda.matmul.allow_tf32", "False", "True"),
            EnvironmentDifference("OMP_NUM_THREADS", None, "4"),
        ),
        unpaired=Sides(
            (UnpairedGroup("aten.clone.default", "layers.0.self_attn", 12, 40),),
            (UnpairedGroup("aten._safe_softmax.default", "layers.0.self_attn", 12, 44),),
        ),
        growth=growth(),
        notes=("lm_head.bias differs, but no op reads it",),
        right=summary("tuesday.trace", label="batch of 15", torch="2.12.0"),
    )


def rounding() -> Diagnosis:
    first = divergence(
        material=False,
        relative_difference=2.6e-7,
        explained=7e-6,
        final_relative_difference=1.1e-6,
        max_abs_difference=4.5e-6,
        ulp=316.0,
        cause=Cause(
            "rounding",
            "certain",
            "the same sums in another order",
            ("equal inputs, equal pick",),
            "",
        ),
    )
    return diagnosis("rounding", None, first_bitwise=first, origins=(first,), growth=growth())


def op_args() -> Diagnosis:
    first = divergence(
        op="aten.native_layer_norm.default",
        arguments=(
            ArgumentDifference("eps", "1e-06", "1e-05"),
            ArgumentDifference("weight", None, "float32[64]"),
        ),
        relative_difference=None,
        max_abs_difference=float("inf"),
        how="unavailable",
        nonfinite=Sides(0, 12),
        cause=Cause(
            "op-args",
            "certain",
            "eps is 1e-06 on the left and 1e-05 on the right",
            (),
            "use one eps",
        ),
    )
    return diagnosis("diverged", first)


def race() -> Diagnosis:
    first = divergence(
        kind="hidden-write",
        name="layers.1.slot",
        module="layers.1",
        inputs_match=None,
        explained=None,
        cause=Cause(
            "race",
            "likely",
            "layers.1.slot changed between two reads",
            ("last recorded write: op 4",),
            "wait",
        ),
    )
    return diagnosis("diverged", first, right=summary("tuesday.trace", complete=False))


def structure() -> Diagnosis:
    first = divergence(
        kind="structure",
        op=None,
        seq=Sides(None, 40),
        inputs_match=True,
        explained=1.6,
        cause=Cause(
            "structure",
            "certain",
            "only the right run calls layers.6.adapter",
            (),
            "remove the adapter",
        ),
    )
    return diagnosis(
        "diverged",
        first,
        alignment=Alignment(1100, 4, 108, "names", "the programs share few scopes"),
    )


def distributed() -> Diagnosis:
    sides = {
        "left": summary("monday.trace", world_size=2, rank=1),
        "right": summary("tuesday.trace", world_size=2, rank=1),
    }
    one = diagnosis("diverged", divergence(), **sides)
    zero = diagnosis("identical", left=summary("monday.trace", world_size=2, rank=0))
    return replace(one, ranks={0: zero, 1: one})


def hostile() -> Diagnosis:
    evil = "layers.[bold red]x[/bold].\x1b[2J\n\u202edlrow.`|<b>*@you"
    first = divergence(
        module=evil,
        source="a\nb.py:1 in f",
        op="x.y.z",
        cause=Cause("weights", "possible", evil, (evil,), evil),
    )
    huge = divergence(module="m." + "deep." * 3000, cause=first.cause)
    return diagnosis(
        "diverged",
        first,
        origins=(first, huge),
        growth=(GrowthPoint(evil, 1, 1, float("nan")),),
        notes=(evil,),
    )


CASES = {
    f.__name__: f
    for f in (identical, weights, kernel, rounding, op_args, race, structure, distributed, hostile)
}


FORMATS = {
    "expected.txt": lambda d: text.render(d, WIDE),
    "narrow.txt": lambda d: text.render(d, Screen(width=40)),
    "expected.json": json_report.render,
    "expected.md": markdown.render,
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_report_reads_as_it_was_accepted(case, form, golden):
    """Each report of each case is the text that someone read and found right."""
    golden(f"reports/{case}/{form}", FORMATS[form](CASES[case]()))


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
@pytest.mark.parametrize("case", CASES)
def test_no_line_is_wider_than_the_screen(case, width):
    """Narrow screens wrap and drop columns; only commands to type stay whole, so that they can be copied."""
    page = text.render(CASES[case](), Screen(width=width, unicode=True))

    wide = [line for line in page.splitlines() if cell_len(line) > width]

    assert [line for line in wide if "opdrift show" not in line and "diff-trace" not in line] == []


@pytest.mark.parametrize("case", CASES)
def test_narrow_tables_never_cut_a_number(case):
    """Every size of the wide table of growth stands whole in the narrow one, or its column is gone."""
    narrow = text.render(CASES[case](), Screen(width=30))

    for point in CASES[case]().growth:
        if point.differing and point.relative_difference is not None:
            assert f" {words.size(point.relative_difference)}" in narrow


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80, 120, None])
def test_lists_of_ops_name_op_and_module_at_every_width(width):
    """Where a column would have to go, each entry becomes a line that says all the same."""
    page = text.render(kernel(), Screen(width))

    lists = " ".join(
        part.partition("\n\n")[0].replace("\n", " ")
        for title in ("other independent", "ops that amplify", "ops that only one run has")
        for part in page.split(title)[1:]
    )
    flat = "".join(lists.split())
    for amplifier in kernel().amplifiers:
        assert amplifier.op in flat
        assert words.ratio(amplifier.gain) in flat
    for group in card.other_origins(kernel()):
        assert group.op in flat
        assert str(group.first_seq) in flat
    for lone in card.lone_ops(kernel()):
        assert f"{lone.op}" in flat
        assert lone.place in flat


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200, None])
def test_an_environment_difference_always_shows_both_sides(width):
    """However long the values are and however narrow the screen is: both stand there, whole."""
    long = EnvironmentDifference("torch.build", "L" * 70, "R" * 70)
    differing = (long, EnvironmentDifference("env.OMP_NUM_THREADS", "1", None))

    page = text.render(diagnosis("diverged", divergence(), environment=differing), Screen(width))

    table = page.partition("environment that differs")[2].partition("monday.trace")[0]
    assert (table.count("L"), table.count("R")) == (70, 70 + 1)  # and the R of the variable's name
    assert "(none)" in table


@pytest.mark.parametrize(
    "argument",
    [
        "new\nline.0",
        "\x1b[31mred\x07",
        "it's\t\\ both",
        "\u202egnp.\u00e9\u2026",
        "\x01" + "1f",
        "$HOME `x` \n",
        "bytes\udcff",
        "plain name",
    ],
)
def test_a_command_takes_the_argument_that_it_was_printed_with(argument):
    """What stands under next: is pasted into bash, and means what was meant, in any locale."""
    page = Page(Screen(80))
    page.command("", f"printf %s {words.typed(argument)}")

    line = page.render()

    ran = subprocess.run(
        ["bash", "-c", line.encode()], check=True, capture_output=True, env={"LC_ALL": "C"}
    )
    assert line.count("\n") == 1
    assert ran.stdout == os.fsencode(argument)


@pytest.mark.parametrize("name", ["half\ud800", "nul\0[0]", "new\nline"])
def test_a_pattern_to_type_matches_its_name_and_can_be_typed(name):
    """What no command line can hold is any character in it."""
    pattern = words.pattern_of(name)

    assert fnmatch.fnmatchcase(name, pattern)
    assert b"\0" not in os.fsencode(pattern)


def test_the_first_command_to_type_is_labelled_whatever_it_is():
    """Without an op to look at, the views are what comes next."""
    page = text.render(diagnosis("diverged"), WIDE)

    assert page.endswith(
        "\nnext: diff-trace monday.trace tuesday.trace --side-by-side\n"
        "      diff-trace monday.trace tuesday.trace --format html -o report.html\n"
    )


def passes(number: int) -> tuple[GrowthPoint, ...]:
    """A training run: forward, backward and step, over and over; it differs from the middle on."""
    found = []
    for turn in range(number):
        late = turn >= number // 2
        for module in ("", "0", "1", "2", "3", "", "3", "2", "1", "0", ""):
            known = 1e-3 * (turn + 1) if module else None
            found.append(GrowthPoint(module, 3, 2 if late else 0, known if late else 0.0))
    return tuple(found)


def test_growth_of_a_long_run_is_few_rows_that_lose_no_op():
    """Merged rows keep all ops, the largest size, and where it begins to differ."""
    points = passes(12)

    rows = stretches(points)

    assert len(rows) == 15
    assert sum(r.ops for r in rows) == sum(p.ops for p in points)
    assert sum(r.differing for r in rows) == sum(p.differing for p in points)
    assert max(r.largest or 0.0 for r in rows) == 12e-3
    equal = [r for r in rows if not r.differing]
    assert equal == rows[: len(equal)]
    assert sum(r.ops for r in equal) == sum(p.ops for p in points if not p.differing)
    assert rows[0].place == "0 ... 3"


def test_growth_of_a_short_run_is_told_point_by_point():
    """What is few already stays as it is."""
    assert [r.place for r in stretches(passes(1))] == [
        "(root)",
        *("0", "1", "2", "3"),
        "(root)",
        *("3", "2", "1", "0"),
        "(root)",
    ]


@pytest.mark.parametrize(
    ("modules", "place"),
    [
        (("", "0", "", "1"), "0, 1"),
        (("", ""), "(root)"),
        (("a", "b", "c", "d", "a"), "a ... d"),
        (("", " ... 0"), "(root) ... 0"),
        (("3 ... ",), "3 ... (root)"),
        (("0 ... 2", "4"), "0 ... 4"),
    ],
)
def test_merged_modules_read_well(modules, place):
    """A few are named one by one, more by their ends; the root's glue in between is no end."""
    equal = tuple(GrowthPoint(m, 1, 0, 0.0) for m in modules)
    differing = tuple(GrowthPoint("z", 1, 1, 10.0**i) for i in range(0, 28, 2))

    assert stretches(equal + differing)[0].place == place


@pytest.mark.parametrize("case", CASES)
def test_ascii_screen_gets_ascii(case):
    """A terminal that cannot show more gets letters, digits and punctuation alone."""
    assert text.render(CASES[case](), Screen(width=80)).isascii()


@pytest.mark.parametrize(
    "render", [lambda d: text.render(d, WIDE), markdown.render, json_report.render]
)
def test_hostile_names_reach_no_terminal(render):
    """Escape sequences, line breaks and bidi overrides in names are shown, never sent."""
    shown = render(hostile())

    assert [c for c in shown if not c.isprintable() and c != "\n"] == []
    assert "[bold red]" in shown


def test_colour_adds_nothing_but_escape_sequences():
    """With colours taken out, a coloured report is the plain one."""
    for case in CASES.values():
        plain = text.render(case(), Screen(width=80))
        coloured = text.render(case(), Screen(width=80, color=True))
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_verdict_comes_first_and_alone_on_request():
    """The first word is the verdict; `-q` prints the same sentence on one line."""
    for case in CASES.values():
        found = case()
        line = text.verdict_line(found, Screen(width=20))
        assert line.startswith(found.verdict)
        assert line.count("\n") == 1


def test_card_says_cause_and_remedy_before_details():
    """Who reads three lines has read where, why, and what to do."""
    lines = text.render(op_args(), WIDE).splitlines()
    labels = [line.split()[0] for line in lines if re.match(r"  \w+  ", line)]
    assert labels[:3] == ["where", "cause", "try"]


def test_an_origin_is_said_once():
    """What the card shows, and the earlier harmless difference it names, are not among the others."""
    groups = card.other_origins(kernel())
    assert [(g.place, g.number, g.largest) for g in groups] == [("layers.*.norm", 4, 0.1)]


def test_numbers_of_a_place_are_grouped_but_those_of_a_name_are_not():
    """`layers.3` and `layers.4` are one kind of place; `conv1` and `conv2` are two modules."""
    origins = tuple(divergence(module=m) for m in ("layers.3.x", "layers.4.x", "conv1", "conv2"))
    groups = card.other_origins(replace(identical(), origins=origins))
    assert [(g.place, g.number) for g in groups] == [("layers.*.x", 2), ("conv1", 1), ("conv2", 1)]


# ---- JSON ----------------------------------------------------------------------------------------------


def test_json_has_the_fields_of_the_contract():
    """Every name of DESIGN 3.4, none missing at any level."""
    document = json.loads(json_report.render(kernel()))

    assert document["schema"] == "opdrift.diagnosis/1"
    assert document.keys() >= {
        "schema",
        "verdict",
        "left",
        "right",
        "first",
        "first_bitwise",
        "origins",
        "amplifiers",
        "causes",
        "environment",
        "unpaired",
        "alignment",
    }
    assert document["left"].keys() >= {
        "path",
        "run_id",
        "label",
        "created",
        "torch",
        "device",
        "ops",
        "complete",
        "world_size",
        "rank",
    }
    assert document["first"].keys() >= {
        "kind",
        "name",
        "op",
        "module",
        "call",
        "phase",
        "source",
        "seq",
        "output",
        "inputs_match",
        "material",
        "relative_difference",
        "explained",
        "conditioning",
        "max_abs_difference",
        "ulp",
        "nonfinite",
        "kernel",
        "arguments",
        "final_relative_difference",
        "cause",
    }
    assert document["first"]["seq"] == {"left": 812, "right": 812}
    assert document["first"]["kernel"]["right"] == {
        "name": "_scaled_dot_product_attention_math",
        "library": "aten",
        "backend": "MATH",
        "reason": "the only backend left",
        "refused": {
            "FLASH_ATTENTION": "head_dim 512 is above 256",
            "EFFICIENT_ATTENTION": "the mask's last stride is 3, it must be 1",
        },
        "source": "inferred",
        "observed": [],
    }
    assert document["causes"][1] == {
        "slug": "flags",
        "confidence": "possible",
        "summary": "TF32 is on in one run",
        "evidence": [],
        "try": "",
    }
    assert document["amplifiers"][0].keys() == {
        "op",
        "module",
        "seq",
        "input_difference",
        "output_difference",
        "gain",
    }
    assert document["alignment"].keys() == {
        "paired",
        "left_only",
        "right_only",
        "method",
        "fallback_reason",
    }
    assert document["unpaired"]["left"][0].keys() >= {"op", "module", "count"}


def test_json_has_words_for_numbers_that_json_lacks():
    """inf and nan are strings, so that every parser reads the document."""
    found = diagnosis(
        "diverged",
        divergence(relative_difference=math.inf, ulp=-math.inf, max_abs_difference=math.nan),
    )

    first = json.loads(json_report.render(found), parse_constant=pytest.fail)["first"]

    assert (first["relative_difference"], first["ulp"], first["max_abs_difference"]) == (
        "inf",
        "-inf",
        "nan",
    )


def test_json_of_ranks_holds_a_document_each():
    """A distributed comparison carries every rank's own answer."""
    ranks = json.loads(json_report.render(distributed()))["ranks"]
    assert {rank: one["verdict"] for rank, one in ranks.items()} == {
        "0": "identical",
        "1": "diverged",
    }


# ---- Markdown ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "set_"),
    [
        ("result = model.load(state, strict=True);", "result = `model.load(state, strict=True)`;"),
        ("persistent buffers are in state_dict())", "persistent buffers are in `state_dict()`)"),
        ('pass record(kernels="full") once', 'pass record(kernels="full") once'),
        ("with flags(enabled=f(x)): run", "with flags(enabled=f(x)): run"),
    ],
)
def test_markdown_sets_a_call_as_one_piece_of_code(said: str, set_: str):
    """Arguments and all; prose with parentheses stays prose."""
    assert markdown.prose(said) == set_


def test_markdown_leaves_no_name_to_act_as_markup():
    """Everything with a special character is inside a code span; nothing mentions, links or formats."""
    evil = "a*b_c [x](http://y) <img> @you #1 `tick` | &amp; $x$ ~~s~~"
    outside = re.sub(r"(`+).*?[^`]\1(?!`)", "", markdown.prose(evil))
    assert not set(outside) & set("*_[]<>@#`|&$~")


def test_markdown_table_cells_cannot_end_early():
    """A bar in a name does not open another column."""
    rows = [
        line
        for line in markdown.render(hostile()).splitlines()
        if line.startswith("|") and "bold" in line
    ]
    assert rows
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 5


def outside_of_code(line: str) -> str:
    """What CommonMark leaves outside of code spans: a run of backticks ends at the next run as long."""
    plain, at = [], 0
    for run in re.finditer("`+", line):
        if run.start() < at:
            continue
        end = next((e for e in re.finditer("`+", line[run.end() :]) if e[0] == run[0]), None)
        plain.append(line[at : run.start()])
        at = run.end() + end.end() if end is not None else run.start()
        if end is None:
            plain.append(run[0])
            at = run.end()
    return "".join([*plain, line[at:]])


ODD = st.text(st.sampled_from("`*_[]()<>|\\#@&~$ ,.:;a1/"), max_size=24)


@given(ODD)
@settings(deadline=None)
@example("`a```")
@example("`a`*b*")
@example("*(`a`)")
@example("**float32[4]**")
@example("")
def test_no_odd_name_leaves_a_backtick_open(odd):
    """Whatever backticks a name or a sentence has, nothing of it ends up outside of code."""
    assert not set(outside_of_code(markdown.prose(odd))) & set("`*_[]<>@#|&~$\\")
    assert outside_of_code(markdown.code(odd)) == ""


@given(st.lists(ODD, min_size=3, max_size=3))
@settings(deadline=None)
@example(["a\\|b", "\\", "|"])
def test_no_odd_name_ends_a_table_cell(odd):
    """GitHub splits a row at each bar that no backslash escapes; a row keeps its cells."""
    cells = [markdown.code(odd[0]), markdown.prose(odd[1]), markdown.code(odd[2])]
    for row in markdown._table(("a", "b", "c"), [cells])[2:]:
        assert len(re.sub(r"\\.", "", row).split("|")) == 5


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        (
            "only left: view at /v/lib/site-packages/transformers/sdpa.py:182 in `forward`",
            "only left: view at `transformers/sdpa.py:182` in `forward`",
        ),
        ("(/v/site-packages/esm/a.py:3 in f)", "(`esm/a.py:3` in f)"),
        ("weight`x/site-packages/a.py", "`` weight`a.py ``"),
    ],
)
def test_shorter_paths_keep_their_code_spans(sentence, said):
    """The path of an installed package is cut to its name, and the backtick before it stays."""
    assert words.relative(markdown.prose(sentence), "/home") == said


# ---- words and screens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "said"),
    [(2.6e-7, "2.6e-7"), (0.0, "0"), (1.0, "1"), (0.35, "0.35"), (-4.25, "-4.2"), (316.4, "316"), (1e-10, "1e-10"),
     (4321.0, "4.3e3"), (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")],
)  # fmt: skip
def test_sizes_are_short(number, said):
    """Two digits and a short exponent."""
    assert words.size(number) == said


def test_huge_names_keep_both_ends():
    """A name of a megabyte is cut in the middle; what identifies it stands at the ends."""
    shown = words.name("head" + "x" * 1_000_000 + "tail")
    assert len(shown) == words.NAME_LIMIT
    assert (shown[:4], shown[-4:]) == ("head", "tail")


@pytest.mark.parametrize(
    ("text", "folder", "said"),
    [
        ("at /home/me/run/net.py:7", "/home/me/run", "at net.py:7"),
        ("at /home/me/running/net.py:7", "/home/me/run", "at /home/me/running/net.py:7"),
        ("at /mnt/home/me/run/net.py:7", "/home/me/run", "at /mnt/home/me/run/net.py:7"),
        ("at /home/me/run/net.py:7", "", "at /home/me/run/net.py:7"),
        ("at /net.py:7", "/", "at /net.py:7"),
    ],
)
def test_paths_below_the_reader_are_short(text, folder, said):
    """What lies in the folder where one is needs no absolute path; everything else keeps its own."""
    assert words.relative(text, folder) == said


class Stream(io.StringIO):
    """A stream that says what it is."""

    def __init__(self, encoding, terminal):
        super().__init__()
        self._encoding, self._terminal = encoding, terminal

    encoding = property(lambda self: self._encoding)

    def isatty(self):
        return self._terminal


@pytest.mark.parametrize(
    ("encoding", "terminal", "environment", "screen"),
    [
        ("utf-8", False, {}, Screen(None, color=False, unicode=True)),
        ("utf-8", True, {"COLUMNS": "70"}, Screen(70, color=True, unicode=True)),
        ("utf-8", True, {"COLUMNS": "70", "NO_COLOR": "1"}, Screen(70, color=False, unicode=True)),
        ("utf-8", True, {"COLUMNS": "70", "TERM": "dumb"}, Screen(70, color=False, unicode=True)),
        ("utf-8", False, {"FORCE_COLOR": "1"}, Screen(None, color=True, unicode=True)),
        (
            "utf-8",
            False,
            {"FORCE_COLOR": "1", "NO_COLOR": "1"},
            Screen(None, color=False, unicode=True),
        ),
        ("ascii", True, {"COLUMNS": "0"}, Screen(80, color=True, unicode=False)),
        ("latin-1", False, {"COLUMNS": "wide"}, Screen(None, color=False, unicode=False)),
    ],
)
def test_screen_follows_stream_and_environment(
    encoding, terminal, environment, screen, monkeypatch
):
    """Colour for terminals unless NO_COLOR or a dumb one; no wrapping for pipes; ASCII where UTF-8 is not."""
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    assert Screen.of(Stream(encoding, terminal), environment) == replace(screen, folder=os.getcwd())


# ---- what a tired engineer must not misread ---------------------------------------------------------------


def report(found: Diagnosis) -> str:
    return text.render(found, WIDE)


def test_values_that_are_nan_on_one_side_come_before_the_distance_of_the_others():
    """5e-8 among the finite values would look harmless in front of sixteen NaN."""
    said = report(
        diagnosis("diverged", divergence(nonfinite=Sides(16, 0), relative_difference=5.2e-8))
    )

    assert said.index("NaN or infinite: left 16, right 0") < said.index(
        "where both are finite: relative"
    )


def test_equal_numbers_of_nan_are_only_mentioned():
    said = report(diagnosis("diverged", divergence(nonfinite=Sides(3, 3))))

    assert "where both are finite" not in said
    assert "NaN or infinite: left 3, right 3" in said


def test_both_numbers_stand_beside_the_arithmetic():
    """What rounding explains depends on the dtype and on TF32."""
    first = divergence(relative_difference=2.6e-7, material=False, arithmetic="float32, TF32 off")

    assert (
        "relative difference 2.6e-7 (from sketches); rounding explains up to 7e-6 in float32, TF32 off"
        in " ".join(report(diagnosis("rounding", first)).split())
    )


@pytest.mark.parametrize(
    ("conditioning", "said"), [(12.5, True), (None, False)], ids=["product", "other op"]
)
def test_a_product_whose_kernel_is_not_known_says_so(conditioning: float | None, said: bool):
    """An addition has no kernel to ask for."""
    found = report(diagnosis("diverged", divergence(conditioning=conditioning)))

    assert ("kernel     unknown on both sides" in found) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inputs_match": True}, "equal, bit for bit: the difference begins here"),
        (
            {"inputs_match": False},
            "already differ: this op makes the difference larger than they explain",
        ),
        (
            {"inputs_match": False, "material": False},
            "not all known to be equal; the difference is small enough for rounding",
        ),
        (
            {"inputs_match": False, "made_otherwise": True},
            "one is made, or taken, with other arguments; what it is made or taken from is equal",
        ),
    ],
)
def test_what_is_said_of_the_inputs(changes: dict[str, bool], said: str):
    """That they make the difference larger is said of no rounding, and of no view of equal tensors."""
    fields = {f.label: f.lines for f in card.card(divergence(**changes))}

    assert fields["inputs"] == (said,)


@pytest.mark.parametrize(
    ("call", "said"), [(0, ""), (1, ", 2nd call"), (2, ", 3rd call"), (11, ", 12th call")]
)
def test_calls_are_counted_as_people_do(call: int, said: str):
    """The first call goes without saying; the second is the 2nd, although its number is 1."""
    where = next(f for f in card.card(divergence(call=call)) if f.label == "where")

    assert where.lines[0] == f"layers.6.self_attn.q_proj{said}"


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "1st"), (1, "2nd"), (2, "3rd"), (3, "4th"), (10, "11th"), (12, "13th"), (20, "21st"), (110, "111th"), (1000, "1,001st")],
)  # fmt: skip
def test_ordinals(number: int, said: str):
    assert words.ordinal(number) == said


def test_ops_without_counterpart_are_not_called_equal():
    """Nothing differs among ops that only the left run has, and nothing is known to be equal either."""
    points = (
        GrowthPoint("embed", 4, 0, None),
        GrowthPoint("layers.0", 51, 0, None, unpaired=51),
        GrowthPoint("layers.1", 51, 0, None, unpaired=3),
        GrowthPoint("head", 2, 1, None),
    )
    lines = {
        line.split()[0]: line.split()[1:]
        for line in report(diagnosis("diverged", divergence(), growth=points)).splitlines()
        if line.startswith(("  embed", "  layers", "  head"))
    }

    assert lines == {
        "embed": ["4", "0", "equal"],
        "layers.0": ["51", "0", "51", "left", "only"],
        "layers.1": ["51", "0", "3", "rest", "equal"],
        "head": ["2", "1", "unknown"],
    }


def test_guesses_beside_a_certain_cause_are_left_out():
    """They are still in JSON; a cause of another divergence stays, and so does a likely one."""
    certain = Cause("op-args", "certain", "eps differs", (), "")
    guess = Cause("kernel", "possible", "computes something else", (), "")
    likely = Cause("rng", "likely", "other draws", (), "")
    first = divergence(cause=certain)
    elsewhere = divergence(module="head", cause=guess)

    alone = diagnosis("diverged", first, causes=(certain, likely, guess))
    two = diagnosis("diverged", first, causes=(certain, guess), origins=(first, elsewhere))

    assert [c.slug for c in card.other_causes(alone)] == ["rng"]
    assert [c.slug for c in card.other_causes(two)] == ["kernel"]


def test_a_module_that_is_a_mere_number_gets_a_word():
    """ "in 1" reads like a misprint."""
    assert [words.scope(path) for path in ("", "1", "layers.1")] == [
        "the root module",
        "module 1",
        "layers.1",
    ]
