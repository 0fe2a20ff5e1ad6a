"""Imports point down the layers of ARCHITECTURE.md, the halves do not meet, and reading needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tracer" / "opdrift"
INTEGRATIONS = ROOT / "integrations" / "opdrift_integrations"

SHARED, RECORDING, READING, BOTH = "shared", "recording", "reading", "both"

#: (layer, half, modules and packages of opdrift). A module imports from its own layer or lower ones.
LAYERS: tuple[tuple[int, str, str], ...] = (
    (0, SHARED, "errors records batch"),
    (1, SHARED, "composition plugins tfp1 tracefile"),
    (
        2,
        RECORDING,
        "batches buffers choices collectives compilations environment fingerprint futures imports interning kernels leafnames memory neutral outcomes placements plans randomness rereading scopes shortfalls sources spool steering storages transfers unsettled values",
    ),
    (
        3,
        RECORDING,
        "attaching boundaries checkpoint_digests contentcalls digesting headers marks mode naming options recorder",
    ),
    (
        2,
        READING,
        "align asked components contents deliveries layouts neighbours regions shards tokens wording",
    ),
    (
        3,
        READING,
        "bounds case compare copies extracalls fetched flow gradients leaves matches modelsettings openmasks orders pairs parts picks provenance races regionresults replacements samples settings sinks starts steps timeline unfollowed",
    ),
    (
        4,
        READING,
        "causes checkpoints findings foreign gathers moves origins overwritten receivers sizes trials world",
    ),
    (5, READING, "diagnose"),
    (6, READING, "export render testing"),
    (7, READING, "__main__ commands"),
    (7, BOTH, "__init__"),
)
#: Third-party libraries that opdrift itself may import; others belong into integrations.
LIBRARIES = {"numpy", "pyarrow", "rich", "rich_argparse"}
#: What only the recording half may import: triton and typing_extensions come with torch.
RECORDING_LIBRARIES = {"torch", "triton", "typing_extensions"}

#: Packages of integrations that are exporters.
EXPORTERS = {"perfetto"}


@dataclass(frozen=True)
class Import:
    """One import statement's target, as an absolute name."""

    target: str
    only_for_types: bool = False


Imports = Mapping[str, frozenset[Import]]


def place_of(module: str) -> tuple[int, str]:
    """Layer and half of a module such as `opdrift.align.calls`."""
    part = module.removeprefix("opdrift").removeprefix(".").partition(".")[0] or "__init__"
    found = [(layer, half) for layer, half, names in LAYERS if part in names.split()]
    assert len(found) == 1, (
        f"{module} has no layer; give {part} one in tests/test_layers.py and ARCHITECTURE.md"
    )
    return found[0]


