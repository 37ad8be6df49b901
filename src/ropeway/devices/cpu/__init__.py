"""The CPU device. All of its modules need the compiled kernels, ``_native``."""

from ropeway.errors import Unsupported

try:
    from ropeway.devices.cpu import _native as _native
except ImportError as error:
    raise Unsupported(
        f"the native CPU kernels are not in this installation ({error}); install a C++20 compiler and install "
        "Ropeway again, or use --device reference, which needs none"
    ) from error
