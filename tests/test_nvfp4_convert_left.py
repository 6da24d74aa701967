"""What ``hotop.nvfp4.convert`` leaves alone and why; the modules of ``torch.nn``."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from hotop.nvfp4 import convert, record_amax
from nvfp4_models import Block, Own, every, near, unchanged

# ---- what is left, and why ----


def hidden(function):
    def call(*args):
        return function(*args)

    return call


class Reads(nn.Module):
    """Reads the weight of every layer but ``called`` and ``others``, in as many ways."""

    def __init__(self):
        super().__init__()
        for name in ("fc", "walrus", "by_method", "decorated", "by_property", "kept", "called"):
            setattr(self, name, nn.Linear(16, 16))
        self.deep = nn.Sequential(nn.Linear(16, 16))
        self.looped = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.each = nn.ModuleList([Block(fc=nn.Linear(16, 16))])
        self.last = nn.ModuleList([nn.Sequential(nn.Linear(16, 16))])
        self.others = nn.ModuleList([Block(own=nn.Linear(16, 16))])
        self.norm = nn.LayerNorm(16)
        nn.init.ones_(self.called.weight)

    def forward(self, x):
        layer = self.fc
        x = nn.functional.linear(x.to(self.dtype), layer.weight, layer.bias)
        if (other := self.walrus) is not None:
            x = x @ other.weight
        x = self._rest(x, *self._static(self)) * self.norm.weight
        return self._decorated(self.called(x))

    def _rest(self, x, kept):
        x = x.to(self.deep[0].weight.dtype) @ self.by_method.weight @ kept
        for layer in self.looped:
            x = x @ layer.weight
        x = sum([x @ block.fc.weight for block in self.each])
        for block in self.others:
            x = block(x)
        return self.deep(x) + self.last[-1][0].weight.sum()

    @hidden
    def _decorated(self, x):
        return x @ self.decorated.weight

    @property
    def dtype(self):
        return self.by_property.weight.dtype

    @staticmethod
    def _static(module):
        return [module.kept.weight]

    def fuse(self):
        return self.called.weight


def own_function():
    """A module whose function is set on the instance."""
    module = nn.Module()
    module.fc = nn.Linear(16, 16)
    module.forward = lambda x: nn.functional.linear(x, module.fc.weight)
    return module


def weight_norm(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear)


def own_forward(linear):
    linear.forward = lambda input: torch.zeros(1)
    return linear


def compiled(linear):
    linear.compile(backend="eager")
    return linear


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(linear):
    parametrize.register_parametrization(linear, "weight", Doubled())
    return linear


NOT_LIKE_LINEAR = {
    "subclass": (lambda: Own(16, 16), "Own is a subclass of nn.Linear"),
    "lazy": (lambda: nn.LazyLinear(16), "LazyLinear is a subclass of nn.Linear"),
    "forward": (lambda: own_forward(nn.Linear(16, 16)), "it has a forward of its own"),
    "compiled": (lambda: compiled(nn.Linear(16, 16)), "it is compiled by its method compile"),
    "parametrized": (lambda: parametrized(nn.Linear(16, 16)), "it is parametrized: weight"),
    "weight_norm": (
        lambda: parametrizations.weight_norm(nn.Linear(16, 16)),
        "it is parametrized: weight",
    ),
    "spectral_norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(16, 16)),
        "it is parametrized: weight",
    ),
    "old weight_norm": (
        lambda: weight_norm(nn.Linear(16, 16)),
        "it holds weight_g, weight_v, as weight_norm, spectral_norm and pruning leave it",
    ),
    "old spectral_norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(16, 16)),
        "it holds weight_orig, weight_u, weight_v, as weight_norm",
    ),
    "pruned": (
        lambda: prune.random_unstructured(nn.Linear(16, 16), "weight", 0.5),
        "it holds weight_orig, weight_mask, as weight_norm",
    ),
}


@pytest.mark.parametrize("kind", NOT_LIKE_LINEAR)
@pytest.mark.parametrize("predicate", [None, every])
def test_more_than_a_linear_is_left(kind, predicate):
    make, why = NOT_LIKE_LINEAR[kind]
    layer = make()
    model = nn.Sequential(layer, nn.Linear(16, 16))
    converted, left = convert(model, predicate)
    assert converted == ["1"]
    assert left.keys() == {"0"}
    assert why in left["0"]
    assert model[0] is layer


@pytest.mark.parametrize("predicate", [None, every])
def test_layers_whose_weight_is_read_are_left(predicate):
    torch.manual_seed(0)
    model, x = Reads(), torch.randn(5, 16)
    original = copy.deepcopy(model)
    converted, left = convert(model, predicate)
    assert sorted(converted) == ["called", "others.0.own"]
    assert set(left.values()) == {"Reads reads its weight instead of calling it"}
    assert len(left) == len([m for m in model.modules() if type(m) is nn.Linear])
    assert near(model(x), original(x))
    outer = nn.Sequential(Block(fc=nn.Linear(16, 16)))
    assert convert(outer).converted == ["0.fc"], "another module's of that name"
    assert convert(own_function()).left == {"fc": "Module reads its weight instead of calling it"}


def test_torch_compile_s_own_wrapper():
    model = nn.Sequential(torch.compile(nn.Linear(16, 16), backend="eager"))
    assert convert(model).left == {"0._orig_mod": "torch.compile holds it: convert before"}
    whole = torch.compile(nn.Sequential(nn.Linear(16, 16)), backend="eager")
    x = torch.randn(2, 16)
    before = whole(x)
    assert convert(whole).converted == ["_orig_mod.0"]
    after = whole(x)
    assert near(after, before)
    assert not torch.equal(after, before)


def tied_to_embedding():
    model = Block(embed=nn.Embedding(16, 16), head=nn.Linear(16, 16, bias=False))
    model.head.weight = model.embed.weight
    return model, {"head": "its weight is shared with embed.weight"}


def two_linears():
    model = Block(a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    model.b.weight = model.a.weight
    shared = "its weight is shared with {}.weight"
    return model, {"a": shared.format("b"), "b": shared.format("a")}


def views_of_one_memory():
    model, memory = Block(a=nn.Linear(16, 16), b=nn.Linear(16, 16)), torch.randn(24, 16)
    model.a.weight, model.b.weight = nn.Parameter(memory[:16]), nn.Parameter(memory[8:])
    shared = "its weight is shared with {}.weight"
    return model, {"a": shared.format("b"), "b": shared.format("a")}


def buffer():
    model = Block(a=nn.Linear(16, 16))
    model.register_buffer("first", model.a.weight.detach()[0])
    return model, {"a": "its weight is shared with first"}


class Quantized(torch.Tensor):
    pass


def subclass_weight():
    model = Block(a=nn.Linear(16, 16))
    model.a.weight = nn.Parameter(torch.randn(16, 16).as_subclass(Quantized))
    return model, {"a": "its weight is a Quantized"}


def held_aside():
    model = Block(a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    model.by_hand, model.by_name = [model.a], {"b": model.b}
    return model, {"a": "Block holds it in by_hand too", "b": "Block holds it in by_name too"}


def double():
    model = Block(a=nn.Linear(16, 16, dtype=torch.float64))
    return model, {"a": "the weight must be float32, bfloat16 or float16, got torch.float64"}


def odd():
    model = Block(a=nn.Linear(24, 16))
    return model, {"a": "in_features must be a multiple of 16 for NVFP4, got 24"}


def sparse():
    model = Block(a=nn.Linear(16, 16))
    model.a.weight = nn.Parameter(model.a.weight.detach().to_sparse())
    return model, {"a": "the weight must be strided, got torch.sparse_coo"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "make",
    [
        tied_to_embedding,
        two_linears,
        views_of_one_memory,
        buffer,
        held_aside,
        subclass_weight,
        double,
        odd,
    ],
)
def test_what_cannot_be_replaced(make, device):
    """Left where nobody asked for it, refused by name where a predicate did."""
    with torch.device(device):
        model, why = make()
        model.add_module("fine", nn.Linear(16, 16))
    text = unchanged(model, lambda: convert(model, every))
    assert text.startswith("nothing was converted: ")
    assert all(f"{name}: {reason}" in text for name, reason in why.items())
    assert convert(model) == (["fine"], why)


def test_a_sparse_weight():
    model, why = sparse()
    assert "a: the weight must be strided" in unchanged(model, lambda: convert(model, every))
    assert convert(model) == ([], why)


def test_memory_that_is_divided_is_not_shared():
    model, memory = Block(a=nn.Linear(16, 16), b=nn.Linear(16, 16)), torch.randn(32, 16)
    model.a.weight, model.b.weight = nn.Parameter(memory[:16]), nn.Parameter(memory[16:])
    model.b.bias = model.a.bias
    assert convert(model).converted == ["a", "b"]
    assert model.a.bias is model.b.bias, "tied biases stay tied"


# ---- torch.nn's own modules ----


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, **options)


def plain(x):
    return (x,)


MODULES = {
    "TransformerEncoderLayer": (encoder_layer, plain),
    "norm_first": (lambda: encoder_layer(norm_first=True), plain),
    "no bias": (lambda: encoder_layer(bias=False), plain),
    "gelu": (lambda: encoder_layer(activation="gelu"), plain),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), plain),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True),
        lambda x: (x, x),
    ),
    "Transformer": (
        lambda: nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True),
        lambda x: (x, x),
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(32, 2, batch_first=True),
        lambda x: (x, x, x),
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 64, [16, 32]),
        lambda x: (x[:, 0], torch.tensor([1, 20, 40, 3])),
    ),
    "Bilinear and others": (
        lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Identity()),
        plain,
    ),
}
CONVERTED = {
    "TransformerDecoderLayer": 2,
    "Transformer": 2,
    "AdaptiveLogSoftmaxWithLoss": 3,
    "Bilinear and others": 1,
}


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_torch_nn(kind, training):
    torch.manual_seed(0)
    make, arguments_of = MODULES[kind]
    model, x = make().train(training), torch.randn(4, 5, 32)
    original, arguments = copy.deepcopy(model), arguments_of(x)
    with record_amax(model) as amax, torch.no_grad():
        model(*arguments)
    result = convert(model, lambda name, linear: linear.in_features % 16 == 0, amax)
    assert len(result.converted) == CONVERTED.get(kind, 0)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(result.left) == len(linears)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            found, expected = first_of(model(*arguments)), first_of(original(*arguments))
            assert near(found, expected)
            assert found.requires_grad == expected.requires_grad
    if kind.startswith("TransformerEncoder"):
        mask = torch.zeros(4, 5, dtype=torch.bool)
        mask[:, 3:] = True
        with torch.no_grad():
            found, expected = (m(x, src_key_padding_mask=mask) for m in (model, original))
        assert torch.equal(found, expected)


def test_the_encoder_layer_by_name():
    model = encoder_layer()
    why = convert(model).left
    assert why == {
        "self_attn.out_proj": "torch.nn.modules.linear.NonDynamicallyQuantizableLinear is a "
        "subclass of nn.Linear",
        "linear1": "TransformerEncoderLayer reads its weight instead of calling it",
        "linear2": "TransformerEncoderLayer reads its weight instead of calling it",
    }
