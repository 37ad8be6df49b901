"""What the steps of one device take, as a file: fitted from a real run, read by the simulator."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from ropeway.errors import ConfigError

DEFAULT_COST_MODEL = "rtx4090-llama-3.1-8b"
_FOLDER = resources.files("ropeway.simulation") / "cost_models"

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that computes t tokens, whose rows attend to k cached ones (their own included), takes
    ``a_s + b_s_per_token * t + c_s_per_kv_token * k`` seconds, and its copies take their bytes over the bandwidth,
    before it. The other fields are what an engine on this device is given by default."""

    name: str
    a_s: Seconds
    b_s_per_token: Seconds
    c_s_per_kv_token: Seconds
    host_s: Seconds = 0.0
    """What the host takes for a step while the device waits."""
    kv_bytes_per_token: Count = 131072
    """Keys and values of one token, over all layers."""
    copy_bytes_per_s: Annotated[float, msgspec.Meta(gt=0.0)] = 2e10
    """Between the device's memory and the host's."""
    kv_tokens: Count
    """Tokens that the KV pool of one engine holds."""
    max_num_seqs: Count = 256
    max_batched_tokens: Count = 2048
    block_size: Count = 16
    engines: Count = 1
    """Of the run that it was fitted from; requests went to them in turn."""
    lockstep: bool = False
    """Whether so many engines exchange data in every layer (data-parallel attention with expert parallelism), so that
    their steps begin together and last as long as the longest."""
    ahead: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    """Steps which the engine of that run planned before the running one had ended."""
    measured: str = ""
    """Name of the trace with that run."""
    provenance: str = ""
    """Where the numbers come from."""

    @property
    def group_size(self) -> int:
        """How many engines step together."""
        return self.engines if self.lockstep else 1

    def step_s(self, tokens: int, kv_tokens: int) -> float:
        """Seconds for a step of so many tokens; ``kv_tokens``: the sum over its rows of start + count."""
        return self.a_s + self.b_s_per_token * tokens + self.c_s_per_kv_token * kv_tokens

    def copy_s(self, blocks: int, block_size: int) -> float:
        """Seconds for copying so many blocks."""
        return blocks * block_size * self.kv_bytes_per_token / self.copy_bytes_per_s

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def shipped_cost_models() -> list[str]:
    """Names of those that come with Ropeway."""
    return sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir() if file.name.endswith(".json"))


def read_cost_model(name: str) -> CostModel:
    """A shipped cost model by its name, or the one in a file.

    Raises ``ConfigError`` for a name that is neither, and naming file and field for a file that holds none."""
    if name in shipped_cost_models():
        return _parse((_FOLDER / f"{name}.json").read_bytes(), name)
    try:
        data = Path(name).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no cost model {name!r}: no file of that name, and those shipped are "
            f"{', '.join(shipped_cost_models())}; ropeway bench fit makes one",
            param="cost_model",
        ) from error
    except OSError as error:
        raise ConfigError(f"cost model {name} cannot be read: {error.strerror}", param="cost_model") from error
    return _parse(data, name)


def _parse(data: bytes, where: str) -> CostModel:
    try:
        model = msgspec.json.decode(data, type=CostModel)
    except msgspec.DecodeError as error:
        raise ConfigError(f"cost model {where}: {error}", param="cost_model") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cost model {where} is not UTF-8 text: {error.reason}", param="cost_model") from error
    coefficients = (model.a_s, model.b_s_per_token, model.c_s_per_kv_token)
    if not math.isfinite(sum(coefficients)) or not math.isfinite(model.copy_bytes_per_s):
        raise ConfigError(f"cost model {where} holds a number that is not finite", param="cost_model")
    if model.step_s(1, 1) <= 0.0:
        raise ConfigError(
            f"cost model {where} says that steps take no time; one of a_s, b_s_per_token and c_s_per_kv_token must be "
            "above 0",
            param="cost_model",
        )
    if model.block_size.bit_count() != 1:
        raise ConfigError(
            f"cost model {where}: block_size {model.block_size} must be a power of two", param="cost_model"
        )
    return model
