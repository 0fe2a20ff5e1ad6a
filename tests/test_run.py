"""`opdrift run`: what a program does alone it does traced, to the byte; and what the trace says of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from opdrift.commands.main import opdrift
from opdrift.commands.run import split
from opdrift.tracefile.opening import load

Python = Callable[..., subprocess.CompletedProcess[str]]


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What a command printed: (stdout, stderr)."""
    captured = capsys.readouterr()
    return captured.out, captured.err


PROGRAM = """
import sys
import torch
from beside import number
print(__name__, sys.argv[1:])
torch.full((2,), number) + 1
match sys.argv[1:2]:
    case ["raise"]: raise ValueError("the program's own")
    case ["exit"]: sys.exit(7)
    case ["text"]: sys.exit("the program's last words")
    case ["zero"]: sys.exit(0)
    case ["interrupt"]: raise KeyboardInterrupt
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A script that imports a module beside it; afterwards the process is that of the tests again."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text("number = 3.0\n")
    (folder / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("argv", "path", "meta_path"):
        monkeypatch.setattr(sys, name, getattr(sys, name)[:])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return folder / "program.py"


@pytest.mark.parametrize(
    ("arguments", "end", "ended"),
    [
        ([], None, "ok"),
        (["zero"], SystemExit(0), "ok"),
        (["exit"], SystemExit(7), "raised"),
        (["text"], SystemExit("the program's last words"), "raised"),
        (["raise"], ValueError("the program's own"), "raised"),
        (["interrupt"], KeyboardInterrupt(), "raised"),
        (["--flag", "-o", "x", "--help"], None, "ok"),
    ],
)
def test_run_writes_the_trace_however_the_program_ends(arguments, end, ended, program, capsys):
    """What it raises goes on to Python; its arguments are its own, dashes and all."""
    raised: BaseException | None = None
    try:
        assert (
            opdrift(["run", "-o", "run.trace", "--label", "a run", str(program), *arguments]) == 0
        )
    except BaseException as error:
        raised = error

    out, err = said(capsys)
    assert repr(raised) == repr(end)
    assert (out, err) == (f"__main__ {arguments}\n", "opdrift: the trace is in run.trace\n")
    trace = load("run.trace")
    assert (trace.header.label, trace.complete, trace.footer.ended) == ("a run", True, ended)
    assert [trace.op(i).name for i in range(len(trace.ops))][-1] == "aten.add.Tensor"


def test_run_a_module_as_python_does(program, python):
    """`python -m opdrift run -m MODULE`, default name of the trace."""
    done = python("-m", "opdrift", "run", "-m", "program", "exit", cwd=program.parent)
    assert (done.returncode, done.stdout) == (7, "__main__ ['exit']\n")
    assert done.stderr == "opdrift: the trace is in program.trace\n"
    assert (program.parent / "program.trace" / "header.json").exists()


def test_run_overwrites_only_on_request(program, capsys):
    """The program is not even started where its trace could not be written."""
    (program.parent / "program.py").write_text("import torch\nprint('started')\n")
    command = ["run", "-o", "run.trace"]
    assert opdrift([*command, str(program)]) == 0
    assert opdrift([*command, str(program)]) == 2
    assert opdrift([*command, "--overwrite", str(program)]) == 0
    out, err = said(capsys)
    assert out == "started\n" * 2
    assert "run.trace already holds a trace" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "run needs a program"),
        (["-m"], "run needs a program"),
        (["missing.py"], "missing.py does not exist"),
        (["--integrations", "nonsense", "{}"], "no integration 'nonsense'"),
    ],
)
def test_run_says_what_it_needs(arguments, words, program, capsys):
    """One sentence, status 2, no trace."""
    assert opdrift(["run", "-o", "run.trace", *(a.format(program) for a in arguments)]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not Path("run.trace").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "no_such_module"], "-m no_such_module cannot be run: no module named"),
        (["-m", "bundle"], "-m bundle cannot be run: no module named bundle.__main__"),
        (["-m", "bundle.missing"], "-m bundle.missing cannot be run: "),
        (["-m", "beside.missing"], "-m beside.missing cannot be run: "),
        (["-m", ".program"], "named by words with dots between"),
        (["-m", "broken"], "SyntaxError at "),
        (["elsewhere/broken.py"], "elsewhere/broken.py cannot be run: SyntaxError at "),
    ],
)
def test_run_leaves_all_as_it_is_where_the_program_cannot_start(arguments, words, program, python):
    """One sentence and status 2; the trace that --overwrite would have replaced is still there."""
    folder = program.parent
    (folder / "broken.py").write_text("print('started')\n\ndef f(:\n")
    (folder / "bundle").mkdir()
    (folder / "bundle" / "__init__.py").write_text("")
    assert opdrift(["run", "-o", "run.trace", str(program)]) == 0
    before = {p: p.read_bytes() for p in Path("run.trace").iterdir() if p.is_file()}

    command = ("-m", "opdrift", "run", "-o", str(Path("run.trace").absolute()), "--overwrite")
    folder_of = folder if arguments[0] == "-m" else folder.parent
    done = python(*command, *arguments, cwd=folder_of)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
    assert {p: p.read_bytes() for p in Path("run.trace").iterdir() if p.is_file()} == before


@pytest.mark.parametrize("module", ["bundle", "bundle.inner.leaf", "bare.inner.leaf", "grown.leaf"])
def test_run_finds_modules_as_python_does(module, program, python):
    """Packages, folders without __init__.py, packages that add to their path; each is imported once."""
    folder = program.parent
    for place in ("bundle/inner", "bare/inner", "grown", "hidden"):
        (folder / place).mkdir(parents=True)
    (folder / "bundle" / "__init__.py").write_text("print('imported')\n")
    (folder / "bundle" / "inner" / "__init__.py").write_text("")
    (folder / "grown" / "__init__.py").write_text(
        "from pathlib import Path\n__path__ = [str(Path(__file__).parent.parent / 'hidden')]\n"
    )
    for place in ("bundle/__main__", "bundle/inner/leaf", "bare/inner/leaf", "hidden/leaf"):
        (folder / f"{place}.py").write_text("print('started')\n")

    done = python("-m", "opdrift", "run", "-m", module, cwd=folder)

    imported = "imported\n" if module.startswith("bundle") else ""
    assert (done.returncode, done.stdout) == (0, f"{imported}started\n")


# ---- as if alone ---------------------------------------------------------------------------------------

#: Programs that do not need torch: what they print and how they end is compared with what they do alone.
ALONE = {
    "names": """
        import sys
        print({name: value if name not in ("__builtins__", "__loader__", "__spec__") else type(value).__name__
               for name, value in globals().items()})
        print(sys.argv, sys.path, sys.stdin.read(), __builtins__.print is print)
        """,
    "status": "import sys; sys.exit(3)",
    "no status": "import sys; sys.exit()",
    "true": "import sys; sys.exit(True)",
    "words": "import sys; sys.exit('last words')",
    "tuple": "import sys; sys.exit((1, 'two'))",
    "raised": """
        def inner():
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("wrong") from error

        inner()
        """,
    "own hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook", kind, error, trace.tb_frame.f_code.co_name)
        raise ValueError("wrong")
        """,
    "interrupt": """
        import atexit, os, signal, sys
        atexit.register(lambda: print("at exit", sys.argv, sys.last_type, sys.last_traceback.tb_lineno))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
        os.kill(os.getpid(), signal.SIGINT)
        import time; time.sleep(60)
        """,
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "own handler": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    "warning": """
        import warnings
        warnings.warn("old", DeprecationWarning)
        warnings.warn("later", PendingDeprecationWarning)
        """,
    "later": """
        import atexit, pickle, sys, threading

        class Thing: pass

        def late():
            print(pickle.loads(pickle.dumps(Thing())).__class__, sorted(vars(sys.modules["__main__"])), sys.argv[0])

        def wait():
            threading.main_thread().join()
            late()

        threading.Thread(target=wait).start()
        atexit.register(late)
        """,
    "spawn": """
        import multiprocessing, sys

        def work(number):
            return number + 1, __name__, sys.argv

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [1]))
        """,
    "fork": """
        import os, sys
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        print("child" if not child else "parent", flush=True)
        """,
    "closed": "import sys; sys.stderr.close()",
    "broken torch": "import torch",
}


