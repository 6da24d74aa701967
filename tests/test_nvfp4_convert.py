"""``hotop.nvfp4.convert``, all or nothing, and ``record_amax``: every kind of model."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hotop.nvfp4 import NVFP4Linear, convert, record_amax
from nvfp4_models import Block, Own, every, near, unchanged

# ---- what is converted ----


def test_what_was_done_is_returned():
    model = Block(a=nn.Linear(32, 64), inner=Block(b=nn.Linear(64, 8)), c=nn.Linear(8, 16))
    original = copy.deepcopy(model)
    converted, left = result = convert(model)
    assert (converted, left) == (result.converted, result.left)
    assert converted == ["a", "inner.b"]
    assert left == {"c": "in_features must be a multiple of 16 for NVFP4, got 8"}
    assert type(model.a) is type(model.inner.b) is NVFP4Linear
    assert near(model(torch.randn(5, 32)), original(torch.ones(5, 32)), 10)
    assert convert(model) == ([], left), "twice is once"
    result = convert(original, lambda name, linear: name == "inner.b")
    assert result.converted == ["inner.b"]
    assert result.left == dict.fromkeys(("a", "c"), "predicate did not choose it")


def test_the_model_itself():
    model = nn.Linear(16, 16)
    assert "use NVFP4Linear.from_linear" in unchanged(model, lambda: convert(model))
    with record_amax(model) as amax:
        model(torch.ones(1, 16))
    assert amax == {"": 1.0}
    assert convert(nn.ReLU()) == ([], {})


def test_one_layer_under_two_names():
    shared, block = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16))
    model = Block(a=shared, b=nn.Sequential(shared, nn.ReLU()), c=block, d=block)
    model.b.register_module("again", shared)
    original, x = copy.deepcopy(model), torch.randn(5, 16)
    with record_amax(model) as amax:
        model(x)
    assert set(amax) == {"a", "c.0"}
    result = convert(model, lambda name, linear: name in ("b.0", "c.0"), amax)
    assert result == (["a", "b.0", "b.again", "c.0"], {})
    assert model.a is model.b[0] is model.b.again
    assert type(model.a) is NVFP4Linear
    assert type(model.d[0]) is NVFP4Linear
    assert near(model(x), original(x))


def test_a_module_that_holds_itself_through_another():
    model = Block(a=nn.Linear(16, 16))
    model.a.back = None
    outer = nn.Module()
    outer.model, outer.again = model, model
    assert convert(outer).left == {}
    assert type(model.a) is NVFP4Linear


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_the_new_layer_takes_over(training, dtype):
    model = Block(a=nn.Linear(16, 16, dtype=dtype), b=nn.Linear(16, 16, bias=False, dtype=dtype))
    model.train(training)
    model.a.tag, bias = {"key": 1}, model.a.bias
    bias.requires_grad_(training)
    assert convert(model).converted == ["a", "b"]
    assert model.a.training == model.b.training == training
    assert model.a.tag == {"key": 1}
    assert model.a.bias is bias
    assert model.b.bias is None
    assert bias.requires_grad == training
    assert dict(model.named_parameters()).keys() == {"a.bias"}
    assert model(torch.ones(2, 16, dtype=dtype)).dtype == dtype


def test_hooks_are_kept_and_their_handles():
    model, seen = Block(a=nn.Linear(16, 16)), []

    def hook(kind):
        def call(module, *args):
            assert type(module) is NVFP4Linear
            seen.append(kind)

        return call

    layer = model.a
    handles = [
        layer.register_forward_pre_hook(hook("pre")),
        layer.register_forward_pre_hook(hook("pre kwargs"), with_kwargs=True),
        layer.register_forward_hook(hook("forward")),
        layer.register_forward_hook(hook("always"), always_call=True),
        layer.register_full_backward_hook(hook("backward")),
        layer.register_full_backward_pre_hook(hook("backward pre")),
        layer.register_state_dict_pre_hook(hook("state dict pre")),
        layer._register_state_dict_hook(hook("state dict")),
        layer.register_state_dict_post_hook(hook("state dict post")),
        layer.register_load_state_dict_post_hook(hook("load post")),
    ]
    assert convert(model).converted == ["a"]
    del layer
    gc.collect()
    model(torch.ones(2, 16, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())
    assert set(seen) == {
        *("pre", "pre kwargs", "forward", "always", "backward", "backward pre"),
        *("state dict pre", "state dict", "state dict post", "load post"),
    }
    assert len(seen) == len(handles)
    for handle in handles:
        handle.remove()
    model(torch.ones(2, 16, requires_grad=True)).sum().backward()
    model.state_dict()
    assert len(seen) == len(handles)


def test_hooks_that_hold_the_layer_itself():
    model = Block(a=nn.Linear(16, 16))
    model.a.register_load_state_dict_pre_hook(lambda module, *args: None)
    assert "a" in convert(model).left
    assert "a: its load_state_dict pre-hooks" in unchanged(model, lambda: convert(model, every))


def test_meta_and_fake():
    original = Block(a=nn.Linear(16, 32), b=nn.Linear(32, 16))
    ready = copy.deepcopy(original)
    convert(ready, amax={"a": 3.0})
    stored = io.BytesIO()
    torch.save(ready.state_dict(), stored)
    stored.seek(0)
    checkpoint = torch.load(stored, weights_only=True)
    x = torch.randn(5, 16)
    with torch.device("meta"):
        model = Block(a=nn.Linear(16, 32), b=nn.Linear(32, 16))
    assert convert(model, amax={"a": 3.0}).converted == ["a", "b"]
    assert model(x.to("meta")).shape == (5, 16)
    for assign in (True, False):
        loaded = copy.deepcopy(model)
        if not assign:
            loaded.to_empty(device="cpu")
        loaded.load_state_dict(checkpoint, assign=assign)
        assert torch.equal(loaded(x), ready(x))
    fresh = copy.deepcopy(original)
    convert(fresh)
    fresh.load_state_dict(checkpoint)
    assert torch.equal(fresh(x), ready(x))
    with pytest.raises(RuntimeError, match=r"a.weight must be torch.uint8, got torch.float32"):
        fresh.load_state_dict(original.state_dict())
    with FakeTensorMode():
        model = Block(a=nn.Linear(16, 32))
        convert(model)
        assert model(torch.ones(2, 16)).shape == (2, 32)
    with torch.device("meta"):
        convert(original, amax={"a": 3.0})
    assert torch.equal(original(x), ready(x))


def test_whole_models_compile_export_and_copy():
    torch.manual_seed(0)
    model = Block(a=nn.Linear(16, 32), act=nn.GELU(), b=nn.Linear(32, 16))
    original, x = copy.deepcopy(model), torch.randn(5, 16)
    with record_amax(model) as amax:
        model(x)
    convert(model, amax=amax)
    y = model(x)
    assert near(y, original(x))
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), y)
    assert torch.equal(model.half().float()(x), y) or near(model(x), y, 0.01)


# ---- all or nothing ----


def bad_weights(model):
    model.last.weight.data[0, 0] = float("nan")
    return convert(model)


def bad_predicate(name, linear):
    if name == "last":
        raise ValueError("a predicate's own error")
    return True


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (bad_weights, "last: the weight has values that are not finite"),
        (lambda m: convert(m, bad_predicate), "a predicate's own error"),
        (lambda m: convert(m, amax={"last": float("nan")}), "amax of last: amax must be one"),
        (lambda m: convert(m, amax={"last": -1.0}), "amax of last: amax must be one finite"),
        (lambda m: convert(m, amax={"last": "much"}), "amax of last: could not convert string"),
        (lambda m: convert(m, amax={"last": torch.ones(2)}), "amax of last: "),
        (lambda m: convert(m, amax={"lost": 1.0, "act": 1.0}), "no linear layer's: lost, act"),
    ],
)
def test_nothing_is_changed_by_a_failure(act, text):
    model = Block(first=nn.Linear(16, 16), act=nn.ReLU(), last=nn.Linear(16, 16))
    assert text in unchanged(model, lambda: act(model))
    assert type(model.first) is nn.Linear


def test_one_amax_for_two_conversions():
    model = Block(a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    amax = {"a": torch.tensor(2.0), "b": 4.0}
    assert convert(model, lambda name, linear: name == "a", amax).converted == ["a"]
    assert convert(model, None, amax).converted == ["b"]
    assert (float(model.a.input_scale), float(model.b.input_scale)) == (1344.0, 672.0)


# ---- calibration ----


def test_calibration_sees_every_call():
    model = Block(a=nn.Linear(16, 16), inner=nn.Sequential(nn.Linear(16, 16)), odd=Own(16, 8))
    model.c = nn.Linear(8, 8)
    with record_amax(model) as amax:
        model(torch.full((2, 16), -3.0))  # "a" is called by keyword
        model(torch.ones(0, 16))
        model.a(torch.ones(1, 16))
    assert amax.keys() == {"a", "inner.0"}
    assert amax["a"] == 3.0
    assert not model.a._forward_pre_hooks
    with record_amax(model, lambda name, linear: name == "c") as amax:
        model(torch.ones(2, 16))
    assert amax.keys() == {"c"}
    with record_amax(model) as amax:
        model.a(torch.tensor([float("nan")] * 16))
        model.a(torch.ones(16))
    assert amax["a"] != amax["a"], "what was no number is not forgotten"
    assert "amax of a" in unchanged(model, lambda: convert(model, amax=amax))
