"""The C++ kernels that read NVFP4: dequantize and the GEMM tactics against float64."""

import pytest
import torch
from torch import Tensor

kernels = pytest.importorskip("hotop._nvfp4")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TACTICS = ["gemm", "gemm_blas", "gemm_blas_wide", "gemm_int8", "gemm_int8_wide", "gemm_scalar"]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.fixture(params=kernels.available_isas())
def isa(request):
    before = kernels.isa()
    kernels.set_isa(request.param)
    yield request.param
    kernels.set_isa(before)


def reference_values(packed: Tensor, sf: Tensor) -> Tensor:
    """The decoded values in float64 by tables; sf is linear."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    table = torch.cat([table, -table])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    scales = sf.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
    return table[codes] * scales


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 4, 9])
def test_dequantize(isa, blocks, swizzled):
    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (2, 67, blocks * 8), generator=generator, dtype=torch.uint8)
    sf = torch.randint(0, 256, (2, 67, blocks), generator=generator, dtype=torch.uint8)
    inverse = torch.tensor(1.0) / 7.0
    expected = reference_values(packed, sf).float() * inverse
    given = kernels.swizzle(sf.flatten(0, 1)) if swizzled else sf
    for dtype in DTYPES:
        got = kernels.dequantize(packed, given, scalar(7.0), dtype, swizzled)
        torch.testing.assert_close(got, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit() | got.isnan(), expected.signbit() | expected.isnan())


def test_dequantize_keeps_subnormal_reciprocals(isa):
    packed = torch.full((1, 8), 0x77, dtype=torch.uint8)
    sf = torch.full((1, 1), 0x7E, dtype=torch.uint8)
    torch.set_flush_denormal(True)
    try:
        got = kernels.dequantize(packed, sf, scalar(3e38), torch.float32, False)
    finally:
        torch.set_flush_denormal(False)
    expected = scalar(6.0 * 448.0) * (scalar(1.0) / scalar(3e38))
    assert 0 < expected < 1e-34
    assert torch.equal(got, expected.expand(1, 16))


def random_operand(rows: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, swizzled scales with junk in the padding, and the float64 values."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
    sf = torch.randint(0, 0x7F, (rows, k // 16), generator=generator, dtype=torch.uint8)
    sf += torch.randint(0, 2, sf.shape, generator=generator, dtype=torch.uint8) * 128
    used = kernels.swizzle(torch.ones_like(sf)).bool()
    flat = torch.where(used, kernels.swizzle(sf), torch.tensor(0x7F, dtype=torch.uint8))
    return packed, flat, reference_values(packed, sf)


SIZES = [(1, 1, 16), (3, 5, 48), (8, 32, 32), (5, 33, 80), (66, 131, 272), (130, 70, 1040)]


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize(("m", "n", "k"), [*SIZES, (0, 3, 32), (3, 0, 32), (2, 3, 0)])
def test_gemm_against_float64(isa, tactic, m, n, k):
    a, a_sf, a_values = random_operand(m, k, 6)
    w, w_sf, w_values = random_operand(n, k, 7)
    alpha = 1 / 512
    exact = a_values @ w_values.t() * alpha
    # Each product is exact in float32; a sum of k terms errs by at most k roundings of the sum of
    # their magnitudes, and the cast by one rounding of the result.
    bound = (a_values.abs() @ w_values.abs().t() * alpha) * (k + 4) * 2.0**-24
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    for dtype, unit in rounding.items():
        out = getattr(kernels, tactic)(a, w, a_sf, w_sf, scalar(alpha), dtype)
        assert out.dtype == dtype
        assert out.shape == (m, n)
        limit = torch.finfo(dtype).max
        fits = exact.abs() + bound < limit * (1 - unit)
        error = (out.double() - exact).abs()
        assert bool((error <= bound + exact.abs() * unit + 2.0**-25)[fits].all())
        assert bool((out.isinf() | (out.double().abs() >= limit * 0.99))[~fits].all())


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_gemm_is_exact_where_float32_is(isa, tactic, m, n, k):
    a, _, _ = random_operand(m, k, 12)
    w, _, _ = random_operand(n, k, 13)
    a_sf, w_sf = (torch.full((rows, k // 16), 0x38, dtype=torch.uint8) for rows in (m, n))
    # Scales of 1: products are quarters below 2^6, and every partial sum fits into float32.
    exact = reference_values(a, a_sf) @ reference_values(w, w_sf).t() * 0.5
    swizzled = kernels.swizzle(a_sf), kernels.swizzle(w_sf)
    out = getattr(kernels, tactic)(a, w, *swizzled, scalar(0.5), torch.float32)
    assert torch.equal(out, exact.float())


def test_a_row_of_the_integer_tactic_does_not_depend_on_the_others(isa):
    a, a_sf, _ = random_operand(11, 208, 14)
    w, w_sf, _ = random_operand(37, 208, 15)
    together = kernels.gemm_int8(a, w, a_sf, w_sf, scalar(1.0), torch.float32)
    sf = kernels.unswizzle(a_sf, 11, 13)
    for i in range(11):
        alone = kernels.swizzle(sf[i : i + 1])
        row = kernels.gemm_int8(a[i], w, alone, w_sf, scalar(1.0), torch.float32)
        assert torch.equal(row, together[i])


def test_parameters_and_inference_tensors_are_taken():
    x = torch.nn.Parameter(torch.randn(4, 32))
    expected = kernels.quantize(x.detach(), scalar(5.0), 16, True)
    got = kernels.quantize(x, scalar(5.0), 16, True)
    assert all(map(torch.equal, got, expected))
    assert not any(t.requires_grad for t in got)
    with torch.inference_mode(), torch.autocast("cpu"):
        packed, sf = kernels.quantize(x.clone(), scalar(5.0), 16, True)
        out = kernels.gemm_blas(packed, packed, sf, sf, scalar(1.0), torch.float32)
    assert packed.is_inference()
    assert out.is_inference()
    assert torch.equal(packed, expected[0])


@pytest.mark.parametrize("tactic", TACTICS)
def test_gemm_keeps_nan_and_leading_dimensions_and_strides(isa, tactic):
    a, a_sf, _ = random_operand(6, 80, 8)
    w, w_sf, _ = random_operand(9, 80, 9)
    sf = kernels.unswizzle(w_sf, 9, 5)
    sf[2, 4] = 0x7F
    sf[4, 0] = 0xFF
    run = getattr(kernels, tactic)
    out = run(a.view(2, 3, 40), w, a_sf, kernels.swizzle(sf), scalar(1.0), torch.float32)
    assert out.shape == (2, 3, 9)
    assert out.isnan().any(0).any(0).nonzero().flatten().tolist() == [2, 4]
    assert bool(out[..., [2, 4]].isnan().all())
    strided = torch.stack([a, a], 1)[:, 0]
    again = run(
        strided, w.t().contiguous().t(), a_sf, kernels.swizzle(sf), scalar(1.0), torch.float32
    )
    assert torch.equal(again.nan_to_num(0.0), out.view(6, 9).nan_to_num(0.0))


@pytest.mark.parametrize("tactic", TACTICS)
def test_gemm_does_not_depend_on_threads(isa, tactic):
    a, a_sf, _ = random_operand(70, 528, 10)
    w, w_sf, _ = random_operand(150, 528, 11)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            run = getattr(kernels, tactic)
            outs.append(run(a, w, a_sf, w_sf, scalar(1.0), torch.float32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


def test_dispatcher_ops_call_the_same_kernels():
    x, g = torch.randn(40, 96), scalar(300.0)
    packed, sf = kernels.quantize(x, g, 16, True)
    ops = torch.ops.hotop_cpp
    assert all(map(torch.equal, ops.tunable_fp4_quantize(x, g, 16, True), [packed, sf]))
    arguments = (packed, packed, sf, sf, scalar(1.0), torch.bfloat16)
    assert torch.equal(ops.nvfp4_gemm(*arguments), kernels.gemm(*arguments))
    for trivial in (ops.nvfp4_gemm_trivial(*arguments), kernels.gemm_trivial(*arguments)):
        assert torch.equal(trivial, torch.zeros(40, 40, dtype=torch.bfloat16))
    zeros = ops.tunable_fp4_quantize_trivial(x, g)
    assert [t.shape for t in zeros] == [(40, 48), (40, 6)]
    assert not any(t.any() for t in zeros)
