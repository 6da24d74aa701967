"""A Llama-like decoder that generates one token per call, with the ops passed in by the caller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotop.demo.ops import OpSet

# One token per byte; the published models have larger vocabularies and tokenizers of their own.
VOCABULARY = 256
NORM_EPS = 1e-5
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder.

    Attributes:
        model: The published model that has these sizes.
        dim: Width of the residual stream.
        layers: Number of decoder layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads, shared by the query heads in groups.
        hidden: Width inside the SwiGLU block.
    """

    model: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def with_layers(self, layers: int | None) -> Shape:
        """This shape with another number of layers, or unchanged for None."""
        return self if layers is None else replace(self, layers=layers)


SHAPES = {
    "stories260k": Shape("TinyStories 260K", 64, 5, 8, 4, 172),
    "smollm2-135m": Shape("SmolLM2 135M", 576, 30, 9, 3, 1536),
}


class KVCache:
    """Keys and values of every layer, at their full length from the start.

    The shapes never change, so one compiled graph serves every position.
    """

    def __init__(self, shape: Shape, positions: int) -> None:
        """Allocate zeroed caches for `positions` tokens."""
        size = (shape.kv_heads, positions, shape.head_dim)
        self.keys = [torch.zeros(size) for _ in range(shape.layers)]
        self.values = [torch.zeros(size) for _ in range(shape.layers)]


class Place(NamedTuple):
    """The place of the current token, in the forms that the layers need."""

    position: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor


class Attention(nn.Module):
    """Grouped-query attention of one token over the cached positions."""

    def __init__(self, shape: Shape) -> None:
        """Make the projections; their values come from `build_decoder`."""
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.head_dim = shape.head_dim
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.dim, width, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, ops: OpSet, x: Tensor, place: Place, keys: Tensor, values: Tensor) -> Tensor:
        """Cache the key and value of the token whose row is `x`, and attend from it."""
        qkv = self.qkv(x).view(-1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads))
        q, k = ops.rotary(q, k, place.cos, place.sin, place.position)
        ops.cache_update(keys, values, k, v, place.position)
        # With one token, the query heads that share a key head can stand as its query positions.
        q = q.view(1, self.kv_heads, -1, self.head_dim)
        attended = F.scaled_dot_product_attention(
            q, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=place.mask
        )
        out: Tensor = self.out(attended.reshape(x.shape))
        return out


class DecoderLayer(nn.Module):
    """Attention and a SwiGLU block, each before it a norm that also adds to the residual."""

    def __init__(self, shape: Shape) -> None:
        """Make the parameters; their values come from `build_decoder`."""
        super().__init__()
        self.input_norm = nn.Parameter(torch.empty(shape.dim))
        self.attention = Attention(shape)
        self.mlp_norm = nn.Parameter(torch.empty(shape.dim))
        self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(
        self,
        ops: OpSet,
        x: Tensor | None,
        residual: Tensor,
        place: Place,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Update `residual` in place and return what is still to be added to it.

        `x` is what the layer before returned, None for the first.
        """
        if x is None:
            x = ops.rms_norm(residual, self.input_norm, NORM_EPS)
        else:
            ops.fused_add_rms_norm(x, residual, self.input_norm, NORM_EPS)
        x = self.attention(ops, x, place, keys, values)
        ops.fused_add_rms_norm(x, residual, self.mlp_norm, NORM_EPS)
        out: Tensor = self.down(ops.silu_and_mul(self.gate_up(x)))
        return out


class Decoder(nn.Module):
    """The whole model: embedding, layers, final norm and output head."""

    cos: Tensor
    sin: Tensor
    positions: Tensor

    def __init__(self, shape: Shape, positions: int) -> None:
        """Make the parameters; their values come from `build_decoder`."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.final_norm = nn.Parameter(torch.empty(shape.dim))
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        self.register_buffer("cos", torch.empty(positions, shape.head_dim // 2))
        self.register_buffer("sin", torch.empty(positions, shape.head_dim // 2))
        self.register_buffer("positions", torch.empty(1, positions, dtype=torch.int64))

    def forward(self, ops: OpSet, token: Tensor, position: Tensor, cache: KVCache) -> Tensor:
        """Return the logits that follow `token`, the one at `position`; both hold one int64."""
        # As numbers to add: attention would turn a bool mask into these in every layer.
        mask = torch.where(self.positions <= position, 0.0, -torch.inf)
        place = Place(position, self.cos, self.sin, mask)
        residual = self.embedding(token)
        x = None
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x = layer(ops, x, residual, place, keys, values)
        ops.fused_add_rms_norm(x, residual, self.final_norm, NORM_EPS)
        logits: Tensor = self.head(x).squeeze(0)
        return logits


def build_decoder(shape: Shape, positions: int, seed: int) -> Decoder:
    """Build a decoder with random weights that depend on `seed` only."""
    with torch.device("meta"):
        decoder = Decoder(shape, positions)
    decoder.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        frequencies = ROTARY_BASE ** -torch.arange(0, 1, 2 / shape.head_dim)
        places = torch.arange(positions)
        angles = torch.outer(places.float(), frequencies)
        decoder.cos.copy_(angles.cos())
        decoder.sin.copy_(angles.sin())
        decoder.positions.copy_(places)
    return decoder.eval()
