"""Ulysses: attention over video tokens that are spread over the ranks, by exchange of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import thread_time_ns
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AudioVideoAttnProcessor,
    apply_split_rotary_emb,
)
from torch import Tensor

from hotop.ltx2.model import FRAMES_PER_SECOND, Conditions


class Meter:
    """Adds up the thread CPU time of what runs under it.

    Attributes:
        ns: The sum so far in ns.
    """

    def __init__(self) -> None:
        """Begin at 0."""
        self.ns = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of this block."""
        began = thread_time_ns()
        yield
        self.ns += thread_time_ns() - began


#: The collectives of this process.
collectives = Meter()


def scatter_heads(x: Tensor, ranks: int) -> Tensor:
    """All-to-all from a part of the tokens to all tokens of a part of the heads.

    Args:
        x: [batch, tokens of this rank, heads, head_dim].
        ranks: Number of ranks; divides `heads`.

    Returns:
        [batch, all tokens, heads / ranks, head_dim], the tokens in the order of the ranks.
    """
    batch, tokens, heads, head_dim = x.shape
    parts = x.reshape(batch, tokens, ranks, heads // ranks, head_dim).permute(2, 0, 1, 3, 4)
    received = _exchange(parts)
    return received.transpose(0, 1).reshape(batch, ranks * tokens, heads // ranks, head_dim)


def gather_heads(x: Tensor, ranks: int) -> Tensor:
    """Undo `scatter_heads`: all heads of the tokens of this rank."""
    batch, tokens, heads, head_dim = x.shape
    parts = x.reshape(batch, ranks, tokens // ranks, heads, head_dim).transpose(0, 1)
    received = _exchange(parts)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, tokens // ranks, -1, head_dim)


def _exchange(parts: Tensor) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    with collectives.running():
        dist.all_to_all_single(received, parts)
    return received


def gather_tokens(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Put the parts of all ranks together along `dim`."""
    parts = [torch.empty_like(x) for _ in range(ranks)]
    x = x.contiguous()
    with collectives.running():
        dist.all_gather(parts, x)
    return torch.cat(parts, dim=dim)


class UlyssesProcessor:
    """An attention processor whose keys and values are video tokens spread over the ranks.

    Args:
        ranks: Number of ranks.
        rank: This rank.
        query_spread: Whether the queries are spread too (video) or the same on all ranks (audio).
    """

    def __init__(self, ranks: int, rank: int, query_spread: bool) -> None:
        self.ranks, self.rank, self.query_spread = ranks, rank, query_spread

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend; the arguments are those of diffusers' processor for LTX-2."""
        if attention_mask is not None:
            raise NotImplementedError("UlyssesProcessor: attention_mask must be None")
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states))
        key = attn.norm_k(attn.to_k(source))
        value = attn.to_v(source)
        if query_rotary_emb is not None:
            query = apply_split_rotary_emb(query, query_rotary_emb)
            key = apply_split_rotary_emb(
                key, query_rotary_emb if key_rotary_emb is None else key_rotary_emb
            )
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        key, value = scatter_heads(key, self.ranks), scatter_heads(value, self.ranks)
        if self.query_spread:
            query = scatter_heads(query, self.ranks)
        else:
            query = query.chunk(self.ranks, dim=2)[self.rank]
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        ).transpose(1, 2)
        if self.query_spread:
            attended = gather_heads(attended, self.ranks)
        else:
            attended = gather_tokens(attended, self.ranks, dim=2)
        out: Tensor = attn.to_out[0](attended.flatten(2, 3))
        return out


@dataclass(frozen=True)
class Spread:
    """The video tokens of one rank."""

    ranks: int
    rank: int

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of all tokens along `dim`."""
        return x.chunk(self.ranks, dim=dim)[self.rank].contiguous()

    def conditions(self, model: Any, whole: Conditions) -> Conditions:
        """The conditions of this rank's tokens: their coordinates, all of the text."""
        frames, rows, columns = whole.width.video_grid
        coords = model.rope.prepare_video_coords(
            1, frames, rows, columns, whole.text.device, fps=FRAMES_PER_SECOND
        )
        return replace(whole, video_coords=self.part(coords, dim=2))

    def install(self, blocks: Any) -> Callable[[bool], None]:
        """Return a function that puts the processors in (True) or takes them out (False).

        Video tokens are keys in two places: the video's self-attention and the attention of audio
        to video. Everywhere else the keys are on all ranks, and diffusers' processor serves.
        """
        attentions: list[Any] = list(blocks.children())
        own = {
            name: UlyssesProcessor(self.ranks, self.rank, name == "attn1")
            for name in ("attn1", "video_to_audio_attn")
        }
        original = LTX2AudioVideoAttnProcessor()

        def use(spread: bool) -> None:
            for block in attentions:
                for name, processor in own.items():
                    getattr(block, name).processor = processor if spread else original

        return use