def plain_and_traced(
    python: Python, folder: Path, start: list[str], **environment: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """A program alone, and under `opdrift run` without the lines that opdrift adds to stderr."""
    plain = python(*start, cwd=folder, **environment)
    traced = python("-m", "opdrift", "run", "-o", "run.trace", *start, cwd=folder, **environment)
    traced.stderr = "".join(
        line for line in traced.stderr.splitlines(keepends=True) if not line.startswith("opdrift: ")
    )
    return plain, traced


def facts(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("case", ALONE)
def test_a_program_does_what_it_does_alone(case: str, tmp_path: Path, python: Python):
    """Output, exit status or signal, traceback, and what it finds in its process."""
    (tmp_path / "program.py").write_text(textwrap.dedent(ALONE[case]))
    if case == "broken torch":
        (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')\n")

    plain, traced = plain_and_traced(python, tmp_path, ["program.py", "--beam", "4"])

    assert facts(traced) == facts(plain)


@pytest.mark.parametrize(
    "start",
    [["./program.py"], ["../here/program.py"], ["-m", "program"], ["-m", "pack"], ["-m", "pack.leaf"],
     ["pack"], ["packed.zip"]],
    ids=" ".join,
)  # fmt: skip
def test_every_way_to_start_a_program(start: list[str], tmp_path: Path, python: Python):
    """Scripts, modules, packages, folders and archives: the same names, paths and traceback."""
    folder = tmp_path / "here"
    (folder / "pack").mkdir(parents=True)
    source = textwrap.dedent(ALONE["names"]) + "print(__spec__ and __spec__.name)\n1 / 0\n"
    for name in ("program.py", "pack/__main__.py", "pack/leaf.py"):
        (folder / name).write_text(source)
    (folder / "pack" / "__init__.py").write_text("")
    with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
        archive.writestr("__main__.py", source)

    plain, traced = plain_and_traced(python, folder, [*start, "-m", "--", "x"])

    assert plain.returncode == 1
    assert facts(traced) == facts(plain)


def test_the_safe_path_stays_safe(tmp_path: Path, python: Python):
    """With PYTHONSAFEPATH the script's folder is not searched, as without opdrift."""
    (tmp_path / "program.py").write_text("import sys; print(sys.path)")

    plain, traced = plain_and_traced(python, tmp_path, ["program.py"], PYTHONSAFEPATH="1")

    assert facts(traced) == facts(plain)


def test_the_console_script_leaves_nothing_of_its_own(tmp_path: Path, python: Python):
    """Its folder, full of commands, is not searched for modules."""
    script = Path(sys.executable).parent / "opdrift"
    if not script.exists():
        pytest.skip("opdrift is not installed")
    (tmp_path / "program.py").write_text(textwrap.dedent(ALONE["names"]) + "1 / 0")

    plain = python("program.py", cwd=tmp_path)
    traced = python(str(script), "run", "program.py", cwd=tmp_path)

    assert (traced.returncode, traced.stdout) == (plain.returncode, plain.stdout)
    assert traced.stderr.partition("\n")[2] == plain.stderr


# ---- torch -----------------------------------------------------------------------------------------------


def test_nothing_of_ours_imports_torch_before_the_program_does(tmp_path: Path, python: Python):
    """What a program sets before its import counts, and libraries may ask where torch is before they import it.

    The trace lies where it was asked for, wherever the program goes, and an op that fails shows no frame of ours.
    """
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "program.py").write_text(
        "import importlib.util, os, sys\n"
        "os.environ['OMP_NUM_THREADS'] = '2'\n"
        "os.chdir('elsewhere')\n"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'rich'} & set(sys.modules)))\n"
        "spec = importlib.util.find_spec('torch')\n"
        "print(spec.origin, spec.loader.path, 'torch' in sys.modules)\n"
        "import torch\n"
        "print(torch.get_num_threads(), type(torch.__loader__), type(torch.__spec__.loader))\n"
        "print((torch.ones(2) + 1).tolist())\n"
        "torch.ones(2) + torch.ones(3)\n"
    )

    plain, traced = plain_and_traced(python, tmp_path, ["program.py"], OMP_NUM_THREADS="1")

    assert facts(traced) == facts(plain)
    imported, _, threads = plain.stdout.splitlines()[:3]
    assert imported == "[]"
    trace = load(tmp_path / "run.trace")
    assert "aten.add.Tensor" in [trace.op(i).name for i in range(len(trace.ops))]
    assert (trace.complete, trace.header.flags["num_threads"]) == (True, int(threads.split()[0]))


