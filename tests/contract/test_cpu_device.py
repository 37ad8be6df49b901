"""The CPU device around its kernels: threads, memory, what it says of itself, what it says when it cannot be had."""

from __future__ import annotations

import importlib
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ropeway.devices.base import FACTORED, Activations, DenseTensor
from ropeway.devices.stream import InlineStream
from ropeway.errors import ConfigError, Unsupported
from tests.support.matrices import Form, seen_inputs
from tests.support.native import CONTEXTS, _native  # isort: split

from ropeway.devices.cpu.device import CpuDevice


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(threads=2, stream=InlineStream())


def test_an_installation_without_native_kernels_says_how_to_get_them_and_what_works_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("ropeway.devices.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ropeway.devices.cpu._native", None)
    with pytest.raises(Unsupported, match=r"compiler.*--device reference"):
        importlib.import_module("ropeway.devices.cpu.device")


@pytest.mark.parametrize("threads", [0, -3])
def test_a_device_without_threads_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 1, not {threads}"):
        CpuDevice(threads=threads)


def test_an_unknown_instruction_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"mmx.*portable"):
        CpuDevice(isa="mmx")


@pytest.mark.parametrize("isa", CONTEXTS)
def test_the_report_names_the_instruction_set_in_use_and_those_there_are(isa: str) -> None:
    report = CpuDevice(threads=3, isa=isa, stream=InlineStream()).report()
    assert report["kernels"].startswith(f"native, {isa} ")
    assert all(name in report["kernels"] for name in _native.available_isas())
    assert report["threads"].startswith("3 ")


@pytest.mark.parametrize(("activations", "digits"), [("int16", 2), ("int8", 1)])
def test_quantised_weights_meet_inputs_as_fine_as_the_device_was_told(activations: Activations, digits: int) -> None:
    device = CpuDevice(stream=InlineStream(), activations=activations)
    assert device.report()["activations"].startswith(f"{activations} ")
    form = Form("int8", 32, activation_digits=digits)
    tensor, x = form.random(16, 64), torch.randn(3, 64)
    out = device.kernels.linear(x, device.pack(tensor))
    exact = seen_inputs(form, x) @ tensor.dequantize().double().T
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)


def test_inputs_are_fine_by_default(device: CpuDevice) -> None:
    assert device.report()["activations"].startswith("int16 ")


def test_auto_chooses_the_best_instruction_set() -> None:
    assert _native.Context(1, "auto").isa == _native.available_isas()[-1]


def test_an_uploaded_array_is_the_same_memory(device: CpuDevice) -> None:
    array = np.arange(6, dtype=np.int32)
    tensor = device.upload(array)
    array[2] = 40
    assert tensor.tolist() == [0, 1, 40, 3, 4, 5]
    assert device.download(tensor) is not None
    assert np.shares_memory(device.download(tensor), array)


def test_a_read_only_array_is_uploaded_as_a_copy(device: CpuDevice) -> None:
    array = np.arange(3)
    array.flags.writeable = False
    tensor = device.upload(array)
    tensor[0] = 9
    assert array.tolist() == [0, 1, 2]


def test_a_vector_is_float32_and_does_not_keep_the_checkpoint_mapped(device: CpuDevice) -> None:
    stored = torch.arange(4, dtype=torch.float32)
    vector = device.vector(DenseTensor(stored))
    stored[0] = 7
    assert vector.tolist() == [0, 1, 2, 3]
    assert device.vector(DenseTensor(stored.bfloat16())).dtype == torch.float32


def test_read_bandwidth_is_a_plausible_number_of_bytes_per_second(device: CpuDevice) -> None:
    assert 1e8 < device.bandwidth() < 1e13


def test_threads_that_fell_asleep_between_kernels_take_part_again(device: CpuDevice) -> None:
    weight = device.pack(DenseTensor(torch.randn(600, 256)))
    x = torch.randn(40, 256)
    expected = device.kernels.linear(x, weight)
    for _ in range(20):
        time.sleep(0.003)
        assert torch.equal(device.kernels.linear(x, weight), expected)


def test_a_device_of_many_threads_ends_at_once_when_it_is_dropped() -> None:
    for _ in range(20):
        context = _native.Context(6, "auto")
        del context


def test_a_product_makes_no_pytorch_operator_compute_anything(device: CpuDevice) -> None:
    """The only operators are those that allocate results."""
    seen = set()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.add(str(function))
            return function(*args, **(kwargs or {}))

    weight = device.pack(DenseTensor(torch.randn(20, 12)))
    x, bias, ids = torch.randn(5, 12), torch.randn(20), torch.zeros(3, dtype=torch.int32)
    with Log():
        device.kernels.linear(x, weight, bias)
        device.kernels.gather(weight, ids)
    assert seen == {"aten.empty.memory_format"}


def test_a_quantised_cache_is_refused_where_its_kernels_have_not_been_made(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_context", SimpleNamespace(isa="neon_dotprod"))
    assert device.kv_block_bytes(1, 1, 64, 16, "bf16") == 4096
    for dtype in FACTORED:
        with pytest.raises(ConfigError, match="no kernels for neon_dotprod yet; use bf16 or fp32"):
            device.kv_block_bytes(1, 1, 64, 16, dtype)
