"""``NVFP4Linear``: what an ``nn.Linear`` does, or a refusal in words."""

import copy
import importlib
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from hotop import nvfp4
from hotop.nvfp4 import NVFP4Linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALES = {"weight": torch.uint8, "weight_scale": torch.uint8} | dict.fromkeys(
    ("input_scale", "alpha"), torch.float32
)


def pair(bias=True, dtype=torch.float32, in_features=64, out_features=48):
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    return linear, NVFP4Linear.from_linear(linear, 500.0)


def near(found, expected, tolerance=0.2):
    return (found - expected).norm() <= tolerance * expected.norm()


def weight_of(layer, dtype=torch.float32):
    scale = 1 / (layer.alpha * layer.input_scale)
    return nvfp4.nvfp4_dequantize(layer.weight, layer.weight_scale, scale, dtype, True)


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


def test_jit_trace():
    _, made = pair()
    made.requires_grad_(False)
    x = torch.randn(5, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(made, x)
    y = torch.randn(7, 64)
    assert torch.equal(traced(y), made(y))


# ---- conversions, copies, checkpoints ----


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.float(),
        lambda m: m.to("cpu", torch.float16, non_blocking=True),
        lambda m: m.to(torch.ones(1, dtype=torch.float16)),
        lambda m: m.type(torch.float64),
        lambda m: m._apply(lambda t: t.to(torch.float16)),
        lambda m: m.share_memory(),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_conversions_keep_the_buffers(change, swap):
    linear, made = pair()
    plain = copy.deepcopy(linear)
    before = {name: tensor.clone() for name, tensor in made.named_buffers()}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        change(nn.Sequential(made))
        change(plain)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {name: tensor.dtype for name, tensor in made.named_buffers()} == SCALES
    assert all(torch.equal(made.get_buffer(name), before[name]) for name in SCALES)
    assert made.bias.dtype == plain.bias.dtype
    x = torch.randn(5, 64)
    for dtype in DTYPES:
        assert near(made(x.to(dtype)).float(), linear(x))


def test_meta_and_back():
    linear, made = pair()
    x = torch.randn(5, 64)
    on_meta = NVFP4Linear.from_linear(nn.Linear(64, 48, device="meta"))
    moved = copy.deepcopy(made).half().to("meta", torch.float32)
    for layer in (on_meta, moved):
        found = {name: (t.shape, t.dtype, t.device.type) for name, t in layer.state_dict().items()}
        expected = made.state_dict().items()
        assert found == {name: (t.shape, t.dtype, "meta") for name, t in expected}
        assert layer(x.to("meta")).shape == (5, 48)
        assert layer(x.to("meta").requires_grad_()).requires_grad
        assigned = copy.deepcopy(layer)
        assigned.load_state_dict(made.state_dict(), assign=True)
        emptied = copy.deepcopy(layer).to_empty(device="cpu")
        emptied.load_state_dict(made.state_dict())
        assert torch.equal(assigned(x), made(x))
        assert torch.equal(emptied(x), made(x))
    with FakeTensorMode():
        fake = NVFP4Linear.from_linear(nn.Linear(64, 48), 3.0)
        assert fake(torch.ones(2, 64)).shape == (2, 48)
    with torch.device("meta"):
        assert not NVFP4Linear.from_linear(linear, 3.0).alpha.is_meta


def test_copies_and_checkpoints():
    _, made = pair()
    x = torch.randn(5, 64)
    stored = io.BytesIO()
    torch.save(made, stored)
    stored.seek(0)
    copies = [
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        torch.load(stored, weights_only=False),
    ]
    stored = io.BytesIO()
    torch.save(made.state_dict(), stored)
    stored.seek(0)
    _, other = pair()
    assert str(other.load_state_dict(torch.load(stored, weights_only=True))) == (
        "<All keys matched successfully>"
    )
    for found in (*copies, other):
        assert torch.equal(found(x), made(x))
        assert repr(found) == "NVFP4Linear(in_features=64, out_features=48, bias=True)"


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_something_else(assign, strict):
    linear, made = pair()
    before = copy.deepcopy(made.state_dict())
    halved = {
        name: t.half() if t.is_floating_point() else t for name, t in made.state_dict().items()
    }
    for state, text in (
        (linear.state_dict(), "0.weight must be torch.uint8, got torch.float32: this is no check"),
        (halved, "0.input_scale must be torch.float32, got torch.float16; 0.alpha must be"),
    ):
        named = {f"0.{name}": tensor for name, tensor in state.items()}
        with pytest.raises(RuntimeError, match=text):
            nn.Sequential(made).load_state_dict(named, strict=strict, assign=assign)
        assert all(torch.equal(made.state_dict()[name], before[name]) for name in before)


def test_replicas(monkeypatch):
    """As DataParallel makes them: copies whose parameters are plain Tensors."""

    def copied(tensors, devices, detach=False):
        return [[t.detach() if detach else t.clone() for t in tensors] for _ in devices]

    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copied)
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device)
    for bias in (True, False):
        _, made = pair(bias)
        x = torch.randn(5, 64)
        for replica in module.replicate(nn.Sequential(made), [0, 1]):
            assert replica[0] is not made
            assert torch.equal(replica(x), made(x))


