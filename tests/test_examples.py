"""Each example runs from anywhere, and its answers are the right ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opdrift
from opdrift.findings import findings
from opdrift.picks import Picks
from opdrift.records import Diagnosis

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.slow


def run(example: str, *arguments: str | Path, cwd: Path) -> str:
    """Run an example as a user does, from another directory; what it printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


class Story:
    """A story that was told: what it printed, and the traces it left."""

    def __init__(self, folder: Path, example: str, *arguments: str) -> None:
        self.traces = folder / "traces"
        self.printed = run(example, *arguments, "--keep", self.traces, cwd=folder)

    def diff(self, left: str, right: str, *, samples: str | None = None) -> Diagnosis:
        return opdrift.diff(self.traces / left, self.traces / right, samples=samples)


# ---- esm2_offload.py ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def esm2(request, tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp(f"esm2-{request.param}")
    return Story(folder, "esm2_offload.py", "--world-size", str(request.param))


def test_the_broken_flow_differs_in_its_weights_because_nothing_loaded_them(esm2):
    """facebookresearch/esm#297: drawn at random, never copied; offload and gathers are innocent."""
    found = esm2.diff("broken-1.trace", "broken-2.trace")

    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.kind, found.first.cause.slug) == ("leaf", "weights")
    assert found.first.cause.confidence == "certain"
    assert "39 of 62 tensors of the model differ before the first op" in found.first.cause.summary
    evidence = "\n".join(found.first.cause.evidence)
    assert "aten.uniform_.default" in evidence
    assert "from a generator that nobody seeded; none was copied from a checkpoint" in evidence
    assert "gathers checked, all intact" in evidence
    assert "load the third return value" in found.first.cause.try_
    assert len(found.origins) == 1


def test_two_ranks_gather_two_random_halves(esm2):
    """Each rank drew a model of its own and keeps a half of it; nothing of that is seen on one rank."""
    found = esm2.diff("broken-1.trace", "broken-2.trace")

    assert found.first is not None
    said = [line for line in found.first.cause.evidence if "random halves" in line]
    if len(found.ranks) < 2:
        assert said == []
        return
    (line,) = said
    assert line.startswith(
        "both: what was gathered are rank 0's and rank 1's random halves: rank 0 drew its part of"
    )
    traces = [opdrift.load(esm2.traces / "broken-1.trace", rank=rank) for rank in (0, 1)]
    for each in findings(traces):
        assert any("rank 0's and rank 1's random halves" in line for line in each.cause.evidence)


def test_the_fixed_flow_is_identical(esm2):
    found = esm2.diff("fixed-1.trace", "fixed-2.trace")

    assert (found.verdict, found.origins) == ("identical", ())


def test_the_fixed_flow_against_plain_float32_points_at_the_rotary_buffer(esm2):
    """fairscale's mixed precision casts inv_freq to half precision and keeps no original."""
    right = "fixed-1.trace" if (esm2.traces / "fixed-1.trace/header.json").exists() else None
    found = esm2.diff("plain.trace", right or "fixed-1.trace/rank-00000")

    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.name == "layers.0.self_attn.rot_emb.inv_freq"
    assert found.first.members == tuple(
        f"layers.{layer}.self_attn.rot_emb.inv_freq" for layer in (1, 2)
    )
    assert found.first.cause.slug == "dtype"
    assert "for good" in "\n".join(found.first.cause.evidence)
    assert {(a.op, a.module.rpartition(".")[2]) for a in found.amplifiers} >= {
        ("aten.sin.default", "rot_emb")
    }


def test_the_story_says_it_in_words(esm2):
    words = " ".join(esm2.printed.split())  # long lines are wrapped where a terminal has a width

    assert "39 of 62 tensors of the model differ before the first op" in words
    assert " identical: " in words
    assert "layers.0.self_attn.rot_emb.inv_freq and 2 more differ" in words


def test_one_flow_can_be_run_by_itself(tmp_path):
    printed = run("esm2_offload.py", "--flow", "broken", "-o", "mine.trace", cwd=tmp_path)

    assert "embedding of protein1" in printed
    assert opdrift.load(tmp_path / "mine.trace").complete


# ---- minilm_attention.py, batch_size.py -----------------------------------------------------------------------------------


def test_fused_and_plain_attention_differ_by_rounding(tmp_path):
    """Real weights; different ops, same numbers but for the last digits: no false alarm."""
    story = Story(tmp_path, "minilm_attention.py")

    found = story.diff("sdpa.trace", "eager.trace")

    assert found.verdict == "rounding"
    assert found.first is not None
    assert found.first.kind == "structure"
    assert found.first.module == "encoder.layer.0.attention.self"
    assert found.first.op == "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert all(not origin.material for origin in found.origins)
    assert "rounding only" in story.printed


