"""The files of a denoising: the latents, and a picture of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

LATENT_SUFFIXES = (".safetensors", ".npz")
_CHANNELS_SHOWN = 4
_DPI = 130


def write_latents(path: Path, video: Tensor, audio: Tensor, grid: tuple[int, int, int]) -> None:
    """Write `video` [channels, frames, rows, columns] and `audio` [tokens, channels].

    Args:
        path: Ends in ``.safetensors`` or ``.npz``.
        video: [1, tokens, channels].
        audio: [1, tokens, channels].
        grid: Frames, rows and columns of the video tokens.

    Raises:
        ValueError: Another suffix.
    """
    arrays = {"video": _volume(video, grid), "audio": audio[0].contiguous()}
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in arrays.items()}, path)
    elif path.suffix == ".npz":
        np.savez(path, video=arrays["video"].numpy(), audio=arrays["audio"].numpy())
    else:
        raise ValueError(
            f"latents must be written to a file ending in {' or '.join(LATENT_SUFFIXES)}, "
            f"got {path.name!r}"
        )


def _volume(video: Tensor, grid: tuple[int, int, int]) -> Tensor:
    return video[0].T.reshape(video.shape[-1], *grid).contiguous()


def plot_preview(
    path: Path, video: Tensor, audio: Tensor, grid: tuple[int, int, int], steps: int
) -> None:
    """Draw some channels of every latent frame, and the audio latents as one map."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    frames = grid[0]
    volume = _volume(video, grid).numpy()[:_CHANNELS_SHOWN]
    limit = float(np.abs(volume).max()) or 1.0
    figure = Figure(figsize=(2.0 + 1.4 * _CHANNELS_SHOWN, 1.5 + 1.4 * (frames + 1)))
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(frames + 1, _CHANNELS_SHOWN, hspace=0.35)
    for frame in range(frames):
        for channel in range(_CHANNELS_SHOWN):
            axes = figure.add_subplot(rows[frame, channel])
            axes.imshow(volume[channel, frame], cmap="RdBu_r", vmin=-limit, vmax=limit)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"frame {frame}, channel {channel}", fontsize=7)
    axes = figure.add_subplot(rows[frames, :])
    axes.imshow(audio[0].T.numpy(), cmap="RdBu_r", aspect="auto")
    axes.set_xlabel("audio latents: time", fontsize=8)
    axes.set_ylabel("channel", fontsize=8)
    axes.tick_params(labelsize=7)
    figure.suptitle(
        f"LTX-2 latents after {steps} steps: random weights, so they look like noise", fontsize=9
    )
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")
