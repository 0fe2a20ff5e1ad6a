"""The environment snapshot tells what a run ran with, and changes nothing."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opdrift import environment


class Seen(TorchDispatchMode):
    """Notes every op that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def plain_settings() -> Iterator[None]:
    """Puts back the settings that these tests change."""
    matmul = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.backends.mkldnn.matmul.fp32_precision = matmul
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)


def test_a_snapshot_holds_about_66_flags_in_json_types():
    flags = environment.snapshot()

    assert json.loads(json.dumps(flags)) == flags
    assert len(flags) >= 60
    assert flags["grad_mode"] is True
    assert flags["default_dtype"] == "float32"
    assert flags["num_threads"] == torch.get_num_threads()
    assert not [name for name, value in flags.items() if str(value).startswith("unreadable")]


@pytest.mark.usefixtures("plain_settings")
def test_a_setting_that_the_program_changes_shows_in_the_next_snapshot():
    before = environment.snapshot()

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_flush_denormal(True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
        after = environment.snapshot()

    assert {name for name in before if before[name] != after[name]} == {
        "autocast.cpu",
        "autocast.cpu.dtype",
        "default_device",
        "deterministic_algorithms",
        "deterministic_algorithms_warn_only",
        "flush_denormal",
        "grad_mode",
        "torch_function_mode",
    }
    assert (after["autocast.cpu.dtype"], after["default_device"]) == ("float16", "meta")


@pytest.mark.usefixtures("plain_settings")
def test_a_getter_that_raises_is_reported_as_unreadable():
    """torch's old TF32 getters raise once the new precision API was used in a way they cannot say."""
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"

    assert environment.snapshot()["float32_matmul_precision"] == "unreadable: RuntimeError"


def test_a_snapshot_runs_no_op_draws_no_number_and_warns_of_nothing():
    torch.manual_seed(5)
    state = torch.get_rng_state()

    with warnings.catch_warnings(), Seen() as seen:
        warnings.simplefilter("error")
        environment.report()

    assert seen.ops == []
    assert torch.equal(torch.get_rng_state(), state)


def test_cuda_is_not_initialised_by_a_report(monkeypatch: pytest.MonkeyPatch):
    def initialise() -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)

    assert environment.report()["device"] == "cpu"


def test_changed_tells_old_and_new_once_and_per_thread():
    flags = environment.Flags()
    flags.changed()

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        here = flags.changed()
        again = flags.changed()
        elsewhere: list[dict[str, tuple[object, object]]] = []
        thread = threading.Thread(target=lambda: elsewhere.append(flags.changed()))
        thread.start()
        thread.join()

    assert here == {
        "grad_mode": (True, False),
        "autocast.cpu": (False, True),
        "autocast.cpu.dtype": ("bfloat16", "float16"),
    }
    assert again == {}
    assert elsewhere == [{}]


def test_only_known_variables_that_are_set_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setenv("SECRET_TOKEN", "hidden")

    found = environment.variables()

    assert found["MKL_CBWR"] == "COMPATIBLE"
    assert "KMP_AFFINITY" not in found
    assert "hidden" not in found.values()


def test_versions_name_torch_its_libraries_and_what_the_program_imported(
    monkeypatch: pytest.MonkeyPatch,
):
    fake = type(numpy)("fairscale")
    fake.__version__ = "9.8.7"
    monkeypatch.setitem(environment.sys.modules, "fairscale", fake)
    monkeypatch.delitem(environment.sys.modules, "accelerate", raising=False)

    found = environment.versions()

    assert found["torch"] == torch.__version__
    assert found["numpy"] == numpy.__version__
    assert found["fairscale"] == "9.8.7"
    assert "accelerate" not in found
    assert all(isinstance(version, str) for version in found.values())


def test_the_seed_digest_follows_the_generator():
    """Equal after equal draws, different after one more; the seed itself stays."""
    torch.manual_seed(11)
    first = environment.seeds()
    torch.rand(3)
    drawn = environment.seeds()
    torch.manual_seed(11)

    assert environment.seeds() == first
    assert drawn != first
    assert first["cpu"].startswith("seed 11, state ")
    assert drawn["cpu"].startswith("seed 11, state ")


def test_the_report_names_the_active_fingerprint_engine():
    report = environment.report()

    assert report["fingerprint_engine"]
    assert json.loads(json.dumps(report)) == report
