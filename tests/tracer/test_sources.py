"""Which line of the program an op came from."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from recordings import recording
from torch import nn

from opdrift.sources import Sources, _is_library


def here() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def sources() -> tuple[Sources, dict[int, str]]:
    texts: dict[int, str] = {}
    return Sources(lambda _, ident, text: texts.__setitem__(ident, text)), texts


def test_an_op_comes_from_the_line_that_called_it():
    with recording() as found:
        line = here() + 1
        torch.ones(2) * 2

    source = found.op("mul.Tensor").source
    assert source is not None
    assert (source.file, source.line) == (__file__, line)


def test_an_op_inside_a_library_module_comes_from_the_call_of_the_module():
    model = nn.Linear(2, 2)
    with recording(model=model) as found:
        line = here() + 1
        model(torch.ones(1, 2))

    source = found.op("addmm.default").source
    assert source is not None
    assert source.line == line


def test_an_op_inside_a_module_of_the_program_comes_from_its_forward():
    class Doubling(nn.Module):
        def forward(self, x):
            self.line = here() + 1
            return x * 2

    model = Doubling()
    with recording(model=model) as found:
        model(torch.ones(2))

    source = found.op("mul.Tensor").source
    assert source is not None
    assert (source.line, source.function.rpartition(".")[2]) == (model.line, "forward")


def test_an_op_of_backward_comes_from_the_line_that_began_it():
    with recording() as found:
        x = torch.ones(2, requires_grad=True)
        y = x.sin().sum()
        line = here() + 1
        y.backward()

    source = found.op("cos.default").source
    assert source is not None
    assert source.line == line


def test_a_hook_of_the_program_is_the_source_of_its_ops():
    with recording() as found:
        x = torch.ones(2, requires_grad=True)

        def double(gradient):
            double.line = here() + 1
            return gradient * 2

        x.register_hook(double)
        x.sum().backward()

    source = found.op("mul.Tensor").source
    assert source is not None
    assert source.line == double.line


def test_code_of_equal_text_in_two_files_is_told_apart():
    """Code objects compare equal if only their file names differ."""
    frames: list[FrameType] = []
    spaces = {"note": lambda: frames.append(sys._getframe(1))}
    for name in ("one.py", "two.py"):
        exec(compile("def f():\n    note()\nf()", name, "exec"), dict(spaces))
    found, texts = sources()

    files = [texts[found.find(frame, 0)] for frame in frames]

    assert ["one.py" in files[0], "two.py" in files[1]] == [True, True]


def test_the_same_line_has_one_id():
    found, texts = sources()
    for _ in range(3):
        found.find(sys._getframe(), 0)

    assert len(texts) == 1


#: The name of a file that inductor writes: its key, in a folder of two letters of the key.
KEY = "cxoofmlzuyn5w7cxu5og3k7hhkdpczr4y5kxvuj73axqvy2nz2q3"


@pytest.mark.parametrize(
    ("path", "generated"),
    [
        ("/x/torchinductor_me/ab/cd.py", True),
        (f"/scratch/my-cache/xo/{KEY}.py", True),  # TORCHINDUCTOR_CACHE_DIR=/scratch/my-cache
        (f"/scratch/my-cache/ab/{KEY}.py", False),
        ("/scratch/my-cache/train.py", False),
    ],
)
def test_code_that_torch_compile_generated_is_passed_over_and_noticed(path: str, generated: bool):
    """In whichever folder inductor was told to keep it; a program in the same folder is one."""
    found, texts = sources()
    space = {"find": lambda: found.find(sys._getframe(1), 0)}
    exec(compile("ident = find()", path, "exec"), space)

    assert found.passed_compiled == generated
    assert (__file__ if generated else path).rpartition("/")[2] in texts[space["ident"]]


def test_code_that_a_program_makes_as_it_runs_is_forgotten_again():
    found, _ = sources()
    space = {"find": lambda: found.find(sys._getframe(1), 0)}
    found.codes.update({-number: None for number in range(65536)})  # type: ignore[misc]
    exec(compile("find()", "new.py", "exec"), space)

    assert len(found.codes) < 10


def test_libraries_are_torch_and_opdrift_and_nothing_of_the_program():
    assert _is_library(torch.__file__)
    assert _is_library(sys.modules["opdrift.mode"].__file__ or "")
    assert not _is_library(__file__)