def imports_of(folder: Path, package: str) -> Imports:
    """Module -> what it imports, wherever in the file the statement stands."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = frozenset(_statements(ast.parse(path.read_text(encoding="utf-8"))))
    return found


def _statements(tree: ast.AST, only_for_types: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        guarded = only_for_types or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, only_for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from opdrift import tfp1` imports a module, `from opdrift.tfp1 import Code` a name in one
            yield from (
                Import(f"{node.module}.{alias.name}", only_for_types) for alias in node.names
            )
        yield from _statements(node, guarded)


def resolved(imports: Imports) -> dict[str, set[tuple[str, bool]]]:
    """The same within opdrift: module -> (imported module, whether only for types)."""
    found: dict[str, set[tuple[str, bool]]] = {}
    for module, targets in imports.items():
        found[module] = set()
        for target in targets:
            name = target.target
            while name and name not in imports:
                name = name.rpartition(".")[0]
            if name and name != module:
                found[module].add((name, target.only_for_types))
    return found


def upward(imports: Imports) -> list[str]:
    """Imports of a higher layer."""
    return [
        f"{module} imports {target}, which is above it"
        for module, targets in resolved(imports).items()
        for target, _ in sorted(targets)
        if target != "opdrift" and place_of(target)[0] > place_of(module)[0]
    ]


def across(imports: Imports) -> list[str]:
    """Imports from one half into the other; for types alone only at the top."""
    wrong = []
    for module, targets in resolved(imports).items():
        layer, half = place_of(module)
        for target, only_for_types in sorted(targets):
            other = place_of(target)[1]
            meets = {half, other} == {RECORDING, READING}
            if meets and not (only_for_types and layer == 7):
                wrong.append(f"{module} ({half}) imports {target} ({other})")
    return wrong


def cycle(imports: Imports) -> list[str]:
    """Modules that import each other in a circle while they are loaded."""
    graph = {
        module: {
            target
            for target, only_for_types in targets
            if not only_for_types and target != "opdrift"
        }
        for module, targets in resolved(imports).items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def foreign(imports: Imports) -> list[str]:
    """Libraries where they do not belong: torch outside recording, others outside integrations."""
    wrong = []
    for module, targets in imports.items():
        half = place_of(module)[1]
        for library in sorted(
            {target.target.partition(".")[0] for target in targets} - set(sys.stdlib_module_names)
        ):
            known = LIBRARIES | (RECORDING_LIBRARIES if half == RECORDING else set())
            allowed = library == "opdrift" or library in known
            if not allowed:
                wrong.append(f"{module} ({half}) imports {library}")
    return wrong


@pytest.fixture(scope="module")
def imports() -> Imports:
    return imports_of(PACKAGE, "opdrift")


def test_every_module_has_one_layer(imports: Imports):
    assert len(imports) > 40
    for module in imports:
        place_of(module)


def test_imports_point_down(imports: Imports):
    assert upward(imports) == []


def test_no_modules_import_each_other_in_a_circle(imports: Imports):
    assert cycle(imports) == []


def test_the_halves_never_import_each_other(imports: Imports):
    assert across(imports) == []


def test_torch_stays_in_recording_and_other_libraries_in_integrations(imports: Imports):
    assert foreign(imports) == []


def test_integrations_use_of_opdrift_only_what_plugins_promise():
    """They get a recorder handed; of opdrift they import the shared layers alone.

    Exporters also use what exporters share. The pytest plugin is no integration that a recorder attaches: it uses
    opdrift as tests do.
    """
    used = {
        target.target
        for module, targets in imports_of(INTEGRATIONS, "opdrift_integrations").items()
        if module != "opdrift_integrations.pytest_plugin"
        for target in targets
        if target.target.split(".")[0] == "opdrift"
        and not (
            EXPORTERS.intersection(module.split(".")[1:2])
            and target.target.startswith("opdrift.export.")
        )
    }

    assert {name for name in used if place_of(name)[1] != SHARED} == set()


class TestTheseChecksCanFail:
    """Each check above, given what it must refuse."""

    def test_an_import_of_a_higher_layer_is_found(self):
        imports = {
            "opdrift.align": frozenset({Import("opdrift.diagnose.diff")}),
            "opdrift.diagnose": frozenset[Import](),
        }

        assert upward(imports) == ["opdrift.align imports opdrift.diagnose, which is above it"]

    @pytest.mark.parametrize(
        ("module", "target"),
        [("render", "recorder"), ("scopes", "align"), ("commands.run", "recorder")],
    )
    def test_an_import_into_the_other_half_is_found(self, module: str, target: str):
        imports = {
            f"opdrift.{module}": frozenset({Import(f"opdrift.{target}")}),
            f"opdrift.{target}": frozenset[Import](),
        }

        assert len(across(imports)) == 1

    def test_a_circle_is_found(self):
        imports = {
            "opdrift.pairs": frozenset({Import("opdrift.case.Case")}),
            "opdrift.case": frozenset({Import("opdrift.pairs")}),
        }

        assert len(set(cycle(imports))) == 2

    def test_torch_in_the_reading_half_is_found(self):
        assert foreign(
            {"opdrift.compare": frozenset({Import("torch.nn.functional.mse_loss")})}
        ) == ["opdrift.compare (reading) imports torch"]

    def test_a_library_that_belongs_into_an_integration_is_found(self):
        assert foreign({"opdrift.recorder": frozenset({Import("fairscale")})}) == [
            "opdrift.recorder (recording) imports fairscale"
        ]

    def test_a_module_without_a_layer_is_found(self):
        with pytest.raises(AssertionError, match="has no layer"):
            place_of("opdrift.helpers")

    def test_imports_are_found_wherever_they_stand(self):
        source = "if TYPE_CHECKING:\n import a.b\ndef f():\n from opdrift import records\n"

        assert set(_statements(ast.parse(source))) == {
            Import("a.b", only_for_types=True),
            Import("opdrift.records"),
        }


def loads_torch(statements: str) -> bool:
    """Whether a fresh process that runs these statements has torch loaded."""
    roots = [str(PACKAGE.parent), str(INTEGRATIONS.parent)]
    program = f"import sys; sys.path[:0] = {roots!r}\n{statements}\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip().splitlines()[-1] == "True"


def test_reading_traces_never_loads_torch(imports: Imports):
    """Importing opdrift, `load`, `diff` and every module of the reading half."""
    reading = [
        module
        for module in imports
        if place_of(module)[1] != RECORDING and module != "opdrift.__main__"
    ]

    assert not loads_torch(
        f"import opdrift; opdrift.load, opdrift.diff, opdrift.Trace, opdrift.Batch\nimport {', '.join(reading)}"
    )


def test_the_test_above_can_fail():
    assert loads_torch("import opdrift; opdrift.record")
