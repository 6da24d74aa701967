"""comfy-kitchen: rotary embeddings, low-precision formats, norms; ops by `custom_op`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tools.third_party.step import Step

NAMESPACES = ("comfy_kitchen",)


def load() -> None:
    """Imports all that registers ops."""
    import comfy_kitchen
    import comfy_kitchen.tensor  # noqa: F401


def _frequencies(tokens: int, width: int) -> torch.Tensor:
    angle = torch.arange(tokens)[:, None] * torch.arange(1, width // 2 + 1) / 7
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos, -sin, sin, cos], -1).reshape(1, 1, tokens, width // 2, 2, 2)


def _rope(dtype: torch.dtype) -> Any:
    import comfy_kitchen as ck

    q, k = torch.randn(2, 2, 4, 16, 32, dtype=dtype).unbind()
    freqs, scale = _frequencies(16, 32), torch.rand(32, dtype=dtype)
    found = []
    for suffix in ("", "_split_half"):
        found.append(getattr(ck, f"apply_rope{suffix}")(q, k, freqs))
        found.append(getattr(ck, f"apply_rope{suffix}1")(q, freqs))
        found.append(getattr(ck, f"rms_rope{suffix}")(q, k, freqs, scale))
        found.append(getattr(ck, f"rms_rope{suffix}")(q, k, freqs, scale, scale + 1, epsilon=1e-5))
        found.append(getattr(ck, f"rms_rope{suffix}1")(k, freqs, scale))
    return found


def _rope_inplace(dtype: torch.dtype) -> Any:
    import comfy_kitchen as ck

    freqs, scale = _frequencies(16, 32), torch.rand(32, dtype=dtype)
    found = []
    for suffix in ("", "_split_half"):
        q, k = torch.randn(2, 2, 4, 16, 32, dtype=dtype).unbind()
        q, k = q.clone(), k.clone()
        before = q._version, k._version
        returned = getattr(ck, f"apply_rope{suffix}_")(q, k, freqs)
        getattr(ck, f"rms_rope{suffix}_")(q, k, freqs, scale)
        getattr(ck, f"apply_rope{suffix}1_")(q, freqs)
        getattr(ck, f"rms_rope{suffix}1_")(k, freqs, scale)
        same = returned[0] is q and returned[1] is k
        found.append((q, k, same, q._version - before[0], k._version - before[1]))
    return found


def _norms() -> Any:
    import comfy_kitchen as ck

    x, scale, shift = torch.randn(2, 6, 64), torch.randn(2, 1, 64), torch.randn(2, 1, 64)
    return ck.adaln(x, scale, shift), ck.rms_adaln(x, scale, shift, eps=1e-5)


def _group_norm() -> Any:
    import comfy_kitchen as ck

    x = torch.randn(1, 32, 3, 8, 8)
    weight, bias = torch.rand(32), torch.randn(32)
    stats = ck.group_norm_stats3d(x, num_groups=8)
    plain = ck.group_norm_silu_pad3d(x, weight, bias, num_groups=8, pad=(1, 1, 1, 1, 2))
    given = ck.group_norm_silu_pad3d(x, weight, bias, num_groups=8, stats=stats, silu=False)
    out = torch.empty_like(plain)
    returned = ck.group_norm_silu_pad3d(
        x, weight, bias, num_groups=8, pad=(1, 1, 1, 1, 2), zero_pad=True, out=out
    )
    conv = torch.randn(16, 32, 3, 3, 3)
    filtered = ck.fp16_conv3d(plain, conv, torch.ones(16))
    into = torch.zeros_like(filtered)
    ck.fp16_conv3d(plain, conv, residual=filtered, out=into)
    return stats, plain, given, out, returned is out, filtered, into


def _attention() -> Any:
    import comfy_kitchen as ck

    q, k, v = torch.randn(3, 1, 3, 5, 6, 2, 16).unbind()
    found = [ck.na3d(q, k, v, 3), ck.na3d(q, k, v, [3, 5, 3], [True, False, False], scale=1.0)]
    found.append(ck.na2d(q[:, 0], k[:, 0], v[:, 0], 3, is_causal=[True, False]))
    q, k, v = torch.randn(3, 1, 192, 2, 128).unbind()
    found.append(ck.sol_attn(q, k, v, tau=0.5))
    found.append(ck.sol_attn(q, k, v, sink_blocks=[0, 1], key_bias=torch.zeros(192), tail=False))
    return found


def _fp8(dtype: torch.dtype, code: torch.dtype) -> Any:
    import comfy_kitchen as ck

    x, scale = torch.randn(48, 64, dtype=dtype), torch.tensor(0.02)
    packed = ck.quantize_per_tensor_fp8(x, scale, code)
    return packed.view(torch.uint8), ck.dequantize_per_tensor_fp8(packed, scale, dtype)


def _nvfp4() -> Any:
    import comfy_kitchen as ck

    scale = torch.tensor(0.01)
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    (qa, sa), (qb, sb) = ck.quantize_nvfp4(a, scale), ck.quantize_nvfp4(b, scale, pad_16x=True)
    back = ck.dequantize_nvfp4(qa, scale, sa, torch.float32)
    return qa, sa.view(torch.uint8), qb, sb.view(torch.uint8), back


def _mxfp8() -> Any:
    import comfy_kitchen as ck

    a = torch.randn(64, 64)
    packed, scales = ck.quantize_mxfp8(a)
    back = ck.dequantize_mxfp8(packed, scales, torch.float32)
    return packed.view(torch.uint8), scales.view(torch.uint8), back


def _svdquant() -> Any:
    import comfy_kitchen as ck

    x = torch.randn(20, 128, dtype=torch.bfloat16)
    smooth, down = torch.rand(128).bfloat16() + 0.5, torch.randn(128, 16).bfloat16()
    act, scales, lora = ck.quantize_svdquant_w4a4(x, smooth, down)
    weight = torch.randint(-128, 127, (64, 64), dtype=torch.int8)
    weight_scales, up = torch.rand(2, 64).bfloat16(), torch.randn(64, 16).bfloat16()
    y = ck.scaled_mm_svdquant_w4a4(act, weight, scales, weight_scales, lora, up)
    return act, scales, lora, y


def _awq() -> Any:
    import comfy_kitchen as ck

    weight = torch.randint(-128, 128, (64, 64), dtype=torch.int8)
    scales, zeros = torch.rand(2, 64).bfloat16(), torch.rand(2, 64).bfloat16()
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    return ck.gemv_awq_w4a16(x, weight, scales, zeros, torch.ones(64, dtype=torch.bfloat16))


def _int8() -> Any:
    import comfy_kitchen as ck

    w, scale = ck.quantize_int8_tensorwise(torch.randn(32, 64))
    rows, row_scale = ck.quantize_int8_rowwise(torch.randn(8, 64))
    y = ck.int8_linear(torch.randn(8, 64), w, scale, torch.ones(32), torch.float32)
    return w, rows, y, ck.dequantize_int8_simple(rows, row_scale)


def _linear(layout: str, dtype: torch.dtype) -> Any:
    import comfy_kitchen.tensor as tensor

    layout_class = getattr(tensor, layout)
    w = tensor.QuantizedTensor.from_float(torch.randn(64, 128, dtype=dtype), layout_class.__name__)
    x = torch.randn(8, 128, dtype=dtype)
    y = torch.nn.functional.linear(x, w, torch.ones(64, dtype=dtype))
    return w.dequantize(), y


def _compiled() -> Any:
    import comfy_kitchen as ck

    def block(q: torch.Tensor, k: torch.Tensor, f: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        q, k = ck.rms_rope(q, k, f, s)
        ck.apply_rope_(q, k, f)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ k
        return ck.adaln(y, s, s)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    freqs, scale = _frequencies(16, 32), torch.rand(32)
    with torch.no_grad():
        return [compiled(*torch.randn(2, b, 4, 16, 32), freqs, scale) for b in (1, 1, 3)]


def _no_formula() -> Any:
    import comfy_kitchen as ck

    q = torch.randn(1, 1, 16, 32, requires_grad=True)
    y, _ = ck.apply_rope(q, q, _frequencies(16, 32))
    return y.sum().backward()


def _gpu_only() -> Any:
    import comfy_kitchen as ck

    return ck.int8_attention(*torch.randn(3, 1, 2, 64, 64))


def steps() -> Iterator[Step]:
    """The package's functions, as a diffusion transformer uses them."""
    for dtype in (torch.float32, torch.bfloat16):
        yield Step(f"rope {dtype}", lambda d=dtype: _rope(d))
        yield Step(f"rope in place {dtype}", lambda d=dtype: _rope_inplace(d))
        for code in (torch.float8_e4m3fn, torch.float8_e5m2):
            yield Step(f"fp8 {dtype} {code}", lambda d=dtype, c=code: _fp8(d, c))
    yield Step("adaptive norms", _norms)
    yield Step("group norm and conv", _group_norm)
    yield Step("neighborhood and sparse attention", _attention)
    yield Step("nvfp4", _nvfp4)
    yield Step("mxfp8", _mxfp8)
    yield Step("svdquant", _svdquant)
    yield Step("awq", _awq)
    yield Step("int8", _int8)
    for layout in ("TensorCoreFP8Layout", "TensorWiseINT8Layout", "TensorCoreMXFP8Layout"):
        yield Step(f"linear {layout}", lambda n=layout: _linear(n, torch.bfloat16))
    yield Step("attention block compiled", _compiled, "compiled")
    yield Step("backward without a formula", _no_formula, "error")
    yield Step("a kernel for GPUs only", _gpu_only, "error")
