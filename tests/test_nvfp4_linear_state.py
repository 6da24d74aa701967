"""``NVFP4Linear``: conversions, copies, checkpoints, replicas, and its scales."""

import copy
import importlib
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hotop import nvfp4
from hotop.nvfp4 import NVFP4Linear
from nvfp4_models import DTYPES, near, pair

SCALES = {"weight": torch.uint8, "weight_scale": torch.uint8} | dict.fromkeys(
    ("input_scale", "alpha"), torch.float32
)


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


@pytest.mark.parametrize("inside", [True, False])
def test_made_in_inference_mode(inside):
    linear, _ = pair()
    with torch.inference_mode():
        if inside:
            linear, _ = pair()
        made = NVFP4Linear.from_linear(linear)
        again = NVFP4Linear.from_linear(linear)
        assert torch.equal(made(torch.ones(2, 64)), again(torch.ones(2, 64)))
    x = torch.randn(5, 64, requires_grad=True)
    made(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert near(NVFP4Linear.from_linear(linear)(x), linear(x))
    assert made.bias.requires_grad != inside


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
