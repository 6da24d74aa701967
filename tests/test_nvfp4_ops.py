"""``hotop.nvfp4``: the ops eager, compiled and exported, their errors and tactics; NVFP4Linear."""

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.optests import opcheck

import hotop
from hotop import nvfp4
from hotop.nvfp4 import NVFP4Linear, nvfp4_gemm, reference, tunable_fp4_quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
G = torch.tensor(300.0)


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTOP_TUNER_DIR", str(tmp_path))
    hotop.tuner.clear()
    yield
    hotop.tuner.clear()


def operands(m=5, n=48, k=64, dtype=torch.bfloat16, lead=()):
    torch.manual_seed(0)
    x, w = torch.randn(*lead, m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    act, act_sf = tunable_fp4_quantize(x, G, 16, True)
    weight, weight_sf = tunable_fp4_quantize(w, G, 16, True)
    return act, weight, act_sf, weight_sf, 1 / (G * G), dtype


def test_schemas():
    assert str(tunable_fp4_quantize._opoverload._schema) == (
        "hotop::tunable_fp4_quantize(Tensor input, Tensor input_scale, "
        "int scaling_vector_size=16, bool is_sf_swizzled_layout=False) -> Tensor[]"
    )
    assert str(nvfp4_gemm._opoverload._schema) == (
        "hotop::nvfp4_gemm(Tensor act_fp4, Tensor weight, Tensor act_sf, Tensor weight_scale, "
        "Tensor alpha, ScalarType output_dtype, bool to_userbuffers=False, "
        'str allowed_backends="cublaslt,blas,int8") -> Tensor'
    )


@pytest.mark.parametrize("lead", [(), (2,), (0,)])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_is_the_reference(dtype, swizzled, lead):
    x = torch.randn(*lead, 7, 80, dtype=dtype)
    found = tunable_fp4_quantize(x, G, 16, swizzled)
    expected = reference.quantize(x, G, swizzled)
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert all(map(torch.equal, found, expected))
    back = nvfp4.nvfp4_dequantize(*found, G, dtype, swizzled)
    assert torch.equal(back, reference.dequantize(*expected, G, dtype, swizzled))
    if x.numel():
        assert (back - x).norm() < 0.15 * x.norm()


def test_layout_flag_does_what_it_says():
    x = torch.randn(130, 80)
    linear, swizzled = (tunable_fp4_quantize(x, G, 16, flag)[1] for flag in (False, True))
    assert linear.shape == (130, 5)
    assert swizzled.shape == (256 * 8,)
    assert torch.equal(nvfp4.swizzle(linear), swizzled)
    assert torch.equal(nvfp4.unswizzle(swizzled, 130, 5), linear)


@pytest.mark.parametrize("backends", ["cublaslt,blas,int8", "blas", "int8", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_is_the_reference(dtype, backends):
    arguments = operands(lead=(2,), dtype=dtype)
    found = nvfp4_gemm(*arguments, False, backends)
    expected = reference.gemm(*arguments)
    assert found.shape == (2, 5, 48)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_calls_are_direct():
    arguments = operands()
    with torch.no_grad():
        assert hotop.explain(tunable_fp4_quantize, torch.ones(2, 16), G, 16, True).direct
        assert hotop.explain(nvfp4_gemm, *arguments).direct
        assert hotop.explain(torch.ops.hotop.nvfp4_gemm, *arguments).direct


@pytest.mark.parametrize("swizzled", [False, True])
def test_opcheck_quantize(swizzled):
    opcheck(tunable_fp4_quantize._opoverload, (torch.randn(3, 5, 32), G, 16, swizzled))


def test_opcheck_gemm():
    opcheck(nvfp4_gemm._opoverload, operands())


class Layer(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


def layer(dtype=torch.float32):
    torch.manual_seed(0)
    return Layer(NVFP4Linear.from_linear(nn.Linear(64, 48, dtype=dtype), 300.0)).eval()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_compile_static_and_dynamic(context):
    with context():
        model, x, longer = layer(), torch.randn(3, 64), torch.randn(131, 64)
        for dynamic in (False, True):
            compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
            assert torch.equal(compiled(x), model(x))
            assert torch.equal(compiled(longer), model(longer))


def test_export_with_a_dynamic_batch():
    model, x, longer = layer(), torch.randn(3, 64), torch.randn(131, 64)
    program = torch.export.export(
        model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
    )
    for batch in (x, longer):
        assert torch.equal(program.module()(batch), model(batch))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"hotop.tunable_fp4_quantize.default", "hotop.nvfp4_gemm.default"} <= targets


QUANTIZE = {
    "input": ("dtype", lambda: (torch.ones(2, 16, dtype=torch.int64), G), TypeError),
    "input ": ("size", lambda: (torch.ones(2, 17), G), ValueError),
    "input  ": ("no dimension", lambda: (torch.tensor(1.0), G), ValueError),
    "input_scale": ("dtype", lambda: (torch.ones(2, 16), G.double()), TypeError),
    "input_scale ": ("elements", lambda: (torch.ones(2, 16), G.expand(2)), ValueError),
    "scaling_vector_size": ("value", lambda: (torch.ones(2, 16), G, 32), ValueError),
}


@pytest.mark.parametrize("case", QUANTIZE)
def test_quantize_errors_name_the_argument(case):
    _, make, error = QUANTIZE[case]
    with pytest.raises(error, match=f"quantize: .*{case.strip()}"):
        tunable_fp4_quantize(*make())
    fake_arguments = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in make()]
    with pytest.raises(error, match=case.strip()):
        tunable_fp4_quantize(*fake_arguments)


GEMM = {
    "act_fp4": (0, lambda t: t.int(), TypeError),
    "act_fp4 ": (0, lambda t: t[..., :-8].contiguous(), ValueError),
    "weight": (1, lambda t: t.short(), TypeError),
    "weight ": (1, lambda t: t[0], ValueError),
    "act_sf": (2, lambda t: t[:-1], ValueError),
    "act_sf ": (2, lambda t: t.view(torch.float8_e4m3fn), TypeError),
    "act_sf  ": (2, lambda t: t.view(128, -1), ValueError),
    "weight_scale": (3, lambda t: t[1:], ValueError),
    "weight_scale ": (3, lambda t: t.float(), TypeError),
    "alpha": (4, lambda t: t.half(), TypeError),
    "alpha ": (4, lambda t: t.expand(3), ValueError),
    "output_dtype": (5, lambda t: torch.float64, TypeError),
}


@pytest.mark.parametrize("case", GEMM)
def test_gemm_errors_name_the_argument(case):
    position, change, error = GEMM[case]
    arguments = list(operands())
    arguments[position] = change(arguments[position])
    with pytest.raises(error, match=f"gemm: .*{case.strip()}"):
        nvfp4_gemm(*arguments)
    fakes = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(error, match=case.strip()):
        nvfp4_gemm(*fakes)


def test_devices_are_checked():
    arguments = list(operands())
    arguments[1] = arguments[1].to("meta")
    with pytest.raises(RuntimeError, match=r"weight must be on the CPU|same device"):
        hotop.nvfp4._ops.kernels.gemm(*arguments)


def test_unknown_backend():
    with pytest.raises(ValueError, match="allowed_backends='trtllm' must name some of: blas"):
        nvfp4_gemm(*operands(), False, "trtllm")
    with pytest.raises(ValueError, match="no allowed backend can serve this call"):
        nvfp4_gemm(*operands(), False, "cublaslt")


def test_both_ops_are_tuned():
    arguments = operands()
    x = torch.randn(4, 64)
    with hotop.tuning(rounds=2, batch_us=20):
        tunable_fp4_quantize(x, G, 16, True)
        nvfp4_gemm(*arguments)
    table = hotop.tuner._store.read(hotop.tuner.default_path())
    (quantize,) = table.ops["hotop::tunable_fp4_quantize"]["choices"].values()
    (gemm,) = table.ops["hotop::nvfp4_gemm"]["choices"].values()
    assert {"auto", "scalar"} <= set(quantize.tried)
    assert not quantize.rejected
    assert {"auto", "blas", "int8"} <= set(gemm.tried)
    before = hotop.tuner.stats()
    tunable_fp4_quantize(x[:3], G, 16, True)  # 3 rows and 4 are one bucket
    nvfp4_gemm(*arguments)
    after = hotop.tuner.stats()
    for name in table.ops:
        assert after[name].hits == before[name].hits + 1


# ---- NVFP4Linear ----------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_near_the_original(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(256, 32, bias=bias, dtype=dtype)
    x = torch.randn(2, 7, 256, dtype=dtype)
    made = NVFP4Linear.from_linear(linear, nvfp4.global_scale(x.abs().amax()))
    y = made(x)
    assert y.dtype == dtype
    assert y.shape == (2, 7, 32)
    assert (y - linear(x)).norm() < 0.15 * linear(x).norm()
    assert "in_features=256" in repr(made)


def test_calibration_and_convert():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Sequential(nn.Linear(64, 8)))
    model.append(nn.Linear(8, 3))
    original = copy.deepcopy(model)
    x = 100 * torch.randn(16, 32)
    with nvfp4.record_amax(model) as amax:
        model(x)
        model(x / 2)
    assert amax == {"0": pytest.approx(float(x.abs().max())), "2.0": pytest.approx(1, rel=1e-3)}
    converted, left = nvfp4.convert(model, amax=amax)
    assert converted == ["0", "2.0"]
    assert left == {"3": "in_features must be a multiple of 16 for NVFP4, got 8"}
    assert float(model[0].input_scale) == pytest.approx(448 * 6 / float(x.abs().max()))
    assert (model(x) - original(x)).norm() < 0.5 * original(x).norm()
    with pytest.raises(ValueError, match="3: in_features must be a multiple of 16"):
        nvfp4.convert(model, lambda name, linear: True)
    assert nvfp4.convert(original, lambda name, linear: name == "0").converted == ["0"]
    assert isinstance(original[2][0], nn.Linear)


def test_state_dict_and_copy():
    made = layer().linear
    other = NVFP4Linear.from_linear(nn.Linear(64, 48), 1.0)
    other.load_state_dict(made.state_dict())
    x = torch.randn(4, 64)
    assert torch.equal(other(x), made(x))
    assert torch.equal(copy.deepcopy(made)(x), made(x))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_bad_input_scale(value):
    with pytest.raises(ValueError, match="input_scale must be one positive number"):
        NVFP4Linear.from_linear(nn.Linear(16, 8), value)


def test_zero_weight():
    linear = nn.Linear(32, 8)
    nn.init.zeros_(linear.weight)
    made = NVFP4Linear.from_linear(linear)
    assert torch.equal(made(torch.randn(3, 32)), linear.bias.expand(3, 8))
    with pytest.raises(ValueError, match="finite"):
        nvfp4.global_scale(float("nan"))
