"""The recorder as a program uses it: its life, its marks, scopes and pauses, and what it refuses."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from recordings import recording
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode

import opdrift
from opdrift import recorder as recorder_module
from opdrift.errors import InvalidOptionError, RecorderStateError, TraceExistsError
from opdrift.plugins import RecorderLike
from opdrift.values import Values


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


# ---- life --------------------------------------------------------------------------------------------


def test_ops_outside_the_block_are_not_recorded():
    torch.ones(2)
    with recording() as found:
        torch.zeros(2)
    torch.ones(2)

    assert [op.name for op in found.ops] == ["aten.zeros.default"]


def test_a_block_without_ops_is_a_whole_trace():
    with recording() as found:
        pass

    assert found.trace.complete


def test_a_label_may_be_any_text(path: Path):
    with opdrift.record(path, label="d\u00e9j\u00e0 vu \u2603"):
        pass

    assert opdrift.load(path).header.label == "d\u00e9j\u00e0 vu \u2603"


def test_a_path_may_be_any_text(tmp_path: Path):
    with opdrift.record(tmp_path / "d\u00e9j\u00e0 vu \u2603"):
        torch.ones(2)

    assert len(opdrift.load(tmp_path / "d\u00e9j\u00e0 vu \u2603").ops) == 1


def test_a_recorder_records_once(path: Path):
    recorder = opdrift.record(path)
    with recorder:
        pass

    with pytest.raises(RecorderStateError, match="records once"), recorder:
        pass


def test_an_error_of_the_program_is_in_the_trace(path: Path):
    with pytest.raises(KeyError), opdrift.record(path):
        raise KeyError("mine")

    footer = opdrift.load(path).footer
    assert footer is not None
    assert (footer.ended, footer.exception) == ("raised", "KeyError: 'mine'")


def test_the_line_of_an_error_is_the_innermost_of_the_program(path: Path):
    """What a library does below it is not the program's."""

    def multiply() -> None:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(2, 4))

    with pytest.raises(RuntimeError), opdrift.record(path):
        multiply()

    footer = opdrift.load(path).footer
    assert footer is not None
    assert footer.raised_at is not None
    line = multiply.__code__.co_firstlineno + 1
    assert footer.raised_at.startswith(f"{__file__}:{line} in test_the_line_of_an_error")


# ---- an error while opening ------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Opening fails at its last step."""

    class PlantedError(Exception):
        pass

    def fail(self: object) -> None:
        raise PlantedError

    monkeypatch.setattr(recorder_module.RecordingMode, "__enter__", fail)
    return PlantedError


def test_after_an_error_while_opening_the_path_is_free_again(
    path: Path, broken: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(broken), opdrift.record(path):
        pass
    monkeypatch.undo()

    with opdrift.record(path):
        torch.ones(2)
    assert len(opdrift.load(path).ops) == 1


@pytest.mark.parametrize(
    "state",
    [
        lambda: list(sys.meta_path),
        lambda: list(warnings.filters),
        lambda: dict(torch_modules._global_forward_hooks),
        lambda: dict(torch_modules._global_forward_pre_hooks),
        lambda: torch._C._len_torch_dispatch_stack(),
        lambda: torch_modules._has_any_global_hook,
    ],
    ids=["importers", "warnings", "hooks", "pre-hooks", "modes", "torch's question"],
)
def test_after_an_error_while_opening_nothing_is_attached(
    state: Callable[[], object], path: Path, broken: type[Exception]
):
    before = state()
    with pytest.raises(broken), opdrift.record(path):
        pass

    assert state() == before


def test_after_an_error_while_opening_the_watchdog_ends(path: Path, broken: type[Exception]):
    before = set(threading.enumerate())
    recorder = opdrift.record(path)
    with pytest.raises(broken), recorder:
        pass
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)

    assert set(threading.enumerate()) <= before


