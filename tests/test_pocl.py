"""Naming the processor for PoCL's compiler, on a structure of our own in the place of the driver's."""

from __future__ import annotations

import ctypes
import platform

import pytest

from kernels import pocl

POCL = "OpenCL 3.0 PoCL 3.0-rc2  Linux, Release"
pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="the remedy is for Linux on x86-64"
)


class Device:
    """A structure of 1,024 bytes with pointers to texts among its numbers."""

    def __init__(self, *texts: str) -> None:
        self.texts = [ctypes.create_string_buffer(text.encode()) for text in texts]
        self.words = (ctypes.c_uint64 * 128)(*range(128))
        for i, text in enumerate(self.texts):
            self.words[5 + 3 * i] = ctypes.addressof(text)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    def text(self, i: int = 0) -> str:
        return ctypes.string_at(self.words[5 + 3 * i]).decode()


@pytest.mark.parametrize(
    ("name", "level", "named"),
    [
        ("generic", "haswell", "haswell"),
        ("generic", "skylake-avx512", "skylake-avx512"),
        ("znver3", "skylake-avx512", "skylake-avx512"),  # Zen 4, which this LLVM does not know
        ("znver3", "haswell", ""),  # a Zen 3
        ("skylake-avx512", "skylake-avx512", ""),
    ],
)
def test_a_wrong_name_is_replaced(monkeypatch: pytest.MonkeyPatch, name: str, level: str, named: str) -> None:
    monkeypatch.setattr(pocl, "host_cpu_level", lambda: level)
    monkeypatch.setattr(pocl, "_names", {})
    device = Device("x86_64", name)
    assert pocl.name_generic_cpu(device.address, POCL) == named
    assert (device.text(0), device.text(1)) == ("x86_64", named or name)
    assert pocl.name_generic_cpu(device.address, POCL) == named  # asked again


@pytest.mark.parametrize(("texts", "version"), [(("generic", "generic"), POCL), (("generic",), "OpenCL 3.0 CUDA 13.0")])
def test_nothing_is_touched_in_doubt(monkeypatch: pytest.MonkeyPatch, texts: tuple[str, ...], version: str) -> None:
    monkeypatch.setattr(pocl, "_names", {})
    device = Device(*texts)
    assert pocl.name_generic_cpu(device.address, version) == ""
    assert device.text() == "generic"
