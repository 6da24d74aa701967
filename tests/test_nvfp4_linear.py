"""``NVFP4Linear``: what an ``nn.Linear`` does, or a refusal in words."""

import io
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from hotop.nvfp4 import NVFP4Linear
from nvfp4_models import DTYPES, near, pair, weight_of

# ---- the call ----


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (0,), (5,), (2, 3), (2, 0), (1, 2, 1, 3)], ids=str)
def test_every_batch(lead, dtype, bias):
    linear, made = pair(bias, dtype)
    x = torch.randn(*lead, 64, dtype=dtype)
    expected = linear(x)
    for y in (made(x), made(input=x), nn.Sequential(made)(x)):
        assert (y.shape, y.dtype) == (expected.shape, dtype)
        assert near(y, expected)


def test_strided_input():
    _, made = pair()
    for x in (
        torch.randn(64, 5).t(),
        torch.randn(5, 128)[:, ::2],
        torch.randn(64).expand(5, 64),
        torch.randn(2, 64, 3).transpose(1, 2),
    ):
        assert torch.equal(made(x), made(x.contiguous()))


@pytest.mark.parametrize("change", ["half", "bfloat16", "float", "double"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_another_dtype(dtype, change):
    """The result has the input's dtype, which is that of every nn.Linear that accepts it."""
    linear, made = pair()
    getattr(made, change)()
    x = torch.randn(5, 64, dtype=dtype)
    y = made(x)
    assert y.dtype == dtype
    assert near(y.float(), linear(x.float()))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast(dtype, bias, autocast):
    linear, made = pair(bias)
    x = torch.randn(5, 64, dtype=dtype)
    with torch.autocast("cpu", autocast):
        y, expected = made(x), linear(x)
        assert y.dtype == expected.dtype == autocast
        assert near(y.float(), expected.float())
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16, got Double"):
            made(x.double())
        with torch.autocast("cpu", enabled=False):
            assert made(x).dtype == dtype
    with torch.autocast("cuda", enabled=True) if torch.cuda.is_available() else torch.no_grad():
        assert made(x).dtype == dtype, "that of another device is not asked"


def test_errors_are_said_in_the_layer_s_terms():
    linear, made = pair()
    for shape in ((5, 80), (5, 63), (), (64, 5), (0, 32), (1,)):
        with pytest.raises(RuntimeError, match=r"last dimension of input must be in_features, 64"):
            made(torch.ones(shape))
        with pytest.raises(RuntimeError):
            linear(torch.ones(shape))
    for dtype in (torch.int64, torch.float64, torch.complex64, torch.bool, torch.uint8):
        with pytest.raises(TypeError, match="input must be float32, bfloat16 or float16, got"):
            made(torch.ones(2, 64).to(dtype))
    with pytest.raises(TypeError, match="input must be a Tensor, got list"):
        made([1.0] * 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = [
            torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)], layout=layout)
            for layout in (torch.strided, torch.jagged)
        ]
    for x in nested:
        with pytest.raises(TypeError, match="does not take nested Tensors"):
            made(x)