def test_an_engine_that_cannot_be_had_makes_no_folder(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPDRIFT_FINGERPRINT", "abacus")
    with pytest.raises(InvalidOptionError, match="abacus"), opdrift.record(path):
        pass

    assert not path.exists()


def test_a_recorder_that_could_not_be_opened_is_not_open(path: Path, broken: type[Exception]):
    recorder = opdrift.record(path)
    with pytest.raises(broken), recorder:
        pass

    with pytest.raises(RecorderStateError):
        recorder.mark("step")


# ---- paths that are taken ---------------------------------------------------------------------------------


def test_a_trace_that_is_being_recorded_is_not_replaced(path: Path):
    with (
        opdrift.record(path),
        pytest.raises(TraceExistsError, match="being recorded"),
        opdrift.record(path, overwrite=True),
    ):
        pass

    assert opdrift.load(path).complete


def test_a_trace_that_was_closed_may_be_replaced(path: Path):
    for _ in range(2):
        with opdrift.record(path, overwrite=True):
            torch.ones(2)

    assert len(opdrift.load(path).ops) == 1


# ---- ranks --------------------------------------------------------------------------------------------------


def announce(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """As torchrun does."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_each_rank_has_a_folder_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch):
    for rank in (0, 1):
        announce(monkeypatch, rank, 2)
        with opdrift.record(path):
            torch.ones(2)

    assert sorted(folder.name for folder in path.iterdir()) == ["rank-00000", "rank-00001"]
    assert opdrift.load(path, rank=1).header.rank == 1  # type: ignore[call-arg]


def test_a_launch_of_one_process_has_no_ranks(path: Path, monkeypatch: pytest.MonkeyPatch):
    announce(monkeypatch, 0, 1)
    with opdrift.record(path):
        torch.ones(2)

    assert opdrift.load(path).header.rank is None


def test_a_rank_is_not_added_to_the_trace_of_one_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    with opdrift.record(path):
        pass
    announce(monkeypatch, 1, 2)

    with pytest.raises(TraceExistsError, match="one process"), opdrift.record(path):
        pass


# ---- marks ----------------------------------------------------------------------------------------------------


def test_a_mark_stands_after_the_op_before_it():
    with recording() as found:
        torch.ones(2)
        found.recorder.mark("step", step=3)
        torch.ones(2)

    (mark,) = found.trace.marks
    assert (mark.kind, mark.seq, mark.fields) == ("step", 1, {"step": 3})


def test_numbers_that_json_has_no_word_for_become_text():
    with recording() as found:
        found.recorder.mark("step", loss=float("nan"), all=[float("inf"), 1.5])

    assert found.trace.marks[0].fields == {"loss": "nan", "all": ["inf", 1.5]}


def test_fields_may_have_any_name():
    with recording() as found:
        found.recorder.mark("step", kind="warm-up", self=1)

    assert found.trace.marks[0].fields == {"kind": "warm-up", "self": 1}


def test_a_mark_with_a_tensor_says_what_to_use_instead():
    with recording() as found, pytest.raises(InvalidOptionError, match="Use numbers"):
        found.recorder.mark("step", loss=torch.ones(2))


@pytest.mark.parametrize("kind", [3, "", None])
def test_the_kind_of_a_mark_is_text(kind: object):
    with recording() as found, pytest.raises(InvalidOptionError, match="text"):
        found.recorder.mark(kind)  # type: ignore[arg-type]


def test_a_mark_that_was_refused_spoils_no_other():
    with recording() as found:
        found.recorder.mark("first")
        with pytest.raises(InvalidOptionError):
            found.recorder.mark(3)  # type: ignore[arg-type]

    assert [mark.kind for mark in found.trace.marks] == ["first"]


def test_marks_of_one_form_share_fields():
    with recording() as found:
        write = found.recorder.form("shelf", {"title": "a \u2713", "nothing": None})
        write(number=1)
        write(number=2.5, size=float("inf"))
        write()
        with pytest.raises(InvalidOptionError, match="was given title again"):
            write(title="b")
        found.recorder.form("bare", {})(number=3)

    shared = {"title": "a \u2713", "nothing": None}
    assert [(mark.kind, mark.fields) for mark in found.trace.marks] == [
        ("shelf", {**shared, "number": 1}),
        ("shelf", {**shared, "number": 2.5, "size": "inf"}),
        ("shelf", shared),
        ("bare", {"number": 3}),
    ]


def test_fields_that_are_made_late_are_made_once_and_in_the_trace():
    made: list[int] = []

    def rest() -> dict[str, Any]:
        made.append(1)
        return {"bytes": float("nan"), "own": [1, 2]}

    with recording() as found:
        write = found.recorder.form("shelf", {"title": "a"}, rest)
        write(number=1)
        assert made == []
        write(number=2, wrong=[{"at": 3}])

    late = {"title": "a", "bytes": "nan", "own": [1, 2]}
    assert made == [1]
    assert [mark.fields for mark in found.trace.marks] == [
        {**late, "number": 1},
        {**late, "number": 2, "wrong": [{"at": 3}]},
    ]


def test_fields_that_cannot_be_made_are_a_failure_of_the_tracer(
    path: Path, caplog: pytest.LogCaptureFixture
):
    """The mark is there with what is known; the other marks are whole."""

    def rest() -> dict[str, Any]:
        raise KeyError("shelf 3")

    with opdrift.record(path, integrations=()) as recorder:
        recorder.form("shelf", {"title": "a"}, rest)(number=1)
        recorder.mark("after")

    trace = opdrift.load(path)
    assert [(m.kind, m.fields) for m in trace.marks] == [("shelf", {"title": "a"}), ("after", {})]
    assert "shelf 3" in str(trace.footer)
    assert "shelf 3" in caplog.text


def test_whoever_is_told_of_marks_is_told_of_those_of_a_form():
    class Told:
        name = "told"
        library = "torch"
        marks: ClassVar[list[Any]] = []

        def attach(self, recorder: RecorderLike) -> AbstractContextManager[None]:
            return nullcontext()

        def marked(self, kind: str, fields: Mapping[str, Any]) -> None:
            self.marks.append((kind, dict(fields)))

    told = Told()
    with recording(integrations=[told]) as found:
        found.recorder.form("shelf", {"title": "a"})(number=1)
        found.recorder.form("shelf", {"title": "a"}, lambda: {"own": [1]})(number=2)

    assert told.marks == [
        ("shelf", {"title": "a", "number": 1}),
        ("shelf", {"title": "a", "number": 2, "own": [1]}),
    ]


def test_a_form_that_outlives_its_recorder_says_so():
    with recording() as found:
        write = found.recorder.form("shelf", {})

    with pytest.raises(RecorderStateError, match="not open"):
        write()


def test_a_content_that_was_read_just_now_is_named_by_the_fingerprint_that_its_op_left(
    monkeypatch: pytest.MonkeyPatch,
):
    """In another layout, too; a part of it, and what nothing fingerprinted, are read."""
    read: list[tuple[int, ...]] = []
    fingerprint = Values.fingerprint

    def counted(values: Values, t: Any, tensor: torch.Tensor, *rest: Any, **more: Any) -> bool:
        read.append(tuple(tensor.shape))
        return fingerprint(values, t, tensor, *rest, **more)

    with recording() as found:
        made = torch.linspace(0, 1, 5000) * 2
        digest = found.recorder.digest(made)
        elsewhere = torch.linspace(0, 1, 7)
        monkeypatch.setattr(Values, "fingerprint", counted)
        found.recorder.name_tensors(
            [
                (made.view(50, 100), "whole", digest),
                (made.view(50, 100)[:25], "part", digest),
                (elsewhere, "other", found.recorder.digest(elsewhere)),
            ]
        )
        monkeypatch.undo()

    trace = found.trace
    named = {leaf.name: trace.fingerprint(leaf.value) for leaf in trace.leaves if leaf.name}
    first = trace.fingerprint(trace.op(1).outputs[0])
    assert (25, 100) in read
    assert (50, 100) not in read
    assert first is not None
    assert digest is not None
    for name in ("whole", "part", "other"):
        assert named[name] is not None
    whole, part = named["whole"], named["part"]
    assert (whole.key, whole.ssq, whole.sample.tolist()) == (
        first.key,
        first.ssq,
        first.sample.tolist(),
    )
    assert whole.key == (digest.raw, 5000, digest.code)
    assert part.n == 2500


def test_naming_says_what_was_read_for_it():
    """Of memory that is new, and of a parameter that an op has just made; not of what is known longer."""
    with recording() as found:
        made = nn.Parameter(torch.ones(3) * 2)
        digests = [found.recorder.name_tensor(made, "made"), found.recorder.digest(made)]
        with found.recorder.pause():
            new = torch.linspace(0, 1, 5)
        digests += [found.recorder.name_tensor(new, "new"), found.recorder.digest(new)]
        assert found.recorder.name_tensor(made, "made") is None
        assert found.recorder.name_tensor(new, "again") is None

    assert None not in digests
    assert digests[0] == digests[1]
    assert digests[2] == digests[3]


def test_a_number_that_went_into_the_program_is_a_mark():
    with recording() as found:
        torch.full((1,), 2.5).item()

    assert [(mark.kind, mark.fields) for mark in found.trace.marks] == [("scalar", {"value": 2.5})]


def test_a_setting_that_changes_is_a_mark():
    model = nn.Linear(2, 2)
    with recording(model=model) as found, torch.no_grad():
        model(torch.ones(1, 2))

    flags = [mark.fields for mark in found.trace.marks if mark.kind == "flags"]
    assert flags[0]["grad_mode"] == [True, False]


# ---- what needs an open recorder ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda recorder: recorder.mark("step"),
        lambda recorder: recorder.form("step", {}),
        lambda recorder: recorder.scope("loss"),
        lambda recorder: recorder.pause(),
        lambda recorder: recorder.quiet(),
        lambda recorder: recorder.name_tensor(torch.ones(2), "x"),
        lambda recorder: recorder.digest(torch.ones(2)),
        lambda recorder: recorder.digests([(torch.ones(2), (1, 1))]),
        lambda recorder: recorder.cast_digests([(torch.ones(2), (2,))], torch.bfloat16),
        lambda recorder: recorder.digests_left([(torch.ones(2), (2,))]),
        lambda recorder: recorder.versions([torch.ones(2)]),
        lambda recorder: recorder.name_tensors([(torch.ones(2), "x", None)]),
        lambda recorder: recorder.clean_path(nn.Linear(1, 1)),
    ],
    ids=[
        "mark",
        "form",
        "scope",
        "pause",
        "quiet",
        "name_tensor",
        "digest",
        "digests",
        "cast_digests",
        "digests_left",
        "versions",
        "name_tensors",
        "clean_path",
    ],
)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_recorder_that_is_not_open_says_so(
    call: Callable[[opdrift.Recorder], object], moment: str, path: Path
):
    recorder = opdrift.record(path)
    if moment == "after":
        with recorder:
            pass

    with pytest.raises(RecorderStateError, match="not open"):
        call(recorder)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda recorder: recorder.name_tensor(3, "x"), "no tensor"),
        (lambda recorder: recorder.name_tensor(torch.ones(2), 3), "text"),
        (lambda recorder: recorder.name_tensor(torch.ones(2), "x", kind="weight"), "choose one of"),
        (lambda recorder: recorder.name_tensors([], kind="weight"), "choose one of"),
        (lambda recorder: recorder.digest([1.0]), "no tensor"),
        (
            lambda recorder: recorder.writes(torch.eye(2).to_sparse()),
            "layout torch.sparse_coo, which has no storage",
        ),
        (lambda recorder: recorder.digests([([1.0], (1,))]), "no tensor"),
        (lambda recorder: recorder.digests([(torch.ones(3), (2, 2))]), "2, 2 elements of .* 3"),
        (lambda recorder: recorder.scope(""), "text"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[opdrift.Recorder], object], words: str):
    with recording() as found, pytest.raises(InvalidOptionError, match=words):
        call(found.recorder)


# ---- pauses --------------------------------------------------------------------------------------------------


def test_ops_in_a_pause_run_and_are_not_recorded():
    with recording() as found:
        with found.recorder.pause():
            x = torch.ones(2)
        x * 2

    assert [op.name for op in found.ops] == ["aten.mul.Tensor"]
    assert found.read("mul.Tensor") == [[1.0, 1.0]]


def test_pauses_may_be_nested():
    with recording() as found:
        with found.recorder.pause():
            with found.recorder.pause():
                pass
            torch.ones(2)
        torch.zeros(2)

    assert [op.name for op in found.ops] == ["aten.zeros.default"]


def test_a_pause_ends_with_an_error():
    with recording() as found:
        with pytest.raises(KeyError), found.recorder.pause():
            raise KeyError
        torch.zeros(2)

    assert len(found.ops) == 1


def test_a_write_in_a_pause_is_seen_later_as_a_hidden_one():
    weight = torch.ones(2)
    with recording(inputs={"weight": weight}) as found:
        with found.recorder.pause():
            weight.fill_(3.0)
        weight * 2

    assert [finding.name for finding in found.findings] == ["weight"]


def test_modules_in_a_pause_leave_the_scope_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2))
    with recording(model=model) as found:
        with found.recorder.pause():
            model(torch.ones(1, 2))
        torch.ones(2) * 2

    assert found.op("mul.Tensor").call.id == 0


# ---- digests and paths ------------------------------------------------------------------------------------------


def test_equal_contents_have_equal_digests():
    with recording() as found:
        digests = {found.recorder.digest(x) for x in (torch.ones(2, 3), torch.ones(3, 2).t())}

    assert len(digests) == 1


def test_a_content_that_cannot_be_read_has_no_digest():
    with recording() as found:
        assert found.recorder.digest(torch.ones(2, device="meta")) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10.0),
        torch.arange(10.0).reshape(2, 5).t(),
        torch.arange(10.0).to(torch.float8_e5m2),
        torch.arange(20.0).reshape(10, 2).view(torch.complex64).reshape(10),
        torch.arange(10.0).conj_physical().neg(),
    ],
    ids=["plain", "transposed", "fp8", "complex", "computed"],
)
def test_stretches_of_a_tensor_have_the_digests_that_they_have_alone(tensor: torch.Tensor):
    """Stretches are cut in row-major order, whatever the layout; what follows the last one is left out."""
    with recording() as found:
        together = found.recorder.digests([(tensor, (3, 0, 6))])
        flat = tensor.reshape(-1)
        alone = [found.recorder.digest(flat[a:b]) for a, b in ((0, 3), (3, 3), (3, 9))]

    assert together == alone


def test_stretches_of_a_content_that_cannot_be_read_have_no_digests():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)

    with recording() as found:
        digests = found.recorder.digests([(freed, (1, 3)), (torch.ones(1), (1,))])

    assert digests[:2] == [None, None]
    assert digests[2] is not None


def odd_tensors() -> list[torch.Tensor]:
    """Tensors that cannot be read where they lie, or not at all."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    return [
        torch.ones(4, device="meta"),
        freed,
        torch.arange(8.0)[::2],
        torch.view_as_complex(torch.arange(8.0).view(4, 2)),
        torch._neg_view(torch.arange(4.0)),
        torch._efficientzerotensor((4,)),
        torch.nn.Parameter(torch.arange(4.0)),
        torch.empty(4, 0),
    ]


def test_tensors_that_need_care_are_read_between_those_that_do_not():
    """All plain ones are read in one call; the others keep their places, with the digests that they have alone."""
    plain = torch.arange(5.0)
    odd = odd_tensors()

    with recording() as found:
        contents = [
            each for tensor in odd for each in ((plain, (2, 3)), (tensor, (tensor.numel(),)))
        ]
        together = found.recorder.digests(contents)
        alone = [found.recorder.digest(tensor) for tensor in odd]

    assert together[2::3] == alone
    assert together[:2] * len(odd) == [each for i, each in enumerate(together) if i % 3 < 2]
    assert [digest is None for digest in alone] == [True, True] + [False] * 6


def test_what_an_op_left_in_a_leaf_is_known_without_reading_it():
    """In whatever shape it is asked for; not what has changed it since without an op, and not a part of it."""
    with recording() as found, torch.no_grad():
        weight = nn.Parameter(torch.ones(4, 6))
        found.recorder.name_tensor(weight, "weight")
        weight.mul_(3)
        left = found.recorder.digest(weight)
        ctypes.c_float.from_address(weight.data_ptr()).value = 7.0
        flat = weight.detach().view(-1)
        known = found.recorder.digests_left([(flat, (24,)), (weight, (24,))])
        unknown = [
            found.recorder.digests_left([(flat[:12], (12,))]),
            found.recorder.digests_left([(flat, (12, 12))]),
            found.recorder.digests_left([(weight.t(), (24,))]),
            found.recorder.digests_left([(flat, (24,)), (torch.ones(3), (3,))]),
        ]
        weight[0].mul_(2)
        unknown.append(found.recorder.digests_left([(flat, (24,))]))

    assert known == [left, left]
    assert unknown == [None] * 5


def test_versions_tell_storages_and_their_writes():
    with recording() as found:
        one, other = torch.ones(2), torch.ones(2)
        with found.recorder.pause():
            unknown = [torch.ones(2), torch.ones(2)]
        before = found.recorder.versions([one, one[1:], other, *unknown])
        one.add_(1)
        after = found.recorder.versions([one, other])

    assert before[0] == before[1]
    assert len(set(before)) == 4
    assert after == [(before[0][0], before[0][1] + 1), before[2]]


def test_no_mode_sees_what_is_done_quietly():
    """The recorder does not record it, and a mode of the program does not meet it either."""
    seen: list[str] = []

    class Witness(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Witness(), recording() as found:
        x = torch.ones(2, requires_grad=True)
        seen.clear()
        with found.recorder.quiet():
            y = x * 2

    assert (seen, y.requires_grad) == ([], False)
    assert [op.name for op in found.ops] == ["aten.ones.default"]


def test_a_digest_records_no_ops():
    x = torch.ones(2, 3).t()
    with recording() as found:
        found.recorder.digest(x)

    assert found.ops == []


def test_the_path_of_a_module_is_known_from_the_start():
    model = nn.Sequential(nn.Linear(2, 2))
    with recording(model=model) as found:
        assert found.recorder.clean_path(model[0]) == "0"
        assert found.recorder.clean_path(nn.Linear(1, 1)) is None


# ---- where it is used -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_a_recording_may_begin_in_any_mode(context: Callable[[], object]):
    model = nn.Linear(2, 2)
    with context(), recording(model=model) as found:  # type: ignore[attr-defined]
        model(torch.ones(1, 2))

    assert found.leaves("output")


def test_a_recording_may_be_inside_another():
    with recording() as outer:
        torch.ones(2)
        with recording() as inner:
            torch.zeros(2)

    assert [op.name for op in inner.ops] == ["aten.zeros.default"]
    assert [op.name for op in outer.ops] == ["aten.ones.default", "aten.zeros.default"]


def test_two_recordings_of_one_model_have_its_names():
    model = nn.Linear(2, 2)
    with recording(model=model) as outer, recording(model=model) as inner:
        model(torch.ones(1, 2))

    assert [leaf.name for leaf in inner.trace.leaves if leaf.when == "entry"] == ["weight", "bias"]
    assert outer.paths == inner.paths == [("", 0)]


def test_an_op_over_more_tensors_than_a_buffer_holds_is_recorded():
    with recording() as found:
        parts = [torch.zeros(1)] * 40_000
        torch.cat(parts)

    assert len(found.op("cat.default").inputs) == 40_000


def test_a_folder_that_only_looks_like_a_rank_is_none(tmp_path: Path):
    with opdrift.record(tmp_path / "rank-0abc"):
        pass

    with pytest.raises(opdrift.NotATraceError):
        opdrift.load(tmp_path)
