"""The denoising loop, with diffusers' scheduler as LTX-2's pipeline sets it up."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from hotop.ltx2.model import Conditions, predict

# The pipeline shifts the sigmas by the number of tokens: `base_shift` at 1024, `max_shift` at 4096.
_BASE_TOKENS, _MAX_TOKENS = 1024, 4096
_BASE_SHIFT, _MAX_SHIFT = 0.95, 2.05


@dataclass
class Track:
    """One denoising in progress.

    Attributes:
        video: Latents, [1, video tokens, channels].
        audio: Latents, [1, audio tokens, channels].
        scheduler: The `FlowMatchEulerDiscreteScheduler` of the video latents.
        audio_scheduler: The scheduler of the audio latents.
        done: Steps done.
    """

    video: Tensor
    audio: Tensor
    scheduler: Any
    audio_scheduler: Any
    done: int = 0

    def step(self, model: nn.Module, conditions: Conditions) -> None:
        """Remove noise once: the transformer, then the schedulers."""
        timestep = self.scheduler.timesteps[self.done]
        velocity, audio_velocity = predict(model, conditions, self.video, self.audio, timestep)
        self.video = self.scheduler.step(velocity, timestep, self.video, return_dict=False)[0]
        self.audio = self.audio_scheduler.step(
            audio_velocity, timestep, self.audio, return_dict=False
        )[0]
        self.done += 1


def start(video: Tensor, audio: Tensor, steps: int, video_tokens: int) -> Track:
    """Begin to denoise these latents in `steps` steps.

    Args:
        video: [1, tokens, channels]; may be a part of all tokens.
        audio: [1, tokens, channels].
        steps: Number of steps.
        video_tokens: Number of all video tokens; the noise levels depend on it.
    """
    scheduler: Any = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=_BASE_SHIFT,
        max_shift=_MAX_SHIFT,
        shift_terminal=0.1,
        base_image_seq_len=_BASE_TOKENS,
        max_image_seq_len=_MAX_TOKENS,
    )
    slope = (_MAX_SHIFT - _BASE_SHIFT) / (_MAX_TOKENS - _BASE_TOKENS)
    shift = _BASE_SHIFT + slope * (video_tokens - _BASE_TOKENS)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps), mu=shift)
    scheduler.set_begin_index(0)
    return Track(video.clone(), audio.clone(), scheduler, copy.deepcopy(scheduler))
