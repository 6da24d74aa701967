"""Weights that are read, and layers that are held, in ways that do not show at a glance."""

import dataclasses
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from hotop.nvfp4 import NVFP4Linear, convert


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.ls = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.md = nn.ModuleDict({"a": nn.Linear(16, 16)})
        self.safe = Called()


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x)


def product(x, layer):
    return F.linear(x, layer.weight)


def conditional(s, x):
    return F.linear(x, (s.q if x.sum() > 1e9 else s.k).weight)


def exchanged(s, x):
    q, k = s.q, s.k
    return F.linear(x, q.weight) + k(x)


def unpacked(s, x):
    a, b = s.ls
    return F.linear(x, a.weight) + b(x)


def numbered(s, x):
    for _, layer in enumerate(s.ls):
        x = F.linear(x, layer.weight)
    return x


def indexed(s, x):
    for i in range(len(s.ls)):
        x = F.linear(x, s.ls[i].weight)
    return x


def items(s, x):
    for _, layer in s.md.items():
        x = F.linear(x, layer.weight)
    return x


# By the way it is read: the forward, and the layers that it reads.
READS = {
    "in a list": (lambda s, x: F.linear(x, torch.cat([m.weight for m in s.ls])), ["ls.0", "ls.1"]),
    "in a sum": (lambda s, x: sum(F.linear(x, m.weight) for m in (s.q, s.k)), ["q", "k"]),
    "conditional": (conditional, ["q", "k"]),
    "exchanged": (exchanged, ["q"]),
    "unpacked": (unpacked, ["ls.0"]),
    "numbered": (numbered, ["ls.0", "ls.1"]),
    "indexed": (indexed, ["ls.0", "ls.1"]),
    "items": (items, ["md.a"]),
    "by key": (lambda s, x: [F.linear(x, s.md[k].weight) for k in s.md], ["md.a"]),
    "the table": (lambda s, x: F.linear(x, s._modules["q"].weight), ["q"]),
    "by name": (lambda s, x: F.linear(x, s.get_submodule("q").weight), ["q"]),
    "a function": (lambda s, x: product(x, s.q), ["q"]),
    "a lambda": (lambda s, x: (lambda m: F.linear(x, m.weight))(s.q), ["q"]),
    "reversed": (lambda s, x: [m.weight @ x.T for m in reversed(s.ls)], ["ls.0", "ls.1"]),
    "sliced": (lambda s, x: [m.weight @ x.T for m in s.ls[:1]], ["ls.0"]),
    "children": (lambda s, x: [m.weight @ x.T for m in s.ls.children()], ["ls.0", "ls.1"]),
}


@pytest.mark.parametrize("way", READS)
def test_weights_read_out_of_sight(way):
    forward, read = READS[way]
    model = type("Model", (Held,), {"forward": forward})()
    x = torch.randn(4, 16)
    usual = model(x)
    found = convert(model)
    assert set(read) <= found.left.keys()
    assert "safe.fc" in found.converted, "what is below a module of its own is not read"
    torch.testing.assert_close(model(x), usual, rtol=1, atol=3)  # layers that are called may go


@dataclasses.dataclass
class Field:
    layer: nn.Module


HOLDERS = {
    "nested": lambda a: {"x": [(a,)]},
    "dataclass": Field,
    "partial": functools.partial,
    "bound method": lambda a: a.forward,
    "closure": lambda a: lambda x: a(x),
    "default": lambda a: lambda x, layer=a: layer(x),
    "weak": weakref.ref,
    "its weight": lambda a: [a.weight],
}


@pytest.mark.parametrize("how", HOLDERS)
def test_layers_held_out_of_sight(how):
    model = Held()
    model.aside = HOLDERS[how](model.q)
    assert convert(model).left["q"] == "Held holds it in aside too"
    assert isinstance(model.k, NVFP4Linear)
    assert type(model.q) is nn.Linear


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_inputs_of_other_layouts(make):
    x = make(torch.eye(16))
    with pytest.raises(TypeError, match=f"takes strided Tensors, got {x.layout}"):
        NVFP4Linear.from_linear(nn.Linear(16, 16))(x)


def test_forward_mode_is_refused_in_words():
    layer = NVFP4Linear.from_linear(nn.Linear(16, 16))
    x = torch.randn(2, 16)
    with pytest.raises(RuntimeError, match="no derivative for forward mode"):
        torch.func.jvp(layer, (x,), (x,))


@pytest.mark.parametrize("name", ["weight_scale", "input_scale", "alpha"])
def test_attributes_with_the_name_of_a_buffer(name):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    setattr(model[0], name, torch.tensor(4.0))
    found = convert(model)
    assert found.left["0"] == f"its attribute {name} has the name of one of NVFP4Linear's buffers"
    assert list(found.converted) == ["1"]
    x = torch.randn(2, 16)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_looking_at_a_model_computes_no_parametrization():
    """Spectral norm advances its vectors whenever a weight is computed in training."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    before = {name: tensor.clone() for name, tensor in model[0].state_dict().items()}
    assert list(convert(model).converted) == ["1"]
    assert all(torch.equal(before[name], now) for name, now in model[0].state_dict().items())


def test_a_layer_without_a_weight_and_a_function_without_a_module():
    model = Held()
    del model.k.weight
    made = {}
    exec("def nameless(x, layer):\n    return x @ layer.weight", made)
    made["nameless"].__module__ = None

    def forward(self, x):
        return nameless(x, self.q)  # noqa: F821

    code = type(forward)(forward.__code__, {"nameless": made["nameless"]})
    model.__class__ = type("Model", (Held,), {"forward": code})
    assert {"k", "q"} <= convert(model).left.keys()
