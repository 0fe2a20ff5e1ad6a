"""Which implementation fingerprints a device's tensors, what it refuses, and what is said about it."""

import threading
import weakref

import numpy as np
import pytest
import torch
from fake_device import FakeAccelerator, FakeKernel
from fingerprint_checks import assert_same, tensor_of

from opdrift.fingerprint import ROW, accelerator, devices, load_engine
from opdrift.fingerprint.devices import CAPTURED, Devices
from opdrift.fingerprint.torch_ops import TorchOps

CPU = torch.device("cpu")
ENGINE = load_engine()


class Setup:
    """Devices whose only device is the host in disguise, and what they told their recorder."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.accelerator = FakeAccelerator(CPU)
        self.kernel = FakeKernel(self.accelerator)
        self.made: list[str] = []
        self.said: list[tuple[str, str, tuple[str, ...]]] = []
        self.failures: list[tuple[str, str]] = []
        patch.setattr(devices, "Accelerator", lambda device: self.accelerator)
        self.makers: list[devices.Maker] = [self._make, TorchOps]
        patch.setattr(devices, "kernels_for", lambda device: self.makers)
        self.devices = Devices(
            ENGINE,
            say=lambda device, by, why: self.said.append((device, by, tuple(why))),
            failed=lambda where, error: self.failures.append((where, str(error))),
        )

    def _make(self, device: torch.device) -> FakeKernel:
        self.made.append(str(device))
        return self.kernel


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(monkeypatch)


def joined(rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, ROW), *rows])


# ---- what comes out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        tensor_of(torch.bfloat16, 5000),
        torch.nn.Parameter(torch.randn(3, 4)),
        torch.randn(30, 40).t(),
        torch.randn(9, dtype=torch.complex64).conj(),
        torch.randn(9, dtype=torch.complex64).conj().imag,
        torch.arange(8, dtype=torch.uint8).view(torch.uint4),
        torch.empty(0),
        torch.ones(50)[7:],
    ],
    ids=[
        "plain",
        "parameter",
        "transposed",
        "conjugate",
        "negative",
        "sub-byte",
        "empty",
        "offset",
    ],
)
def test_any_tensor_gets_its_fingerprint_later(setup, tensor):
    """Put, and nothing else until rows are taken."""
    assert setup.devices.put(tensor, 5) is None
    assert setup.devices.take() == []
    (row,) = joined(setup.devices.finish())

    assert_same(row, ENGINE.fingerprint(tensor))
    assert row["value"] == 5
    assert setup.failures == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.uint4], ids=str)
def test_items_of_a_batch_are_given_in_elements(setup, dtype):
    """A complex element is two components; a row for each item."""
    tensor = tensor_of(torch.float32, 2 * 3 * 8)
    tensor = tensor.to(dtype) if dtype is not torch.uint4 else tensor.view(torch.uint8).view(dtype)
    tensor = tensor.reshape(2, 3, -1)
    setup.devices.put(tensor, 5, batch=(2, 3, tensor.shape[2]))
    rows = joined(setup.devices.finish())

    assert rows["item"].tolist() == [0, 1, 2]
    for item in range(3):
        assert_same(rows[item], ENGINE.fingerprint(tensor[:, item]))


def test_items_that_begin_within_a_byte_are_refused(setup, monkeypatch):
    """Four-bit elements of a quantised tensor, two a byte."""
    monkeypatch.setattr(devices, "plain_on_device", lambda tensor: torch.ones(3, dtype=torch.uint8))
    tensor = torch.ones(2, 3).t()

    assert "share a byte" in setup.devices.put(tensor, 1, batch=(1, 2, 3))
    assert setup.devices.put(tensor, 2) is None


def test_a_batch_without_items_is_refused(setup):
    """There is nothing to wait for."""
    assert (
        setup.devices.put(torch.ones(2, 0, 3), 1, batch=(2, 0, 3)) == "it is a batch without items"
    )
    assert setup.devices.finish() == []


def test_each_stream_has_a_ring_of_its_own(setup):
    """Two streams are in no order that a copy could rely on."""
    setup.devices.put(torch.ones(1), 1)
    setup.accelerator.now = 7
    setup.devices.put(torch.ones(1), 2)
    setup.devices.put(torch.ones(1), 3)
    first, second = setup.accelerator.streams[0], setup.accelerator.streams[7]

    assert [name for name in first.log if name.startswith("write")] == ["write 0"]
    assert [name for name in second.log if name.startswith("write")] == ["write 0", "write 1"]
    assert setup.made == ["cpu"]
    setup.devices.take()
    second.run()
    assert joined(setup.devices.take())["value"].tolist() == [2, 3]
    assert first.waits == second.waits == 0


def test_threads_may_put_at_the_same_time(setup):
    """Rows and their tickets stay in step."""
    tensors = {value: torch.full((value % 7 + 1,), float(value)) for value in range(400)}

    def work(first: int) -> None:
        for value in range(first, 400, 4):
            assert setup.devices.put(tensors[value], value) is None

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = joined(setup.devices.finish())

    assert sorted(rows["value"].tolist()) == list(tensors)
    for row in rows:
        assert row["raw"] == ENGINE.fingerprint(tensors[int(row["value"])])["raw"]


def test_whoever_asked_is_told_when_a_row_has_arrived(setup):
    """A probe's row is given to nobody else."""
    found = []
    setup.devices.put(torch.ones(3), 1, then=lambda rows: found.append(rows["sum"].tolist()))
    setup.devices.put(torch.ones(9), 2)
    setup.devices.probe(
        torch.ones(2, 4), lambda rows: found.append(rows["sum"].tolist()), batch=(1, 2, 4)
    )
    assert found == []
    rows = joined(setup.devices.finish())

    assert found == [[3.0], [4.0, 4.0]]
    assert rows["value"].tolist() == [1, 2]
    assert setup.devices.finish() == []


