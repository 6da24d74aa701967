"""The fake kernels refuse what the kernels refuse, in the same words; what zeros dequantize to."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hotop
from hotop import nvfp4
from hotop.nvfp4 import nvfp4_dequantize, nvfp4_gemm, reference, tunable_fp4_quantize

kernels = hotop.nvfp4._ops.kernels
G = torch.tensor(300.0)
BACKENDS = "cublaslt,blas,int8"


def quantize_arguments():
    return [torch.ones(3, 32), G, 16, True]


def gemm_arguments():
    torch.manual_seed(0)
    act, act_sf = tunable_fp4_quantize(torch.randn(2, 5, 64), G, 16, True)
    weight, weight_sf = tunable_fp4_quantize(torch.randn(48, 64), G, 16, True)
    return [act, weight, act_sf, weight_sf, 1 / (G * G), torch.bfloat16, False, BACKENDS]


def dequantize_arguments(swizzled=True):
    return [*tunable_fp4_quantize(torch.ones(3, 64), G, 16, swizzled), G, torch.float32, swizzled]


def linear_dequantize_arguments():
    return dequantize_arguments(False)


OPS = {
    "quantize": (tunable_fp4_quantize, quantize_arguments),
    "gemm": (nvfp4_gemm, gemm_arguments),
    "dequantize": (nvfp4_dequantize, dequantize_arguments),
    "dequantize linear": (nvfp4_dequantize, linear_dequantize_arguments),
}
TENSORS = [
    *(
        lambda t, dtype=dtype: torch.zeros(t.shape, dtype=dtype)
        for dtype in (
            *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
            *(torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64),
            torch.complex128,
        )
    ),
    lambda t: torch.zeros((), dtype=t.dtype),
    lambda t: torch.zeros(0, dtype=t.dtype),
    lambda t: torch.zeros(3, dtype=t.dtype),
    lambda t: torch.zeros(1, 8, dtype=t.dtype),
    lambda t: torch.zeros(t.shape)[None].to(t.dtype),
    lambda t: torch.zeros(*t.shape, 2).to(t.dtype),
    lambda t: torch.zeros(t.numel() + 8, dtype=t.dtype),
    lambda t: torch.zeros(2, t.numel() + 12, dtype=t.dtype),
]
VALUES = {
    int: [0, -16, 8, 32],
    bool: [True, False],
    str: ["", "trtllm", "cublaslt", "blas", " int8 , blas ", "scalar", "blas,trtllm", "blas;int8"],
    torch.dtype: [torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn, torch.complex64],
}


def changes(arguments):
    """Every call with one argument changed, and some with two."""
    for i, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            others = [change(value) for change in TENSORS]
        else:
            others = VALUES[type(value)]
        for other in others:
            yield [*arguments[:i], other, *arguments[i + 1 :]]
    for i, j in itertools.combinations(range(len(arguments)), 2):
        both = list(arguments)
        for k in (i, j):
            value = both[k]
            both[k] = torch.zeros(7) if isinstance(value, torch.Tensor) else VALUES[type(value)][1]
        yield both


def outcome(op, arguments):
    try:
        result = op(*arguments)
    except Exception as error:
        return type(error), str(error)
    results = result if isinstance(result, list) else [result]
    return [(tuple(t.shape), t.dtype) for t in results]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", OPS)
def test_fake_and_kernel_agree(name):
    op, make = OPS[name]
    refused = 0
    for arguments in changes(make()):
        expected = outcome(op, arguments)
        refused += isinstance(expected, tuple)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            assert outcome(op, fakes) == expected, arguments
        on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        assert outcome(op, on_meta) == expected, arguments
    assert refused > 20


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", OPS)
def test_the_reference_agrees(name):
    op, make = OPS[name]
    for arguments in changes(make()):
        if name == "quantize" and arguments[2] == 16:
            found = outcome(reference.quantize, [*arguments[:2], arguments[3]])
        elif name == "gemm" and arguments[7] == BACKENDS:
            found = outcome(reference.gemm, arguments[:6])
        elif name.startswith("dequantize"):
            found = outcome(reference.dequantize, arguments)
        else:
            continue
        assert found == outcome(op, arguments), arguments


def test_backends_where_a_graph_is_made():
    arguments = gemm_arguments()

    class Model(torch.nn.Module):
        def __init__(self, backends):
            super().__init__()
            self.backends = backends

        def forward(self, *tensors):
            return nvfp4_gemm(*tensors, torch.float32, False, self.backends)

    for backends in ("trtllm", "cublaslt", ""):
        for make in (
            lambda model: torch.export.export(model, tuple(arguments[:5])),
            lambda model: torch.compile(model, fullgraph=True, backend="eager")(*arguments[:5]),
        ):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=r"must name some of|no allowed backend can serve"):
                make(Model(backends))
    program = torch.export.export(Model("int8"), tuple(arguments[:5]))
    torch.testing.assert_close(
        program.module()(*arguments[:5]), Model("int8")(*arguments[:5]), rtol=0, atol=0
    )


def test_gradients_of_the_ops_themselves():
    """Codes are integers, which have none; the product of codes says so."""
    x = torch.randn(3, 32, requires_grad=True)
    assert not any(t.requires_grad for t in tunable_fp4_quantize(x, G))
    arguments = gemm_arguments()
    arguments[4] = arguments[4].requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        nvfp4_gemm(*arguments).float().sum().backward()
    scale = G.clone().requires_grad_()
    packed, sf = tunable_fp4_quantize(torch.randn(3, 32), G)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        nvfp4_dequantize(packed, sf, scale).sum().backward()


def test_dequantize_is_an_op():
    packed, sf = tunable_fp4_quantize(torch.randn(3, 32), G, 16, True)

    def values(packed, sf):
        return nvfp4_dequantize(packed, sf, G, torch.bfloat16, True)

    compiled = torch.compile(values, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(packed, sf), values(packed, sf))
    assert torch.equal(values(packed, sf), kernels.dequantize(packed, sf, G, torch.bfloat16, True))


SCALES = [0.0, -0.0, 1e-45, 1e-39, -1e-39, 2.0**-126, 1.0, 3.4e38, float("inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [*SCALES, -float("inf")])
def test_zeros_stay_zeros(scale, dtype):
    g = torch.tensor(scale)
    x = torch.zeros(3, 64)
    x[1, :16:2] = torch.tensor([0.5, -1.0, 3.0, 6.0, 1.0, -6.0, 2.0, 4.0])
    packed, sf = tunable_fp4_quantize(x, torch.tensor(1.0))
    is_kept = kernels.isa()
    try:
        for isa in kernels.available_isas():
            kernels.set_isa(isa)
            found = nvfp4_dequantize(packed, sf, g, dtype)
            assert torch.equal(found[x == 0], torch.zeros(3 * 64 - 8, dtype=dtype))
            expected = (x[x != 0] * (1 / g)).to(dtype)
            assert torch.equal(found[x != 0].isnan(), expected.isnan())
            torch.testing.assert_close(
                found[x != 0], expected, rtol=0.1, atol=1e-37, equal_nan=True
            )
            twin = reference.dequantize(packed, sf, g, dtype)
            assert torch.equal(twin.nan_to_num(7.0), found.nan_to_num(7.0))
    finally:
        kernels.set_isa(is_kept)


def test_a_zero_block_beside_tiny_numbers():
    x = torch.zeros(2, 32)
    x[0, :16] = 1e-37
    scale = nvfp4.global_scale(x.abs().amax())
    back = nvfp4_dequantize(*tunable_fp4_quantize(x, scale), scale)
    assert torch.equal(back == 0, x == 0)
    torch.testing.assert_close(back, x, rtol=0.2, atol=0)
