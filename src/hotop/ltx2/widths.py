"""The model's sizes, in a file that needs neither torch nor diffusers."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = 48
LINEARS_PER_BLOCK = 28


@dataclass(frozen=True)
class Width:
    """The sizes of a model; LTX-2 has 32 heads of 128 (video) and 32 of 64 (audio).

    Attributes:
        name: What `--width` calls it.
        heads: Heads of the video stream.
        head_dim: Width of one of them.
        audio_heads: Heads of the audio stream.
        audio_head_dim: Width of one of them.
        video_grid: Latent frames, rows and columns; their product is the number of video tokens.
        audio_tokens: Latent frames of audio.
        text_tokens: Tokens of the prompt.
    """

    name: str
    heads: int
    head_dim: int
    audio_heads: int
    audio_head_dim: int
    video_grid: tuple[int, int, int]
    audio_tokens: int
    text_tokens: int

    @property
    def dim(self) -> int:
        """Width of the video stream."""
        return self.heads * self.head_dim

    @property
    def audio_dim(self) -> int:
        """Width of the audio stream."""
        return self.audio_heads * self.audio_head_dim

    @property
    def video_tokens(self) -> int:
        """Number of video tokens."""
        frames, rows, columns = self.video_grid
        return frames * rows * columns


WIDTHS = {
    "small": Width("small", 2, 32, 2, 16, (2, 2, 2), 4, 8),
    "medium": Width("medium", 4, 64, 4, 32, (2, 4, 4), 8, 16),
    "large": Width("large", 8, 64, 8, 32, (4, 4, 4), 16, 32),
}