def test_a_row_can_be_had_at_once(setup):
    """That waits for the device; rows of others that come along are kept."""
    setup.devices.put(torch.ones(3), 1)
    row = setup.devices.now(torch.ones(5))

    assert_same(row, ENGINE.fingerprint(torch.ones(5)))
    assert joined(setup.devices.take())["value"].tolist() == [1]


def test_released_devices_hold_no_memory(setup):
    """A program may keep its recorder; the rings are given back when the recording ends."""
    setup.devices.put(torch.ones(3), 1, then=lambda rows: None)
    ring = weakref.ref(setup.devices._places[CPU].ring())
    setup.devices.release()

    assert ring() is None
    assert setup.devices.finish() == []


# ---- what is refused -------------------------------------------------------------------------------------


def freed(*, transposed: bool = False) -> torch.Tensor:
    tensor = torch.ones(10, 10).t() if transposed else torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (freed(), "its storage was freed"),
        (freed(transposed=True), "its storage was freed"),
        (torch.ones(3, device="meta"), "a meta tensor has no content"),
        (torch.eye(3).to_sparse(), "consists of other tensors"),
    ],
    ids=["freed", "freed, transposed", "meta", "sparse"],
)
@pytest.mark.parametrize("known", [True, False], ids=["known device", "new device"])
def test_a_tensor_without_content_is_refused(setup, tensor, reason, known):
    """The reason is given; nothing is launched that would read what is not there."""
    if known:
        setup.devices.put(torch.ones(1), 1)

    assert reason in setup.devices.put(tensor, 2)
    assert setup.devices.now(tensor) is None
    assert joined(setup.devices.finish())["value"].tolist() == ([1] if known else [])


def test_a_capture_is_left_alone(setup):
    """Nothing is launched into the graph, and nothing is queried or copied: that would end the capture."""
    setup.devices.put(torch.ones(3), 1)
    setup.accelerator.capturing = True
    stream = setup.accelerator.streams[0]
    before = list(stream.log)

    assert setup.devices.put(torch.ones(3), 2) == CAPTURED
    assert setup.devices.now(torch.ones(3)) is None
    assert setup.devices.take() == []
    assert stream.log == before
    setup.accelerator.capturing = False
    assert joined(setup.devices.finish())["value"].tolist() == [1]


def test_a_tensor_that_no_copy_fits_beside_is_left_out(setup, monkeypatch):
    """Out of memory is a reason for this tensor, not against the kernel."""

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(devices, "plain_on_device", full)
        assert setup.devices.put(torch.ones(2, 3).t(), 1) == "cpu had no memory left for it"
    setup.devices.put(torch.ones(3), 2)

    assert setup.said == [("cpu", "a fake kernel", ())]
    assert joined(setup.devices.finish())["value"].tolist() == [2]


# ---- what it falls back to -------------------------------------------------------------------------------


def test_what_is_used_is_said_once(setup):
    """When it has worked for the first time."""
    assert setup.said == []
    for value in range(3):
        setup.devices.put(torch.ones(3), value)

    assert setup.said == [("cpu", "a fake kernel", ())]


