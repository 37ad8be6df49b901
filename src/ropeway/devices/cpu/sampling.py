"""Choosing the next token of every row."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ropeway.devices.base import Sampled, SampleInputs
from ropeway.devices.cpu import _native


def sample(context: _native.Context, logits: Tensor, inputs: SampleInputs) -> Sampled:
    """See ``devices.base.Kernels.sample``. Where logits tie, lower ids rank first: in the argmax, in the top-k
    set, in the top-p set and among the likeliest tokens reported. NaN counts as -inf; if nothing else is left,
    token 0 is chosen. Rows that asked for no log-probabilities have NaN, and -1 for ids.

    Raises ``ValueError`` for arguments that do not fit together."""
    call = SampleCall(context, logits, inputs)
    call.run()
    return call.sampled


class SampleCall:
    """``sample``, its arguments checked and its results allocated now, to be run later, once."""

    def __init__(self, context: _native.Context, logits: Tensor, inputs: SampleInputs) -> None:
        self._kept = (logits, inputs)
        rows, vocabulary = logits.shape
        if logits.dtype != torch.float32 or vocabulary < 1 or (vocabulary > 1 and logits.stride(1) != 1):
            raise ValueError(f"logits must be float32 [s, vocabulary], not {logits.dtype} {list(logits.shape)}")
        _check(inputs, rows)
        token_ids = torch.empty(rows, dtype=torch.int32)
        most = int(inputs.top_logprobs.max()) if rows else -1
        logprobs = top_ids = top_values = None
        top = 0
        if most >= 0:
            top = min(most, vocabulary)
            logprobs = torch.empty(rows, dtype=torch.float32)
            top_ids = torch.empty((rows, top), dtype=torch.int32)
            top_values = torch.empty((rows, top), dtype=torch.float32)
        self.run = partial(
            _native.sample,
            context,
            logits.data_ptr(),
            rows,
            vocabulary,
            logits.stride(0),
            inputs.temperature.data_ptr(),
            inputs.top_k.data_ptr(),
            inputs.top_p.data_ptr(),
            inputs.min_p.data_ptr(),
            inputs.repetition_penalty.data_ptr(),
            inputs.presence_penalty.data_ptr(),
            inputs.frequency_penalty.data_ptr(),
            inputs.seeds.data_ptr(),
            inputs.tokens.data_ptr(),
            inputs.tokens.stride(0),
            inputs.slots.data_ptr(),
            inputs.prompt_lengths.data_ptr(),
            inputs.lengths.data_ptr(),
            inputs.bias_start.data_ptr(),
            inputs.bias_ids.data_ptr(),
            inputs.bias_values.data_ptr(),
            inputs.top_logprobs.data_ptr(),
            _address(inputs.mask_of),
            _address(inputs.masks),
            0 if inputs.masks is None else inputs.masks.shape[1],
            token_ids.data_ptr(),
            _address(logprobs),
            _address(top_ids),
            _address(top_values),
            top,
        )
        self.sampled = Sampled(token_ids, logprobs, top_ids, top_values)
        """There once it has run."""


def _check(inputs: SampleInputs, rows: int) -> None:
    """One length and the right types for every column: the kernel reads by address."""
    for names, dtype in _COLUMNS:
        for name in names:
            column: Tensor = getattr(inputs, name)
            if column.dtype != dtype or column.shape[0] != rows or not column.is_contiguous():
                raise ValueError(f"{name} must be contiguous {dtype} [{rows}], not {column.dtype} {list(column.shape)}")
    if inputs.bias_start.dtype != torch.int32 or inputs.bias_start.shape[0] != rows + 1:
        raise ValueError(f"bias_start must be int32 [{rows + 1}], not {list(inputs.bias_start.shape)}")
    if inputs.bias_ids.dtype != torch.int32 or inputs.bias_values.dtype != torch.float32:
        raise ValueError("biases must be int32 ids and float32 values")
    _check_masks(inputs, rows)
    if inputs.tokens.dtype != torch.int32 or (inputs.tokens.shape[1] > 1 and inputs.tokens.stride(1) != 1):
        raise ValueError("tokens must be int32 [slots, positions] with adjacent positions")


def _check_masks(inputs: SampleInputs, rows: int) -> None:
    mask_of, masks = inputs.mask_of, inputs.masks
    if (mask_of is None) != (masks is None):
        raise ValueError("mask_of and masks come together or not at all")
    if mask_of is None or masks is None:
        return
    if mask_of.dtype != torch.int32 or mask_of.shape != (rows,) or not mask_of.is_contiguous():
        raise ValueError(f"mask_of must be contiguous int32 [{rows}], not {mask_of.dtype} {list(mask_of.shape)}")
    if masks.dtype != torch.int32 or masks.dim() != 2 or not masks.is_contiguous():
        raise ValueError(f"masks must be contiguous int32 [m, words], not {masks.dtype} {list(masks.shape)}")
    if rows and int(mask_of.max()) >= len(masks):
        raise ValueError(f"mask_of names mask {int(mask_of.max())} of {len(masks)}")


_COLUMNS = (
    (
        (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ),
        torch.float32,
    ),
    (("top_k", "slots", "prompt_lengths", "lengths", "top_logprobs"), torch.int32),
    (("seeds",), torch.int64),
)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
