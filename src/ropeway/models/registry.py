"""Which class runs which architecture, and loading a checkpoint into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ropeway.devices.base import Device
from ropeway.errors import ConfigError, LoadError, Unsupported
from ropeway.loading.checkpoint import Checkpoint
from ropeway.models.llama import Llama
from ropeway.models.model import Model
from ropeway.models.qwen2 import Qwen2
from ropeway.models.qwen3 import Qwen3
from ropeway.models.rope import rope_table
from ropeway.models.spec import DecoderSpec
from ropeway.models.weights import Dtype, OnLoad, Progress, Weights
from ropeway.parallel.communicator import Collectives


class _ModelClass(Protocol):
    def __call__(self, spec: DecoderSpec, weights: Weights, rope_table: Tensor) -> Model: ...


ARCHITECTURES: dict[str, _ModelClass] = {
    "LlamaForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of the config's ``architectures`` that is supported. Raises ``LoadError``, ``Unsupported``."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise LoadError(f"config.json: architectures is {names!r}; it must list the model's class names")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise Unsupported(
        f"architecture {', '.join(map(str, names))} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """The checkpoint's model without its weights. Raises ``LoadError``, ``Unsupported``."""
    return DecoderSpec.from_config(
        checkpoint.config, checkpoint.generation_config, architecture=architecture_of(checkpoint.config)
    )


def load_model(
    checkpoint: Checkpoint,
    device: Device,
    communicator: Collectives,
    *,
    dtype: Dtype = "auto",
    weights: OnLoad = "auto",
    max_model_len: int | None = None,
    fused: bool = False,
    progress: Progress | None = None,
) -> Model:
    """This rank's part of a checkpoint's model, packed for ``device``.

    ``dtype`` converts unquantised matrices, ``weights`` quantises them (and goes before ``dtype``); ``max_model_len``
    (default: the model's context) is how many positions can be computed; ``fused``: products and the sums over their
    parts on other ranks are one operation (``Collectives.reduce_product``); ``progress`` is called with parameters done
    and in all. Raises ``LoadError``, ``Unsupported`` for a setting or architecture by name, ``ConfigError`` for an
    impossible split or length, or weights that cannot be had.
    """
    spec = read_spec(checkpoint)
    positions = spec.context_length if max_model_len is None else max_model_len
    if not 1 <= positions <= spec.context_length:
        raise ConfigError(
            f"max_model_len is {positions}; this model's context allows 1 to {spec.context_length}",
            param="max_model_len",
        )
    table = device.upload(rope_table(spec.rope, spec.head_dim, positions).numpy())
    source = Weights(checkpoint, device, communicator, dtype=dtype, on_load=weights, fused=fused, progress=progress)
    model = ARCHITECTURES[spec.architecture](spec, source, table)
    source.finish()
    return model
