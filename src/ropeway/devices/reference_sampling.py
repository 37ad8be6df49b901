"""Sampling on the reference device: one row after the other, in the order ``devices.base.Kernels.sample`` gives."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ropeway.devices.base import Sampled, SampleInputs, philox_uniform


def sample(logits: Tensor, inputs: SampleInputs) -> Sampled:
    """Choose a token per row; see ``devices.base.Kernels.sample``. Equal logits rank by lower id first."""
    rows = logits.shape[0]
    adjusted = logits.clone()
    for row in range(rows):
        adjust(adjusted[row], inputs, row)

    seeds, lengths = inputs.seeds.numpy().view(np.uint64), inputs.lengths.numpy().astype(np.uint64)
    uniforms = philox_uniform(seeds, lengths).tolist()
    chosen = [choose(adjusted[row], inputs, row, uniforms[row]) for row in range(rows)]
    token_ids = torch.tensor(chosen, dtype=torch.int32)

    most = int(inputs.top_logprobs.max()) if rows else -1
    if most < 0:
        return Sampled(token_ids, None, None, None)
    logprobs = adjusted.double().log_softmax(-1).float()
    logprobs[(adjusted == float("-inf")).all(-1)] = float("-inf")  # nothing is left
    top, top_ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return Sampled(
        token_ids,
        logprobs.gather(1, token_ids.long()[:, None])[:, 0],
        top_ids[:, :most].int(),
        top[:, :most].contiguous(),
    )


def adjust(logits: Tensor, inputs: SampleInputs, row: int) -> None:
    """Apply penalties, then biases, to one row's logits (float32 [vocabulary]) in place."""
    history = inputs.tokens[int(inputs.slots[row]), : int(inputs.lengths[row])].long()
    repetition = inputs.repetition_penalty[row]
    if repetition != 1:
        seen = torch.bincount(history, minlength=len(logits)) > 0
        logits[seen] = torch.where(logits > 0, logits / repetition, logits * repetition)[seen]
    presence, frequency = inputs.presence_penalty[row], inputs.frequency_penalty[row]
    if presence != 0 or frequency != 0:
        counts = torch.bincount(history[int(inputs.prompt_lengths[row]) :], minlength=len(logits))
        logits -= presence * (counts > 0) + frequency * counts
    biases = slice(int(inputs.bias_start[row]), int(inputs.bias_start[row + 1]))
    logits.index_add_(0, inputs.bias_ids[biases].long(), inputs.bias_values[biases])
    allowed = allowed_tokens(inputs, row, len(logits))
    if allowed is not None:
        logits[~allowed] = float("-inf")


def allowed_tokens(inputs: SampleInputs, row: int, vocabulary: int) -> Tensor | None:
    """bool [vocabulary]: what the row's mask allows; None: everything."""
    if inputs.mask_of is None or inputs.masks is None or int(inputs.mask_of[row]) < 0:
        return None
    words = inputs.masks[int(inputs.mask_of[row])].numpy()
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocabulary]
    return torch.from_numpy(np.pad(bits, (0, vocabulary - len(bits))).astype(np.bool_))


def choose(logits: Tensor, inputs: SampleInputs, row: int, uniform: float) -> int:
    """The token of one row, from its adjusted logits."""
    allowed = allowed_tokens(inputs, row, len(logits))
    if allowed is not None and not (logits > float("-inf")).any():
        return int(allowed.int().argmax())
    temperature = float(inputs.temperature[row])
    if temperature == 0:
        return int(logits.argmax())
    ranked, ids = (logits.double() / temperature).sort(descending=True, stable=True)
    top_k = int(inputs.top_k[row])
    if top_k > 0:
        ranked, ids = ranked[:top_k], ids[:top_k]
    likelihood = ranked.softmax(-1)
    before = likelihood.cumsum(-1) - likelihood
    top_p = float(inputs.top_p[row])
    kept = likelihood >= float(inputs.min_p[row]) * likelihood[0]
    if top_p < 1:
        kept &= before < top_p
    kept[0] = True
    ids, order = ids[kept].sort()
    cumulated = likelihood[kept][order].cumsum(-1)
    passed = cumulated > uniform * cumulated[-1]
    return int(ids[int(passed.int().argmax())])
