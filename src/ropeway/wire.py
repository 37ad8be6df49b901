"""msgspec structs with numpy arrays, as bytes: what goes from process to process, and never as pickle."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode_array(kind: type, value: Any) -> NDArray[Any]:
    dtype, shape, data = value
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Of a struct, or of a union of tagged ones."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
