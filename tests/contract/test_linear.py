"""Products with packed weights and rows of them, for every form of weights and every instruction set."""

from __future__ import annotations

import threading
from typing import Literal

import pytest
import torch
from torch import Tensor

from ropeway.devices.base import DenseTensor, GroupedTensor
from ropeway.devices.reference import ReferenceKernels, ReferenceWeight
from ropeway.errors import Unsupported
from tests.support.matrices import FORMS, STORED_FORMS, Form, seen_inputs
from tests.support.native import CONTEXTS, _native  # isort: split

from ropeway.devices.cpu.elementwise import add_rms_norm, rms_norm, silu_and_mul
from ropeway.devices.cpu.linear import Norm, fused_linear, gather, linear
from ropeway.devices.cpu.weights import pack

every_form = pytest.mark.parametrize("form", FORMS, ids=str)
every_isa = pytest.mark.parametrize("isa", CONTEXTS)
ONE_FORM_PER_LAYOUT = [
    Form("fp32"),
    Form("bf16"),
    Form("fp16"),
    *(Form("int8", 32, activation_digits=digits) for digits in (2, 1)),
    *(Form("int4", 32, bits=4, activation_digits=digits) for digits in (2, 1)),
]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close_to_exact(out: Tensor, inputs: Tensor, weights: Tensor, bias: Tensor | None = None) -> None:
    """Within the worst case of float32 additions: k roundings of the sum of magnitudes.

    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)"""
    exact = inputs @ weights.T
    magnitude = inputs.abs() @ weights.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = (inputs.shape[1] + 2) * 2.0**-24 * magnitude
    assert out.dtype == torch.float32
    assert out.shape == exact.shape
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("form", STORED_FORMS, ids=str)
@pytest.mark.parametrize("n", [1, 15, 16, 33, 70])
def test_gathering_from_packed_weights_gives_the_dequantised_rows_bit_for_bit(form: Form, n: int) -> None:
    context = CONTEXTS["portable"]
    for k_steps in (1, 3, 8, 17):
        tensor = form.random(n, k_steps * form.k_step)
        weight = pack(context, tensor)
        assert weight.layout == form.layout
        assert weight.shape == tensor.shape
        ids = torch.tensor([*range(n), 0, n - 1], dtype=torch.int32)
        assert torch.equal(gather(context, weight, ids), tensor.dequantize()[ids.long()])


def test_gathering_keeps_every_half_precision_value() -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(-1, 64)
    context = CONTEXTS["portable"]
    ids = torch.arange(values.shape[0], dtype=torch.int32)
    rows = gather(context, pack(context, DenseTensor(values)), ids)
    assert torch.equal(rows.nan_to_num(nan=7.0), values.float().nan_to_num(nan=7.0))


@every_isa
@every_form
def test_a_product_is_the_exact_one_up_to_float32_additions(isa: str, form: Form) -> None:
    for rows, n, k_steps in [(1, 1, 1), (2, 17, 3), (3, 40, 2), (13, 70, 5), (30, 33, 9)]:
        k = k_steps * form.k_step
        tensor, x, bias = form.random(n, k), normal(rows, k), normal(n, seed=2)
        weight = pack(CONTEXTS[isa], tensor, form.activation_digits)
        inputs, weights = seen_inputs(form, x), exact_weights(tensor)
        assert_close_to_exact(linear(CONTEXTS[isa], x, weight), inputs, weights)
        assert_close_to_exact(linear(CONTEXTS[isa], x, weight, bias), inputs, weights, bias)


def exact_weights(tensor: DenseTensor | GroupedTensor) -> Tensor:
    """scale * code + minimum without rounding, float64."""
    if isinstance(tensor, DenseTensor):
        return tensor.data.double()
    return torch.cat(
        [
            tensor.codes[:, g * tensor.group : (g + 1) * tensor.group].double() * tensor.scales[:, g, None].double()
            + (0 if tensor.minimums is None else tensor.minimums[:, g, None].double())
            for g in range(tensor.scales.shape[1])
        ],
        dim=1,
    )


