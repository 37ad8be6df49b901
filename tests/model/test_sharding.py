"""Models cut over several ranks against the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropeway.devices.base import Device
from ropeway.errors import ConfigError
from ropeway.loading.open import open_checkpoint
from ropeway.models.model import Model
from ropeway.models.registry import load_model
from ropeway.parallel.communicator import Collectives, SingleProcess
from tests.support.devices import device
from tests.support.ranks import run_ranks
from tests.support.stepper import Stepper
from tests.support.tiny_models import tiny_checkpoint

IDS = list(range(3, 60))


def load(variant: str, dev: Device, communicator: Collectives) -> Model:
    return load_model(open_checkpoint(tiny_checkpoint(variant)), dev, communicator)


@pytest.mark.report("vllm-project/vllm#19022")
@pytest.mark.report("vllm-project/vllm#8017")
@pytest.mark.report("vllm-project/vllm#8055")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biased", "qwen2", "qwen3-tied-biased"])
def test_ranks_compute_together_what_one_computes_alone(variant: str, size: int) -> None:
    reference = device("reference")
    alone = load(variant, reference, SingleProcess())
    want = Stepper(alone, reference).prefill(IDS, chunk=20)

    def work(communicator: Collectives) -> tuple[Model, Tensor]:
        model = load(variant, reference, communicator)
        return model, Stepper(model, reference).prefill(IDS, chunk=20)

    results, collectives = run_ranks(size, work)
    for model, logits in results:
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5 * float(want.abs().max()))
        assert model.num_kv_heads == max(alone.num_kv_heads // size, 1)
        assert model.weight_bytes < 0.7 * alone.weight_bytes
    steps = -(-len(IDS) // 20)
    assert collectives == steps * (2 * alone.num_layers + 2)  # two per layer, the embedding, the logits


@pytest.mark.report("vllm-project/vllm#47528")
@pytest.mark.parametrize(("size", "what"), [(3, "key-value heads"), (8, "attention heads")])
def test_a_split_that_does_not_come_out_even_is_refused_at_load(size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what}.* {size} ranks"):
        run_ranks(size, lambda communicator: load("llama", device("reference"), communicator))