# ---- gradients ----


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (0,), (5,), (2, 3)], ids=str)
def test_the_input_s_gradient_is_straight_through(lead, dtype, bias):
    linear, made = pair(bias, dtype)
    x = torch.randn(*lead, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(*lead, 48, dtype=dtype)
    (x + nn.functional.pad(made(x), (0, 16))).backward(nn.functional.pad(grad, (0, 16)))
    expected = grad @ weight_of(made, dtype)
    torch.testing.assert_close(x.grad - 0, expected + nn.functional.pad(grad, (0, 16)))
    if bias:
        assert made.bias.data_ptr() == linear.bias.data_ptr()
        torch.testing.assert_close(made.bias.grad, grad.reshape(-1, 48).sum(0))
    y = x.detach().clone().requires_grad_()
    linear(y).backward(grad)
    assert x.numel() == 0 or near(expected, y.grad, 0.2), "that of the unconverted layer, nearly"


def test_gradients_of_gradients_and_modes():
    _, made = pair()
    weight = weight_of(made)
    x = torch.randn(5, 64, requires_grad=True)
    (first,) = torch.autograd.grad((made(x) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 2 * torch.ones(5, 64) @ weight.t() @ weight)
    with torch.no_grad():
        assert not made(x).requires_grad
    with torch.inference_mode():
        assert made(x).is_inference()
    checked = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    (found,) = torch.autograd.grad(checked.sum(), x)
    torch.testing.assert_close(found, torch.ones(5, 48) @ weight)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert found.dtype == torch.float32
    assert near(found, torch.ones(5, 48) @ weight, 0.02)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bias_trains_if_it_did(frozen):
    linear = nn.Linear(64, 48)
    linear.bias.requires_grad_(not frozen)
    made = NVFP4Linear.from_linear(linear)
    assert made(torch.randn(2, 64)).requires_grad == (not frozen)
    assert dict(made.named_parameters()).keys() == {"bias"}
    assert not NVFP4Linear(*made.buffers(), bias=torch.ones(48)).bias.requires_grad


def test_no_gradient_is_dropped():
    _, made = pair()
    x = torch.randn(5, 64, requires_grad=True)
    for name in ("alpha", "input_scale"):
        value = getattr(made, name).clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="gradients for its input and bias alone"):
            torch.func.functional_call(made, {name: value}, (x,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        made(forward_ad.make_dual(x.detach(), torch.ones(5, 64)))
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(made, (x.detach(),), (x.detach(),))


@pytest.mark.parametrize("grad", [True, False])
def test_torch_func(grad):
    _, made = pair()
    x, weight = torch.randn(3, 5, 64), weight_of(made)
    with torch.set_grad_enabled(grad):
        assert torch.equal(torch.vmap(made)(x), made(x))
        assert torch.equal(torch.vmap(made, in_dims=1, out_dims=1)(x), made(x))
        assert torch.equal(torch.vmap(torch.vmap(made))(x), made(x))
    found = torch.func.grad(lambda y: made(y).sum())(x)
    torch.testing.assert_close(found, torch.ones(3, 5, 48) @ weight)
    per_sample = torch.vmap(torch.func.grad(lambda y: made(y).sum()))(x)
    torch.testing.assert_close(per_sample, found)
    torch.testing.assert_close(torch.func.jacrev(made)(x[0, 0]), weight)
    stacked = {"alpha": made.alpha.expand(3)}
    with pytest.raises(NotImplementedError, match="own tensors"):
        torch.vmap(lambda held, y: torch.func.functional_call(made, held, (y,)))(stacked, x)
    bias = torch.zeros(48)
    found = torch.func.functional_call(made, {"bias": bias}, (x,))
    torch.testing.assert_close(found, made(x) - made.bias)


# ---- compile, export, trace ----


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        _, self.first = pair()
        _, self.second = pair(in_features=48, out_features=16)

    def forward(self, x):
        return self.second(torch.relu(self.first(input=x)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_gradients(backend):
    model = Two()
    x, grads = torch.randn(5, 64), []
    for call in (model, torch.compile(model, fullgraph=True, backend=backend)):
        y = x.clone().requires_grad_()
        call(y).square().sum().backward()
        grads.append((y.grad, model.first.bias.grad.clone()))
        model.zero_grad()
    torch.testing.assert_close(*grads)


def test_compile_under_autocast_and_in_other_dtypes():
    _, made = pair()
    for dtype in DTYPES:
        torch._dynamo.reset()
        compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
        x = torch.randn(5, 64, dtype=dtype)
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(compiled(x), made(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(x).dtype == torch.bfloat16
            assert torch.equal(compiled(x), made(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_export(strict, grad):
    model, x = Two(), torch.randn(5, 64)
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=512)}}
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, (x,), dynamic_shapes=rows, strict=strict)
    for module in (program.module(), program.run_decompositions().module()):
        for count in (2, 5, 131):
            y = torch.randn(count, 64)
            assert torch.equal(module(y), model(y))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    assert torch.equal(torch.export.load(stored).module()(x), model(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_symbolic_trace(bias, dtype):
    _, made = pair(bias, dtype)
    x = torch.randn(5, 64, dtype=dtype)
    traced = torch.fx.symbolic_trace(nn.Sequential(made, nn.ReLU()))
    assert torch.equal(traced(x), torch.relu(made(x)))
    y = x.clone().requires_grad_()
    traced(y).sum().backward()
    assert y.grad.any()


def test_jit_trace():
    _, made = pair()
    made.requires_grad_(False)
    x = torch.randn(5, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(made, x)
    y = torch.randn(7, 64)
    assert torch.equal(traced(y), made(y))
