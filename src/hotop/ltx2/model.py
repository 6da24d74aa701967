"""diffusers' LTX-2 transformer with random weights, at its real depth and small widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from hotop.ltx2.widths import Width

CHANNELS = 16
FRAMES_PER_SECOND = 24.0

# CPUs compute in float32; bfloat16 would be emulated on most of them, and so add work to every
# kernel that has nothing to do with the host time measured here.
DTYPE = torch.float32


@dataclass(frozen=True)
class Conditions:
    """What stays the same in all steps: the prompt's embeddings and the sizes.

    Attributes:
        text: [1, text tokens, video dim], read by the video stream.
        width: The sizes.
        video_coords: [1, 3, tokens, 2], where the video tokens are; None: all of the grid.
    """

    text: Tensor
    width: Width
    video_coords: Tensor | None = None


def build_model(width: Width, blocks: int, seed: int) -> Any:
    """Build the transformer in float32 with random weights that depend on `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LTX2VideoTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=width.heads,
            attention_head_dim=width.head_dim,
            cross_attention_dim=width.dim,
            audio_in_channels=CHANNELS,
            audio_out_channels=CHANNELS,
            audio_num_attention_heads=width.audio_heads,
            audio_attention_head_dim=width.audio_head_dim,
            audio_cross_attention_dim=width.audio_dim,
            num_layers=blocks,
            caption_channels=width.dim,
            # What the published checkpoints use.
            rope_type="split",
        )
    return model.eval().requires_grad_(False)


def make_conditions(width: Width, seed: int) -> Conditions:
    """Make the embeddings of a prompt: noise, as there is no text encoder here."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, width.text_tokens, width.dim, generator=generator, dtype=DTYPE)
    return Conditions(text, width)


def make_noise(width: Width, seed: int) -> tuple[Tensor, Tensor]:
    """Make the latents that the loop starts from: video and audio, [1, tokens, channels]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, width.video_tokens, CHANNELS, generator=generator, dtype=DTYPE),
        torch.randn(1, width.audio_tokens, CHANNELS, generator=generator, dtype=DTYPE),
    )


def predict(
    model: nn.Module, conditions: Conditions, video: Tensor, audio: Tensor, timestep: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the transformer once and return the velocities of video and audio.

    The video may be a part of all its tokens: that of `conditions.video_coords`.
    """
    width = conditions.width
    frames, rows, columns = width.video_grid
    arguments: dict[str, Any] = {
        "hidden_states": video,
        "audio_hidden_states": audio,
        "encoder_hidden_states": conditions.text,
        "audio_encoder_hidden_states": conditions.text,
        "timestep": timestep.expand(video.shape[0]),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "fps": FRAMES_PER_SECOND,
        "audio_num_frames": width.audio_tokens,
        "video_coords": conditions.video_coords,
        "return_dict": False,
    }
    velocity, audio_velocity = model(**arguments)
    return velocity, audio_velocity