def test_a_kernel_that_fails_to_compile_is_replaced_by_torch_ops(setup):
    """The tensor at hand is not lost, and the reason is told on one line."""
    setup.kernel.fail = RuntimeError("Failed to find C compiler.\nPlease specify via CC")
    setup.devices.put(torch.ones(3), 1)
    setup.devices.put(torch.ones(3), 2)
    rows = joined(setup.devices.finish())

    assert rows["value"].tolist() == [1, 2]
    assert rows["sum"].tolist() == [3.0, 3.0]
    why = "RuntimeError: Failed to find C compiler. Please specify via CC"
    assert setup.said == [("cpu", "torch ops", (why,))]


def test_a_kernel_that_fails_in_the_middle_is_replaced(setup):
    """A dtype met later may be the one that does not compile."""
    setup.devices.put(torch.ones(3), 1)
    setup.kernel.fail = OSError("Read-only file system")
    setup.devices.put(torch.ones(3).half(), 2)

    assert [(by, why) for _, by, why in setup.said] == [
        ("a fake kernel", ()),
        ("torch ops", ("OSError: Read-only file system",)),
    ]
    assert joined(setup.devices.finish())["value"].tolist() == [1, 2]


def test_a_device_that_lacks_even_the_torch_ops_is_read_through_the_host(setup):
    """Some devices have no float64: each op is waited for then, which is said, too."""

    def lacks(device: torch.device) -> TorchOps:
        raise TypeError("this device has no float64")

    setup.makers[1] = lacks
    setup.kernel.fail = ImportError("No module named 'triton'")
    tensor = torch.randn(4, 5).t()
    setup.devices.put(tensor, 1)
    setup.devices.put(torch.ones(2, 2), 2, batch=(1, 2, 2))
    rows = joined(setup.devices.take())

    assert rows["value"].tolist() == [1, 2, 2]
    assert_same(rows[0], ENGINE.fingerprint(tensor))
    assert [by for _, by, _ in setup.said] == ["copies to the host"]
    assert setup.said[0][2] == (
        "ImportError: No module named 'triton'",
        "TypeError: this device has no float64",
    )


def test_a_device_without_a_kernel_is_said_to_have_none(setup):
    """Torch ops are there for any device, and slow."""
    setup.makers[0] = devices._no_kernel
    setup.devices.put(torch.ones(3), 1)

    why = "NotImplementedError: no kernel was written for cpu"
    assert setup.said == [("cpu", "torch ops", (why,))]


def test_rows_that_are_lost_are_told(setup):
    """A device that failed, by the program's own doing perhaps, must not end the recording."""
    setup.devices.put(torch.ones(3), 1)
    setup.accelerator.streams[0].fail = RuntimeError("device-side assert triggered")

    assert setup.devices.finish() == []
    assert setup.failures == [("fingerprints of cpu", "device-side assert triggered")]


def test_triton_is_not_imported_before_a_device_needs_it():
    """It costs half a second, and is not there everywhere."""
    program = (
        "import sys, torch, opdrift.recorder, opdrift.fingerprint.devices\n"
        "sys.exit('triton.language' in sys.modules)"
    )
    import subprocess
    import sys
    from pathlib import Path

    root = Path(devices.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{program}"],
        check=False,
        timeout=60,
    )

    assert done.returncode == 0


@pytest.mark.parametrize(
    ("device", "names"),
    [("cuda:0", ["_make_triton", "TorchOps"]), ("xpu:0", ["_no_kernel", "TorchOps"])],
)
def test_the_kernel_is_tried_where_triton_compiles_for(device, names):
    """CUDA and ROCm are both called cuda by torch."""
    made = devices.kernels_for(torch.device(device))

    assert [maker.__name__ for maker in made] == names


# ---- torch's accelerators --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["device_count", "current_device_index", "device_index", "current_stream"]
)
def test_torch_has_what_is_asked_of_it(name):
    """The names by which streams and devices are reached; there is no device here to use them on."""
    assert callable(getattr(torch.accelerator, name))
    assert hasattr(torch.Stream, "__enter__")
    assert hasattr(torch.Stream, "stream_id")
    assert callable(torch.Event.record)


def test_another_device_is_made_the_current_one(monkeypatch):
    """A program with two GPUs may run an op on the one that is not current."""
    entered = []

    class Index:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_index", Index)
    with accelerator.Accelerator(torch.device("cuda:0")).current():
        pass
    with accelerator.Accelerator(torch.device("cuda:1")).current():
        pass

    assert entered == [1, "left"]


def test_streams_are_told_apart_by_their_handle(monkeypatch):
    """Asked of torch's own bindings, by name."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    cuda = accelerator.Accelerator(torch.device("cuda:3"))

    assert cuda.stream() == 103
    assert cuda.is_capturing()
    assert not accelerator.Accelerator(torch.device("mps:0")).is_capturing()
