"""Random matrices in every form that a checkpoint can hold, and what products with them see of their inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ropeway.devices.base import DenseTensor, GroupedTensor, HostTensor, Layout


@dataclass(frozen=True)
class Form:
    """How a matrix is stored, the layout it is packed into, and the digits that its inputs are quantised to."""

    layout: Layout
    group: int = 0
    minimums: bool = False
    scale_dtype: torch.dtype = torch.float32
    bits: Literal[4, 8] = 8
    activation_digits: int = 2

    def __str__(self) -> str:
        if not self.group:
            return self.layout
        parts = [f"{self.bits}-bit", f"groups-of-{self.group}", str(self.scale_dtype).removeprefix("torch.")]
        if self.minimums:
            parts.append("minimums")
        if self.activation_digits == 1:
            parts.append("int8-inputs")
        return "-".join(parts)

    @property
    def k_step(self) -> int:
        """Every k is a multiple of it."""
        return self.group or 1

    def random(self, n: int, k: int, seed: int = 0) -> HostTensor:
        generator = torch.Generator().manual_seed(seed)
        if not self.group:
            return DenseTensor(torch.randn(n, k, generator=generator).to(DENSE_DTYPES[self.layout]))
        low, high = (-128, 127) if self.bits == 8 else (0, 15) if self.minimums else (-8, 7)
        codes = torch.randint(low, high + 1, (n, k), generator=generator, dtype=torch.int8)
        scales = torch.rand(n, k // self.group, generator=generator) / high
        minimums = torch.randn(n, k // self.group, generator=generator) if self.minimums else None
        return GroupedTensor(
            codes,
            scales.to(self.scale_dtype),
            None if minimums is None else minimums.to(self.scale_dtype),
            self.group,
            self.bits,
        )


DENSE_DTYPES: dict[Layout, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

STORED_FORMS = [
    *(Form(layout) for layout in DENSE_DTYPES),
    *(
        # Four-bit codes in groups of 16 take a byte each.
        Form("int4" if bits == 4 and group == 32 else "int8", group, minimums, scale_dtype, bits)
        for bits in (8, 4)
        for group in (32, 16)
        for minimums in (False, True)
        for scale_dtype in (torch.float16, torch.float32)
    ),
]

FORMS = [*STORED_FORMS, *(replace(form, activation_digits=1) for form in STORED_FORMS if form.group)]
"""Each form with every kind of inputs."""


def seen_inputs(form: Form, x: Tensor) -> Tensor:
    """What a product with a matrix of this form sees of its inputs [t, k]: rounded, or quantised per row and group
    of 32 to codes of one or two digits (half a group at the end of k is one of its own); float64."""
    if form.layout == "bf16":
        return x.bfloat16().double()
    if not form.group:
        return x.double()
    seen = torch.empty(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], 32):
        part = x[:, start : start + 32]
        scale = part.abs().amax(1, keepdim=True) / (127 if form.activation_digits == 1 else 127 * 256)
        inverse = torch.where(scale > 0, 1 / scale, 0)
        seen[:, start : start + 32] = (part * inverse).round().double() * scale.double()
    return seen