def test_made_in_inference_mode():
    linear, _ = pair()
    with torch.inference_mode():
        made = NVFP4Linear.from_linear(linear)
    x = torch.randn(5, 64, requires_grad=True)
    made(x).sum().backward()
    assert x.grad is not None


# ---- scales ----


@pytest.mark.parametrize("value", [7.9e-36, 7.8e-36, 1e-36, 1e-38, 1e-40, 1.4e-45])
def test_global_scale_of_a_tiny_amax(value):
    scale = nvfp4.global_scale(value)
    assert torch.isfinite(scale)
    assert scale > 0
    x = value * torch.tensor([1.0, -0.5, 0.0, 0.0] * 8).reshape(2, 16)
    back = nvfp4.nvfp4_dequantize(*nvfp4.tunable_fp4_quantize(x, scale), scale)
    # Below 6 times float32's least normal number even a block's multiplier has no float32.
    expected = x if value > 2e-38 else torch.zeros(2, 16)
    torch.testing.assert_close(back, expected, rtol=0.13, atol=0)
    assert torch.equal(back == 0, expected == 0)


def test_global_scale():
    assert nvfp4.global_scale(torch.tensor([[2.0]])).shape == ()
    assert float(nvfp4.global_scale(torch.tensor(448.0, dtype=torch.bfloat16))) == 6.0
    assert float(nvfp4.global_scale(0)) == 1.0
    assert nvfp4.global_scale(torch.ones((), device="meta")).is_meta
    for bad in (-1.0, float("inf"), float("nan"), torch.ones(2)):
        with pytest.raises(ValueError, match="amax must be one finite number that is not negative"):
            nvfp4.global_scale(bad)


@pytest.mark.parametrize("weight_amax", [1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("input_amax", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_alpha_is_a_normal_number_or_refused(input_amax, weight_amax):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False)
    with torch.no_grad():
        linear.weight.mul_(weight_amax / linear.weight.abs().max())
    x = torch.randn(5, 64)
    x *= input_amax / x.abs().max()
    scale = nvfp4.global_scale(input_amax)
    if input_amax * weight_amax > 1e45:
        with pytest.raises(ValueError, match="alpha is beyond float32"):
            NVFP4Linear.from_linear(linear, scale)
        return
    made = NVFP4Linear.from_linear(linear, scale)
    assert 2.0**-126 <= float(made.alpha) < float("inf")
    assert torch.equal(made(torch.zeros(2, 64)), torch.zeros(2, 48))
    exact = x.double() @ linear.weight.double().t()
    if 1e-30 < exact.abs().max() < 1e38:
        assert near(made(x).double(), exact)


@pytest.mark.parametrize(
    ("linear", "scale", "error", "text"),
    [
        (lambda: nn.Linear(24, 8), None, ValueError, "in_features must be a multiple of 16"),
        (
            lambda: nn.Linear(16, 8, dtype=torch.float64),
            None,
            ValueError,
            "the weight must be float32, bfloat16 or float16, got torch.float64",
        ),
        (lambda: nn.LazyLinear(8), None, ValueError, "the weight is not initialized yet"),
        (lambda: nn.Conv1d(1, 1, 1), None, TypeError, "linear must be an nn.Linear, got Conv1d"),
        (lambda: nn.Linear(16, 8), 1e38, ValueError, "input_scale must be one positive number"),
        (lambda: nn.Linear(16, 8), 1e-38, ValueError, "input_scale must be one positive number"),
    ],
)
def test_from_linear_refuses(linear, scale, error, text):
    with pytest.raises(error, match=text):
        NVFP4Linear.from_linear(linear(), scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(value):
    linear = nn.Linear(16, 8)
    linear.weight.data[3, 5] = value
    with pytest.raises(ValueError, match="the weight has values that are not finite"):
        NVFP4Linear.from_linear(linear)


def test_no_features():
    for sizes in ((0, 8), (16, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            linear = nn.Linear(*sizes)
        made = NVFP4Linear.from_linear(linear)
        x = torch.randn(3, sizes[0], requires_grad=True)
        assert torch.equal(made(x), linear(x))
        made(x).sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