def test_a_batch_of_fifteen_gives_sample_0_the_same_logits_up_to_rounding(tmp_path):
    """Whether anything differs is the machine's choice of kernels; that it is rounding is not."""
    story = Story(tmp_path, "batch_size.py")

    found = story.diff("alone.trace", "batch.trace", samples="0:0")

    assert found.verdict in ("identical", "rounding")
    assert found.alignment.paired == 309
    assert "rounding only" in story.printed or "identical" in story.printed


# ---- fsdp2_offload.py ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offload(tmp_path_factory) -> Story:
    return Story(tmp_path_factory.mktemp("offload"), "fsdp2_offload.py")


def test_sharding_and_offload_change_no_bit(offload):
    """Two training steps and an inference over two ranks, against one process."""
    assert offload.diff("plain.trace", "offload.trace").verdict == "identical"


def test_bfloat16_is_named_at_the_first_op_that_computes_in_it(offload):
    found = offload.diff("plain.trace", "bfloat16.trace")

    assert found.first is not None
    assert (found.first.op, found.first.module) == (
        "aten.native_layer_norm.default",
        "layers.0.norm",
    )
    assert found.first.cause.summary == (
        "the right run computes in bfloat16 in layers.0.norm, the other does not"
    )
    # all ones: the cast changes the type, and nothing else
    same = (
        "layers.0.norm, already differs, as float32[15] against bfloat16[15] with the same numbers"
    )
    assert same in " ".join(offload.printed.split())


def test_clipping_gathered_weights_is_named_with_its_line(offload):
    traces = [opdrift.load(offload.traces / "clipped.trace", rank=rank) for rank in (0, 1)]

    (found,) = findings(traces)  # both ranks do it: told once

    assert (found.kind, found.rank, found.name, found.step) == (
        "gather",
        0,
        "layers.0.fc1.weight",
        0,
    )
    assert "and 2 more were changed while they were gathered" in found.cause.summary
    assert "aten.clamp_.default" in found.cause.evidence[0]
    assert "fsdp2_offload.py" in found.cause.evidence[0]
    assert found.cause.evidence[-1] == "the same on rank 1"
    assert "1 finding\n" in offload.printed


# ---- attention_backend.py ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backends(tmp_path_factory) -> Story:
    return Story(tmp_path_factory.mktemp("backends"), "attention_backend.py")


@pytest.mark.parametrize(
    ("way", "backend", "why"),
    [
        ("plain", "FLASH_ATTENTION", None),
        ("learned-bias", "MATH", "attn_mask requires grad"),
        ("dropout", "MATH", "dropout_p is 0.1, above 0"),
        ("small-values", "MATH", "head sizes differ: 16, 16 and 8 (query, key, value)"),
        ("bfloat16", "FLASH_ATTENTION", None),
    ],
)
def test_each_way_takes_its_backend_for_its_reason(backends, way, backend, why):
    """The mask, the dropout and the head sizes move it; the type moves the products' library."""
    trace = opdrift.load(backends.traces / f"{way}.trace")
    picks = Picks(trace).among(range(len(trace.ops))).values()

    (attention,) = [p for p in picks if p.backend is not None]
    assert attention.backend == backend
    assert dict(attention.refused) == ({} if why is None else {"FLASH_ATTENTION": why})
    assert why is None or why in " ".join(backends.printed.split())
    if torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        products = {p.library for p in picks if p.backend is None}
        assert products == {"oneDNN" if way == "bfloat16" else "MKL"}


def test_the_argument_that_changed_the_backend_is_named(backends):
    """A learned bias is refused by the fused kernel; the result is the same up to rounding."""
    found = backends.diff("plain.trace", "learned-bias.trace")

    assert found.verdict == "rounding"
    assert found.first is not None
    assert "left ran FLASH_ATTENTION; right ran MATH because attn_mask requires grad" in (
        found.first.cause.summary
    )
    assert any(
        "what changed the pick: attn_mask" in each and "requires grad" in each
        for each in found.first.cause.evidence
    )
    assert "sdpa_kernel" in found.first.cause.try_


def test_dropout_is_the_cause_and_the_other_backend_stands_beside_it(backends):
    found = backends.diff("plain.trace", "dropout.trace")

    assert found.first is not None
    assert [c.slug for c in found.causes[:2]] == ["dropout", "kernel"]
    assert "right ran MATH because dropout_p is 0.1" in found.causes[1].summary
    assert "what changed the pick: dropout_p: 0 against 0.1" in found.causes[1].evidence


def test_nothing_is_left_behind(tmp_path):
    """Without --keep, the traces and the checkpoint go."""
    run("minilm_attention.py", cwd=tmp_path)

    assert list(tmp_path.iterdir()) == []