def test_a_program_that_is_terminated_leaves_a_readable_trace(tmp_path: Path, python: Python):
    """It dies of the signal, as alone; what was written until then is there."""
    (tmp_path / "program.py").write_text(
        "import os, signal, torch\n"
        "x = torch.ones(8)\n"
        "while not os.path.getsize('run.trace/ops.arrows'):\n"
        "    x = x + 1\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )

    done = python("-m", "opdrift", "run", "-o", "run.trace", "program.py", cwd=tmp_path)

    assert done.returncode == -15
    trace = load(tmp_path / "run.trace")
    assert not trace.complete
    assert trace.op(len(trace.ops) - 1).name == "aten.add.Tensor"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('no torch')", "did not import torch, so there is nothing to record and no trace"),
        ("import torch", "nothing was recorded, by a bug in opdrift ("),
        (
            "import threading; t = threading.Thread(target=lambda: __import__('torch')); t.start(); t.join()",
            "imported torch on another thread than its main one",
        ),
    ],
)
def test_one_sentence_where_nothing_is_recorded(
    source: str, words: str, tmp_path: Path, python: Python
):
    """The program never notices; an empty torch stands for a failure of the tracer."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "program.py").write_text(source)

    done = python("-m", "opdrift", "run", "program.py", cwd=tmp_path)

    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert words in done.stderr
    assert not (tmp_path / "program.trace").exists()


def test_a_trace_without_ops_says_so(program: Path, capsys: pytest.CaptureFixture[str]):
    program.write_text("import torch")

    assert opdrift(["run", "-o", "run.trace", str(program)]) == 0

    assert "the trace is in run.trace; it holds no op" in said(capsys)[1]


@pytest.mark.slow
def test_each_rank_of_a_launcher_writes_a_folder_of_its_own(tmp_path: Path, python: Python):
    """`torchrun ... -m opdrift run`: no process group is needed to know the rank."""
    (tmp_path / "program.py").write_text(
        "import os, torch\n(torch.ones(2) + int(os.environ['RANK'])).sum()\n"
    )

    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = python(
        *launcher, "-m", "opdrift", "run", "-o", "t.trace", "program.py",
        cwd=tmp_path, timeout=240, OMP_NUM_THREADS="1",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    ranks = [load(tmp_path / "t.trace", rank=rank) for rank in (0, 1)]
    assert [(t.header.rank, t.header.world_size, t.complete) for t in ranks] == [
        (0, 2, True),
        (1, 2, True),
    ]
    assert done.stderr.count("opdrift: the trace is in t.trace\n") == 2


@pytest.mark.parametrize(
    ("own", "program"),
    [
        (["--overw"], ["train.py", "--overwrite"]),
        (["--over", "-o", "a.trace"], ["-m", "train"]),
        (["--lab", "a name"], ["train.py"]),
        (["-oa.trace", "--label=x"], ["train.py", "-o", "b"]),
    ],
)
def test_options_that_are_cut_short_end_where_they_would_in_full(own, program):
    """argparse takes the beginning of an option for it; what follows a flag is the program."""
    assert split(["run", *own, *program]) == (["run", *own], tuple(program))
