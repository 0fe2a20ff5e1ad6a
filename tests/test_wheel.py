"""The wheel, with a compiler and without: its tag, what it holds, and that it records from where it was unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]
#: What the HTML page is made of lies beside the code that writes it.
PAGE = Path("opdrift", "render", "html")
BUILD = "import sys; from hatchling.builders.wheel import WheelBuilder; print(*WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard']))"
USE = """
import sys, torch, opdrift
from pathlib import Path
where = Path(sys.argv[1])
model, x = torch.nn.Linear(8, 2), torch.arange(32.0).view(4, 8)
for name in ("left", "right"):
    torch.nn.init.constant_(model.weight, 0.5 if name == "left" else 0.25)
    with opdrift.record(where / name, model=model):
        model(x)
found = opdrift.diff(where / "left", where / "right").first
print(Path(opdrift.__file__).parents[1] == Path(sys.argv[2]), found.name, hex(opdrift.load(where / "left").fingerprint(1).raw))
"""


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def unpacked(folder: Path, **environment: str) -> tuple[str, list[str], Path]:
    """A wheel's name, the libraries in it, and where it lies unpacked, as an installer would put it."""
    wheel = Path(run("-c", BUILD, str(ROOT), str(folder), **environment).strip())
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    libraries = sorted(path.name for path in site.rglob("*.so"))
    return wheel.name, libraries, site


def use(site: Path, folder: Path) -> tuple[list[str], str]:
    """What recording and comparing from an unpacked wheel prints, and the engine that `opdrift env` names."""
    path = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "OPDRIFT_FINGERPRINT": ""}
    printed = run("-c", USE, str(folder), str(site), **path).split()
    told = run("-m", "opdrift", "env", **path)
    engine = next(line for line in told.splitlines() if line.startswith("fingerprint_engine"))
    return printed, engine.partition(": ")[2]


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure_and_records_with_numpy(tmp_path):
    """One wheel for every platform; a compiler that fails is as good as none."""
    name, libraries, site = unpacked(tmp_path, CC="false")
    printed, engine = use(site, tmp_path)

    assert name.endswith("-py3-none-any.whl")
    assert libraries == []
    assert {"main.js", "page.css"} <= {p.name for p in (site / PAGE / "assets").iterdir()}
    assert (site / PAGE / "vendor" / "uplot" / "LICENSE").exists()
    assert printed[:2] == ["True", "weight"]
    assert engine == "numpy (no compiled library)"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="there is no C compiler"
)
def test_with_a_compiler_the_wheel_is_of_its_platform_and_of_every_python(tmp_path):
    """The compiled core is in it and is used; the digests are those of the pure wheel."""
    (tmp_path / "pure").mkdir()
    name, libraries, site = unpacked(tmp_path, OPDRIFT_NO_COMPILE="")
    printed, engine = use(site, tmp_path)
    _, _, pure = unpacked(tmp_path / "pure", OPDRIFT_NO_COMPILE="1")

    assert name.split("-")[2:4] == ["py3", "none"]
    assert not name.endswith("-any.whl")
    assert "_tfp1_baseline.so" in libraries
    assert engine.startswith("C (")
    assert printed == ["True", "weight", use(pure, tmp_path / "pure")[0][2]]


@pytest.mark.slow
def test_pytest_has_nothing_to_say_of_an_installed_opdrift(tmp_path):
    """It rewrites what brings a plugin, and warns where that is loaded already, as in `opdrift run -m pytest`."""
    _, _, site = unpacked(tmp_path, OPDRIFT_NO_COMPILE="1")
    (tmp_path / "test_empty.py").write_text("def test(): pass")
    program = (
        "import sys, opdrift, opdrift_integrations, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )

    path = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    options = ["-W", "error", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    printed = run("-c", program, *options, str(tmp_path / "test_empty.py"), **path)

    assert "1 passed" in printed
    assert "opdrift-0" in printed.partition("plugins: ")[2].partition("\n")[0]
