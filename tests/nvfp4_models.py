"""Small models and checks for the tests of ``NVFP4Linear`` and ``convert``."""

import pytest
import torch
from torch import nn

from hotop import nvfp4
from hotop.nvfp4 import NVFP4Linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pair(bias=True, dtype=torch.float32, in_features=64, out_features=48):
    """A linear layer and what is made of it."""
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    return linear, NVFP4Linear.from_linear(linear, 500.0)


def weight_of(layer, dtype=torch.float32):
    """The values of a layer's weight."""
    scale = 1 / (layer.alpha * layer.input_scale)
    return nvfp4.nvfp4_dequantize(layer.weight, layer.weight_scale, scale, dtype, True)


def near(found, expected, tolerance=0.3):
    return (found - expected).norm() <= tolerance * expected.norm()


class Block(nn.Module):
    """Calls the layers it is given; the one that runs is called by keyword."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(input=x) if isinstance(layer, nn.Linear | NVFP4Linear) else layer(x)
        return x


def unchanged(model, act):
    """Check that ``act`` raises a ValueError and leaves the model as it was; give the error."""
    before = [(id(m), sorted(vars(m)), sorted(m._modules)) for m in model.modules()]
    with pytest.raises(ValueError, match=r".") as caught:
        act()
    assert [(id(m), sorted(vars(m)), sorted(m._modules)) for m in model.modules()] == before
    return str(caught.value)


def every(name, linear):
    return True


class Own(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input)
