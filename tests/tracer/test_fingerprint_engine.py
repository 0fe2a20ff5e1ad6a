"""Which engine is picked, what it refuses to read, and that nothing notices when it reads."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opdrift.errors import InvalidOptionError
from opdrift.fingerprint import ENGINES, Engine, can_fingerprint, compiled, load_engine, plain

FOLDER = Path(compiled.__file__).parent
needs_library = pytest.mark.skipif(
    not (FOLDER / "_tfp1_baseline.so").exists(), reason="installed without a C compiler"
)


def engine_called(name: str) -> Engine | None:
    """The engine, or None where it cannot be had."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPDRIFT_FINGERPRINT", name)
        try:
            return load_engine()
        except InvalidOptionError:
            return None


# -- what must not be read, and what must not be disturbed -----------------------------------------


def freed() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short() -> torch.Tensor:
    tensor = torch.ones(10, 10).t()[:, 5:]
    tensor.untyped_storage().resize_(4 * 99)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


UNREADABLE = {
    "freed": (freed, "freed"),
    "cut short": (cut_short, "freed"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "fake": (fake, "fake"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "NestedTensor",
    ),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(2)), "functional"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_tensor_without_readable_memory_is_refused(case):
    """The reason is told beforehand, and the same one is raised; reading would end the process."""
    make, word = UNREADABLE[case]
    tensor = make()

    assert word in can_fingerprint(tensor)
    with pytest.raises(InvalidOptionError, match=word):
        load_engine().fingerprint(tensor)


def test_a_tensor_inside_vmap_is_refused():
    """Its wrapper has a shape, but the memory belongs to the whole batch."""
    reasons = []
    torch.vmap(lambda x: reasons.append(can_fingerprint(x)) or x)(torch.ones(3, 2))

    assert "functorch" in reasons[0]


def test_views_into_enough_memory_are_read():
    """A storage longer than the view, an expanded one and an empty one are no freed ones."""
    base = torch.ones(100)
    for view in (
        base[90:],
        base[:1].expand(1000),
        base[:0],
        torch.empty(0),
        base.view(10, 10)[::3].t(),
    ):
        assert can_fingerprint(view) is None


class DispatchWitness(TorchDispatchMode):
    """Notes the ops that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class FunctionWitness(TorchFunctionMode):
    """Notes the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("witness", [DispatchWitness, FunctionWitness])
def test_no_mode_and_no_graph_sees_the_fingerprint(witness):
    """Even a layout that must be copied runs nothing that a recorder or autograd could notice."""
    engine = load_engine()
    parameter = torch.nn.Parameter(torch.randn(30, 40))
    conjugate = torch.randn(8, dtype=torch.complex64).conj()
    tensors = [parameter, parameter.t(), conjugate, torch.ones(3).to(torch.uint32)]
    versions = [tensor._version for tensor in tensors]
    with witness() as mode:
        for tensor in tensors:
            engine.can_fingerprint(tensor)
            plain(tensor)

    assert mode.seen == []
    assert [tensor._version for tensor in tensors] == versions
    assert parameter.grad is None
    assert not plain(parameter.t()).requires_grad


class Loud(torch.Tensor):
    """A subclass that keeps its own memory and refuses every function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"called {func}")


def test_a_subclass_is_read_without_being_called():
    """Its own functions could record, raise or compute something else."""
    engine = load_engine()
    tensor = torch.randn(4, 5).t()

    assert engine.fingerprint(tensor.as_subclass(Loud))["raw"] == engine.fingerprint(tensor)["raw"]


# -- which engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.linspace(-1, 1, 12).view(3, 4).t(),
        torch.arange(5),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.linspace(-1, 1, 8).to(torch.float8_e5m2),
        torch.tensor([True, False]),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float64),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_digest_alone_is_that_of_the_whole_fingerprint(tensor):
    row = load_engine().fingerprint(tensor)

    assert load_engine().digest(tensor) == (int(row["raw"]), int(row["n"]), int(row["code"]))


@pytest.fixture
def no_library(tmp_path, monkeypatch):
    """An installation that was built without a compiler."""
    monkeypatch.delenv("OPDRIFT_FINGERPRINT", raising=False)
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    compiled._checked.cache_clear()
    compiled._open.cache_clear()
    yield tmp_path
    compiled._checked.cache_clear()
    compiled._open.cache_clear()


def test_without_a_compiled_library_numpy_writes_the_same_digest(no_library):
    """The fallback is picked, and its name says why."""
    engine = load_engine()

    assert engine.name == "numpy (no compiled library)"
    assert engine.fingerprint(torch.arange(8, dtype=torch.float32))["raw"] == 0x15599BA5A616DD0F


@needs_library
def test_a_library_of_another_version_is_not_used(no_library):
    """An editable checkout can move on without being built again."""
    library = FOLDER / "_tfp1_baseline.so"
    (no_library / library.name).write_bytes(library.read_bytes())
    (no_library / "_tfp1.c").write_text("/* another version */")

    assert (
        load_engine().name
        == "numpy (the compiled library is from another version: install opdrift again)"
    )


def test_a_file_that_is_no_library_is_not_used(no_library):
    """A damaged installation records slowly rather than not at all."""
    (no_library / "_tfp1_baseline.so").write_text("damaged")

    assert load_engine().name.startswith("numpy (the compiled library does not load:")


def test_the_fastest_engine_that_runs_here_is_the_default(monkeypatch):
    """Unset, the variable means the first engine of the list that this machine has."""
    fastest = next(engine.name for engine in map(engine_called, ENGINES) if engine is not None)
    monkeypatch.delenv("OPDRIFT_FINGERPRINT", raising=False)

    assert load_engine().name == fastest.replace("OPDRIFT_FINGERPRINT=numpy", "no compiled library")


@needs_library
def test_a_build_that_was_not_compiled_is_passed_over(no_library, monkeypatch):
    """An old compiler may know no AVX-512; the next fastest build is used."""
    for file in (*FOLDER.glob("_tfp1*.[ch]"), FOLDER / "_tfp1_baseline.so"):
        (no_library / file.name).write_bytes(file.read_bytes())

    assert load_engine().name == "C (baseline)"
    monkeypatch.setenv("OPDRIFT_FINGERPRINT", "avx2")
    with pytest.raises(InvalidOptionError, match="asks for 'avx2'"):
        load_engine()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("fast", "can be avx512ifma, avx512, avx2"), ("baseline", "no compiled library")],
)
def test_an_engine_that_cannot_be_had_is_an_error(no_library, monkeypatch, wanted, words):
    """Whoever asks for one by name must not get another."""
    monkeypatch.setenv("OPDRIFT_FINGERPRINT", wanted)

    with pytest.raises(InvalidOptionError, match=words):
        load_engine()


def test_engines_share_nothing_that_changes():
    """Two recorders must not mix: each engine has its own table of kinds."""
    first, second = load_engine(), load_engine()
    first.kinds.clear()

    assert second.kinds == load_engine().kinds != {}


# -- the build -------------------------------------------------------------------------------------


@pytest.fixture
def build():
    """The build hook of this checkout, loaded from its file."""
    pytest.importorskip("hatchling")
    path = Path(__file__).parents[2] / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hatch_build"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["hatch_build"]


def test_a_build_without_a_compiler_says_so_and_leaves_no_old_library(build, tmp_path, monkeypatch):
    """Neither a missing compiler, nor a broken one, nor OPDRIFT_NO_COMPILE leaves a stale library behind."""
    source = FOLDER / "_tfp1.c"
    monkeypatch.delenv("OPDRIFT_NO_COMPILE", raising=False)
    for name, value, words in (
        ("CC", "no-such-compiler", "no C compiler 'no-such-compiler'"),
        ("CC", "false", "exit status 1"),
        ("OPDRIFT_NO_COMPILE", "1", "OPDRIFT_NO_COMPILE is set"),
    ):
        (tmp_path / "_tfp1_avx2.so").write_text("old")
        monkeypatch.setenv(name, value)
        with pytest.raises(build.CannotCompileError, match=words):
            build.compile_core(source, tmp_path, print)
        assert list(tmp_path.iterdir()) == []


def test_the_hook_makes_a_pure_wheel_without_a_compiler(build, tmp_path, monkeypatch, capsys):
    """The wheel's tag stays py3-none-any: nothing in build_data is touched."""
    monkeypatch.setenv("OPDRIFT_NO_COMPILE", "1")
    root = Path(__file__).parents[2]
    hook = build.CustomBuildHook(str(root), {}, None, None, str(tmp_path), "wheel")
    build_data = {"pure_python": True, "force_include": {}}
    hook.initialize("standard", build_data)
    hook.finalize("standard", build_data, "")

    assert build_data == {"pure_python": True, "force_include": {}}
    assert "slower NumPy one is used" in "".join(capsys.readouterr())


# -- many contents at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_many_contents_have_the_digests_that_they_have_alone(name):
    engine = engine_called(name)
    if engine is None:
        pytest.skip(f"{name} cannot be had here")
    tensors = [torch.randn(5000), torch.arange(3), torch.randn(70).bfloat16(), torch.empty(0)]
    kinds = [engine.kinds[each.dtype] for each in tensors]

    found = engine.raws(
        [each.data_ptr() for each in tensors], [each.numel() for each in tensors], kinds
    )

    assert list(found) == [engine.digest(each)[0] for each in tensors]


def float32_numbers() -> torch.Tensor:
    """Bit patterns of all sorts: signs, exponents, subnormals, infinities, ties of bfloat16; no NaN."""
    generator = torch.Generator().manual_seed(0)
    upper = torch.randint(-(2**15), 2**15, (9001, 1), generator=generator) * 2**16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    numbers = (upper + lower).reshape(-1).to(torch.int32).view(torch.float32)
    return numbers[~numbers.isnan()].contiguous()


@pytest.mark.parametrize("name", ENGINES)
def test_float32_is_rounded_to_bfloat16_as_torch_does(name):
    """Bit for bit, at any length: whole chunks, the rest of one, a single element, nothing."""
    engine = engine_called(name)
    if engine is None:
        pytest.skip(f"{name} cannot be had here")
    numbers = float32_numbers()
    pieces = [numbers, numbers[:4096], numbers[7:5000], numbers[5:6], numbers[:0]]

    found = engine.bfloat16_raws(
        [each.data_ptr() for each in pieces], [each.numel() for each in pieces]
    )

    assert found is not None
    assert list(found[0]) == [engine.digest(each)[0] for each in pieces]
    assert list(found[1]) == [engine.digest(each.bfloat16())[0] for each in pieces]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("at", [0, 4099])
def test_what_becomes_of_a_nan_is_not_guessed(name, at):
    engine = engine_called(name)
    if engine is None:
        pytest.skip(f"{name} cannot be had here")
    numbers = torch.ones(4100)
    numbers[at] = float("nan")

    assert engine.bfloat16_raws([numbers.data_ptr()], [4100]) is None
