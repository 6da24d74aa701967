"""Generate with several variants of one model step by step, so that each meets the same machine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch
from torch import Tensor

from hotop.demo.model import Decoder, KVCache, Shape
from hotop.demo.ops import OpSet

# Sampling is held to the printable ASCII bytes, so that every token is a character.
FIRST_PRINTABLE, LAST_PRINTABLE = 32, 126
TEMPERATURE = 0.8
PROMPT = "Once upon a time"

Forward = Callable[[Tensor, Tensor, KVCache], Tensor]


@dataclass
class Track:
    """What one variant did: tokens (the prompt's too), the logits and the time of each step."""

    tokens: list[int]
    logits: list[Tensor] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The tokens as text."""
        return bytes(self.tokens).decode("ascii")


def eager_forward(decoder: Decoder, ops: OpSet) -> Forward:
    """One eager step of `decoder` with `ops`."""

    def forward(token: Tensor, position: Tensor, cache: KVCache) -> Tensor:
        logits: Tensor = decoder(ops, token, position, cache)
        return logits

    return forward


def compiled_forward(decoder: Decoder, ops: OpSet) -> Forward:
    """The same step as one graph made by torch.compile at its first call."""
    # Torch's overloads of `compile` lack an argument that the function has.
    compile_step: Callable[..., Forward] = torch.compile
    # Isolated: the variants share this code object, and would try each other's guards at each call.
    return compile_step(
        eager_forward(decoder, ops), fullgraph=True, dynamic=False, isolate_recompiles=True
    )


def position_count(new_tokens: int) -> int:
    """How many positions a generation of `new_tokens` needs: the last token is never fed back."""
    return len(PROMPT) + new_tokens - 1


def generate(
    forwards: Mapping[str, Forward],
    shape: Shape,
    positions: int,
    steps: int,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, Track]:
    """Run every variant for `steps` steps, all of them at one position before the next.

    Args:
        forwards: The variants by name.
        shape: The model's sizes, for the caches.
        positions: Length of the caches.
        steps: Steps to run, the prompt's included.
        seed: Seed of the sampling noise, which is the same for every variant.
        on_step: Called after each position, outside the timed part.

    Returns:
        One Track per variant, in the order of `forwards`.
    """
    names = list(forwards)
    prompt = list(PROMPT.encode("ascii"))
    tracks = {name: Track(prompt[:1]) for name in names}
    caches = {name: KVCache(shape, positions) for name in names}
    token, position = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    noise = _gumbel_noise(steps, seed)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for step in range(steps):
            # Rotating the order gives no variant a fixed neighbour whose caches it inherits.
            start = step % len(names)
            for name in names[start:] + names[:start]:
                track = tracks[name]
                forward, cache, current = forwards[name], caches[name], track.tokens[-1]
                began = perf_counter_ns()
                token.fill_(current)
                position.fill_(step)
                logits = forward(token, position, cache)
                drawn = _sample(logits, noise[step])
                track.step_ns.append(perf_counter_ns() - began)
                track.logits.append(logits)
                track.tokens.append(prompt[step + 1] if step + 1 < len(prompt) else drawn)
            on_step()
    finally:
        if collecting:
            gc.enable()
    return tracks


def _gumbel_noise(steps: int, seed: int) -> list[Tensor]:
    count = LAST_PRINTABLE - FIRST_PRINTABLE + 1
    uniform = torch.rand(steps, count, generator=torch.Generator().manual_seed(seed))
    # Adding this noise and taking the largest draws from the softmax; the clamp keeps it finite.
    return list(-(-uniform.clamp(1e-9, 1 - 1e-7).log()).log())


def _sample(logits: Tensor, noise: Tensor) -> int:
    printable = logits[FIRST_PRINTABLE : LAST_PRINTABLE + 1]
    return FIRST_PRINTABLE + int((printable / TEMPERATURE + noise).argmax())


def first_difference(reference: Track, other: Track) -> str | None:
    """Where two tracks differ first, bit for bit, in words; None where they are the same."""
    for step, (expected, got) in enumerate(zip(reference.logits, other.logits, strict=True)):
        if not torch.equal(expected, got):
            largest = (expected - got).abs().max().item()
            return f"logits of step {step} differ by up to {largest:.3g}"
        if reference.tokens[step + 1] != other.tokens[step + 1]:
            wrong, right = other.tokens[step + 1], reference.tokens[step + 1]
            return f"token of step {step} is {wrong}, not {right}"
    return None
