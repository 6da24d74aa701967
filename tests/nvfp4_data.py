"""Inputs on which every NVFP4 kernel must give the same bytes: all magnitudes, ties, NaN, Inf."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def random_bits(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def floats(lowest: int, highest: int, middles: Tensor) -> Tensor:
    """Random floats: any bits, then exponents of interest; every middle and its neighbours."""
    generator = torch.Generator().manual_seed(1)
    mantissa = 1 + torch.rand(2**20, generator=generator)
    exponent = torch.randint(lowest, highest + 1, (2**20,), generator=generator)
    near = torch.ldexp(mantissa, exponent)
    edges = [middles, *(torch.nextafter(middles, torch.tensor(to)) for to in (0.0, math.inf))]
    special = torch.tensor([0.0, math.inf, math.nan, 1e-45, 1.2e-38, 3.4e38])
    positive = torch.cat([near, *edges, special])
    return torch.cat([random_bits(2**20, 2), positive, -positive])


def ordinary(rows: int, k: int) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(3))


def all_magnitudes(rows: int, k: int) -> Tensor:
    """Each block has its own magnitude, from below the least subnormal to beyond the largest."""
    generator = torch.Generator().manual_seed(4)
    exponent = torch.randint(-150, 129, (rows, k // 16, 1), generator=generator)
    x = torch.randn(rows, k // 16, 16, generator=generator)
    return torch.ldexp(torch.ldexp(x, exponent // 2), exponent - exponent // 2).reshape(rows, k)


def ties(rows: int, k: int) -> Tensor:
    """Quarters up to 6, and a 6 in each block: exact ties when g is a power of two."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-24, 25, (rows, k), generator=generator) / 4
    x[:, ::16] = 6.0
    return x


def any_bits(rows: int, k: int) -> Tensor:
    x = random_bits(rows * k, 6).reshape(rows, k)
    x[::7, :16] = math.nan
    x[1::7, 16:32] = 0.0
    x[2::7, 16:32] = -0.0
    x[3::7, 5] = -math.inf
    return x


DATA = [ordinary, all_magnitudes, ties, any_bits]