@every_isa
@every_form
def test_products_of_small_integers_are_exact(isa: str, form: Form) -> None:
    """Every product and sum fits in 24 bits, so the smallest error of place or sign shows."""
    rows, n, k = 9, 53, 6 * form.k_step
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-126, 127, (rows, k), generator=generator).float()
    x[:, ::16] = 127.0  # so that quantised inputs have scale 1
    tensor = form.random(n, k)
    if isinstance(tensor, GroupedTensor):
        scales = torch.randint(1, 4, tensor.scales.shape, generator=generator).to(form.scale_dtype)
        minimums = None if tensor.minimums is None else tensor.minimums.round()
        tensor = GroupedTensor(tensor.codes, scales, minimums, tensor.group, tensor.bits)
    else:
        tensor = DenseTensor((tensor.data * 4).round())
    exact = x.double() @ exact_weights(tensor).T
    assert exact.abs().max() < 1 << 24
    assert torch.equal(linear(CONTEXTS[isa], x, pack(CONTEXTS[isa], tensor, form.activation_digits)).double(), exact)


@every_isa
@pytest.mark.parametrize("form", [form for form in FORMS if form.group and form.scale_dtype == torch.float32], ids=str)
def test_the_sum_of_a_group_is_exact_and_rounded_once(isa: str, form: Form) -> None:
    """Inputs that are their own codes, at the ends of their digits, times the largest weights."""
    k, limit = form.group, 127 if form.activation_digits == 1 else 127 * 256
    signs = torch.tensor([1.0, -1.0]).repeat(k // 2)
    edges = torch.tensor([0, 127, 128, 129, 383, 384, 385, limit - 129, limit - 128, limit - 127, limit]).clamp(
        0, limit
    )
    x = torch.cat([edges.float().outer(torch.ones(k)), edges.outer(signs), (normal(9, k) * limit / 3).round()])
    x = torch.cat([x, -x]).clamp(-limit, limit)
    x[:, 5] = limit  # so that scales are 1
    low, high = (-128, 127) if form.bits == 8 else (0, 15) if form.minimums else (-8, 7)
    highest = torch.stack([torch.ones(k, dtype=torch.bool), signs > 0, normal(k) > 0, normal(k, seed=2) > 0.5])
    codes = torch.where(torch.cat([highest, ~highest]), high, low).to(torch.int8)
    ones = torch.ones(len(codes), 1)
    tensor = GroupedTensor(codes, ones, 2 * ones if form.minimums else None, form.group, form.bits)
    expected = (x.double() @ codes.double().T).float()
    if form.minimums:
        expected = (expected.double() + 2 * x.double().sum(1, keepdim=True)).float()
    weight = pack(CONTEXTS[isa], tensor, form.activation_digits)
    assert torch.equal(linear(CONTEXTS[isa], x, weight), expected)
    assert torch.equal(linear(CONTEXTS[isa], x[7:8].contiguous(), weight), expected[7:8])


@every_isa
@pytest.mark.parametrize("bits", [8, 4])
def test_a_second_digit_makes_inputs_more_than_a_hundred_times_finer(isa: str, bits: Literal[4, 8]) -> None:
    tensor, x = Form("int8" if bits == 8 else "int4", 32, bits=bits).random(40, 512), normal(20, 512)
    exact = x.double() @ exact_weights(tensor).T
    coarse, fine = (
        (linear(CONTEXTS[isa], x, pack(CONTEXTS[isa], tensor, digits)) - exact).square().mean().sqrt()
        for digits in (1, 2)
    )
    assert 100 < coarse / fine < 300


@every_isa
@every_form
def test_products_agree_with_the_reference_device(isa: str, form: Form) -> None:
    k = 12 * form.k_step
    tensor, x, bias = form.random(30, k), normal(20, k), normal(30, seed=2)
    expected = ReferenceKernels().linear(x, ReferenceWeight(tensor, form.activation_digits), bias)
    out = linear(CONTEXTS[isa], x, pack(CONTEXTS[isa], tensor, form.activation_digits), bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@every_isa
@every_form
def test_a_row_has_the_same_bits_in_every_batch(isa: str, form: Form) -> None:
    k = 7 * form.k_step
    tensor, x, bias = form.random(75, k), normal(110, k), normal(75, seed=2)
    weight = pack(CONTEXTS[isa], tensor, form.activation_digits)
    alone = torch.cat([linear(CONTEXTS[isa], row[None], weight, bias) for row in x])
    for first, last in [(0, 110), (0, 2), (3, 6), (5, 9), (0, 12), (7, 20), (40, 65), (8, 105), (109, 110)]:
        together = linear(CONTEXTS[isa], x[first:last].contiguous(), weight, bias)
        assert torch.equal(together, alone[first:last])


@every_isa
@pytest.mark.parametrize("form", ONE_FORM_PER_LAYOUT, ids=str)
@pytest.mark.parametrize("n", [48, 100])
def test_a_row_has_the_same_bits_on_any_number_of_threads(isa: str, form: Form, n: int) -> None:
    k = 16416  # beyond every block of k
    tensor, x = form.random(n, k), normal(14, k)
    outs = []
    for threads in (1, 2, 5):
        context = _native.Context(threads, isa)
        weight = pack(context, tensor, form.activation_digits)
        outs.append(linear(context, x, weight))
        outs.append(torch.cat([linear(context, x[:5].contiguous(), weight), linear(context, x[5:], weight)]))
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert_close_to_exact(outs[0], seen_inputs(form, x), exact_weights(tensor))


@every_isa
@every_form
@pytest.mark.parametrize("rows", [1, 27])
def test_fused_products_have_the_bits_of_the_kernels_one_after_the_other(isa: str, form: Form, rows: int) -> None:
    context, k, seed = CONTEXTS[isa], 5 * form.k_step, 3
    x, norm = normal(rows, k), Norm(normal(k, seed=7), 1e-5)
    normed = rms_norm(context, x, *norm)
    weights = [pack(context, form.random(n, k, seed := seed + 1), form.activation_digits) for n in (70, 33, 33, 1)]
    biases = [normal(70, seed=8), None, normal(33, seed=9), None]
    q, k1, v, single = parts = list(zip(weights, biases, strict=True))
    alone = [linear(context, normed, *part) for part in parts]
    for fused in (fused_linear(context, x, [q, k1, v], norm=norm), fused_linear(context, normed, [q, k1, v])):
        assert all(torch.equal(a, b) for a, b in zip(fused, alone[:3], strict=True))
    (gated,) = fused_linear(context, x, [k1, v], gated=True, norm=norm)
    assert torch.equal(gated, silu_and_mul(context, alone[1], alone[2]))
    for part, unfused in ((q, alone[0]), (single, alone[3])):
        residual = normal(*unfused.shape, seed=10)
        (added,) = fused_linear(context, x, [part], residual=residual, norm=norm)
        expected = add_rms_norm(context, unfused, residual, torch.ones(unfused.shape[1]), 1.0)[1]
        assert torch.equal(added, expected)


@every_isa
@pytest.mark.parametrize("rows", [1, 14, 110])
def test_parts_of_a_product_may_have_different_layouts(isa: str, rows: int) -> None:
    context, k = CONTEXTS[isa], 160
    x, norm = normal(rows, k), Norm(normal(k, seed=7), 1e-6)
    for forms in zip(FORMS, FORMS[5:] + FORMS[:5], FORMS[11:] + FORMS[:11], strict=True):
        parts = [(pack(context, form.random(40, k), form.activation_digits), None) for form in forms]
        alone = [linear(context, rms_norm(context, x, *norm), *part) for part in parts]
        fused = fused_linear(context, x, parts, norm=norm)
        assert all(torch.equal(a, b) for a, b in zip(fused, alone, strict=True))
        (gated,) = fused_linear(context, x, parts[:2], gated=True, norm=norm)
        assert torch.equal(gated, silu_and_mul(context, alone[0], alone[1]))


@every_isa
@every_form
def test_weights_and_sums_beyond_a_matrix_never_reach_a_result(isa: str, form: Form) -> None:
    """Poison what lies before and after a matrix that ends in the middle of a panel, and around its results."""
    context, k, n = CONTEXTS[isa], 3 * form.k_step, 19
    weight, x = pack(context, form.random(n, k), form.activation_digits), normal(13, k)
    around = torch.full((15, k), float("nan"))
    around[1:14] = x
    out = torch.full((15 * n,), float("nan"))
    _native.linear(context, around[1:].data_ptr(), 13, [(weight.native, 0, out[n:].data_ptr())], 0, False, 0, 0.0)
    assert torch.equal(out[n : 14 * n].reshape(13, n), linear(context, x, weight))
    assert out[:n].isnan().all()
    assert out[14 * n :].isnan().all()


def test_a_residual_may_be_the_memory_of_the_result() -> None:
    for isa, context in CONTEXTS.items():
        for k in (64, 20000):  # in one block of k, and in several
            weight, x, residual = pack(context, Form("bf16").random(50, k)), normal(14, k), normal(14, 50, seed=2)
            (expected,) = fused_linear(context, x, [(weight, None)], residual=residual)
            address = residual.data_ptr()
            _native.linear(context, x.data_ptr(), 14, [(weight.native, 0, address)], address, False, 0, 0.0)
            assert torch.equal(residual, expected), isa


@every_isa
def test_an_empty_batch_gives_an_empty_result(isa: str) -> None:
    for form in FORMS:
        weight = pack(CONTEXTS[isa], form.random(20, 2 * form.k_step), form.activation_digits)
        x = torch.empty(0, 2 * form.k_step)
        assert linear(CONTEXTS[isa], x, weight).shape == (0, 20)
        assert fused_linear(CONTEXTS[isa], x, [(weight, None)] * 2, gated=True)[0].shape == (0, 20)
        assert gather(CONTEXTS[isa], weight, torch.empty(0, dtype=torch.int32)).shape == (0, 2 * form.k_step)


@every_isa
@every_form
def test_inputs_of_extreme_size_are_multiplied_without_overflow_or_nonsense(isa: str, form: Form) -> None:
    k = 4 * form.k_step
    tensor = form.random(40, k)
    weight, exact = pack(CONTEXTS[isa], tensor, form.activation_digits), exact_weights(tensor)
    for size in (1e-45, 1e-40, 1e-30, 1e30, 1e36):
        x = normal(3, k) * size
        x[1] = 0.0
        out = linear(CONTEXTS[isa], x, weight)
        assert out.isfinite().all()
        assert (out[1] == 0).all()
        # Quantising costs 1/254 of the largest input per product; below the normal range all of an input may be lost.
        largest = x.double().abs().amax(1, keepdim=True) * exact.abs().sum(1)
        assert ((out.double() - x.double() @ exact.T).abs() <= largest / 100 + k * 1e-36).all()


@every_isa
@every_form
def test_an_input_that_is_not_finite_poisons_its_own_row_only(isa: str, form: Form) -> None:
    k = 3 * form.k_step
    tensor, x = form.random(40, k), normal(14, k)
    weight = pack(CONTEXTS[isa], tensor, form.activation_digits)
    clean = linear(CONTEXTS[isa], x, weight)
    others = [row for row in range(14) if row != 5]
    for bad in (float("inf"), float("-inf"), float("nan")):
        x[5, k // 2] = bad
        out = linear(CONTEXTS[isa], x, weight)
        assert not out[5].isfinite().any()
        assert torch.equal(out[others], clean[others])


@every_isa
def test_padding_of_a_weight_never_reaches_a_result(isa: str) -> None:
    """Outputs beyond n and a k that is padded to pairs must not turn an infinite input into NaN."""
    context = CONTEXTS[isa]
    for form in (Form("bf16"), Form("fp32"), Form("fp16")):
        weights = torch.ones(3, 5)
        x = torch.ones(2, 5)
        x[0, 4] = float("inf")
        tensor = DenseTensor(weights.to(form.random(1, 1).data.dtype))
        assert linear(context, x, pack(context, tensor)).tolist() == [[float("inf")] * 3, [5.0] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_and_columns_cut_out_of_a_larger_matrix_are_packed_as_they_are(dtype: torch.dtype) -> None:
    context = CONTEXTS["portable"]
    whole = normal(50, 40).to(dtype)
    for part in (whole[3:20], whole[:, 4:21], whole.T):
        ids = torch.arange(part.shape[0], dtype=torch.int32)
        assert torch.equal(gather(context, pack(context, DenseTensor(part)), ids), part.float())


def test_threads_that_share_a_context_do_not_disturb_each_other() -> None:
    context = _native.Context(3, "auto")
    work = []
    for seed, form in enumerate(FORMS[:4]):
        tensor, x = form.random(130, 4 * form.k_step, seed), normal(40, 4 * form.k_step, seed=seed)
        weight = pack(context, tensor)
        work.append((x, weight, linear(context, x, weight)))
    wrong = []

    def repeat(x: Tensor, weight: object, expected: Tensor) -> None:
        wrong.extend(x.shape for _ in range(200) if not torch.equal(linear(context, x, weight), expected))

    threads = [threading.Thread(target=repeat, args=item) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    context = CONTEXTS["portable"]
    weight = pack(context, Form("fp32").random(4, 6))
    with pytest.raises(ValueError, match=r"\[rows, 6\]"):
        linear(context, torch.zeros(2, 5), weight)
    with pytest.raises(ValueError, match="float64"):
        linear(context, torch.zeros(2, 6, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match="contiguous"):
        linear(context, torch.zeros(6, 2).T, weight)
    with pytest.raises(ValueError, match="bias"):
        linear(context, torch.zeros(2, 6), weight, torch.zeros(5))
    with pytest.raises(ValueError, match="int32"):
        gather(context, weight, torch.zeros(2, dtype=torch.int64))


def test_parts_that_do_not_fit_together_are_refused() -> None:
    context = CONTEXTS["portable"]
    part, narrow, other = ((pack(context, Form("fp32").random(n, k)), None) for n, k in ((4, 6), (3, 6), (4, 7)))
    x = torch.zeros(2, 6)
    for parts in ([], [part] * 4):
        with pytest.raises(ValueError, match="1 to 3 parts"):
            fused_linear(context, x, parts)
    with pytest.raises(ValueError, match="share their k"):
        fused_linear(context, x, [part, other])
    with pytest.raises(ValueError, match="one part"):
        fused_linear(context, x, [part, part], residual=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="residual"):
        fused_linear(context, x, [part], residual=torch.zeros(2, 6))
    for parts in ([part], [part, narrow], [part] * 3):
        with pytest.raises(ValueError, match="gated"):
            fused_linear(context, x, parts, gated=True)
    with pytest.raises(ValueError, match="norm weight"):
        fused_linear(context, x, [part], norm=Norm(torch.ones(4), 1e-6))


@pytest.mark.parametrize("row", [-1, 4, 2**31 - 1])
def test_a_row_outside_the_table_is_refused(row: int) -> None:
    context = CONTEXTS["portable"]
    weight = pack(context, Form("fp32").random(4, 6))
    with pytest.raises(IndexError, match="of a table of 4"):
        gather(context, weight, torch.tensor([0, row], dtype=torch.int32))


def test_weights_that_no_layout_holds_are_refused_by_name() -> None:
    context = CONTEXTS["portable"]
    with pytest.raises(Unsupported, match="float64"):
        pack(context, DenseTensor(torch.zeros(2, 2, dtype=torch.float64)))
    with pytest.raises(Unsupported, match="matrix"):
        pack(context, DenseTensor(torch.zeros(2)))
    with pytest.raises(Unsupported, match="groups of 64"):
        pack(context, GroupedTensor(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1), None, 64, 8))


def test_a_packed_weight_takes_little_more_than_its_numbers() -> None:
    context = CONTEXTS["portable"]
    bits = {str(form): pack(context, form.random(256, 512)).nbytes * 8 / (256 * 512) for form in FORMS}
    assert bits["bf16"] == 16
    assert bits["8-bit-groups-of-32-float16"] == 8.5
    assert bits["4-bit-groups-of-32-float16"] == 4.5
    assert bits["4-bit-groups-of-32-float16-minimums"] == 5
