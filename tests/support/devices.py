"""Devices for tests that run on each of them; one that this checkout cannot offer is a skip with its reason."""

from __future__ import annotations

import functools

import pytest

from ropeway.devices.base import Device
from ropeway.devices.stream import InlineStream
from ropeway.errors import Unsupported

DEVICES = ("reference", "cpu")


@functools.cache
def device(name: str) -> Device:
    """The device, shared by all tests of the process."""
    if name == "reference":
        from ropeway.devices.reference import ReferenceDevice

        return ReferenceDevice(stream=InlineStream())
    try:
        from ropeway.devices.cpu.device import CpuDevice

        return CpuDevice(stream=InlineStream())
    except Unsupported as error:
        pytest.skip(error.message)
