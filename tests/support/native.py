"""The native kernels; a test module that imports this one is skipped where they are not built."""

from __future__ import annotations

import pytest

from ropeway.errors import Unsupported

try:
    from ropeway.devices.cpu import _native
except Unsupported as error:
    pytest.skip(error.message, allow_module_level=True)

CONTEXTS = {isa: _native.Context(2, isa) for isa in _native.available_isas()}
"""A context of two threads for every instruction set of this machine."""
