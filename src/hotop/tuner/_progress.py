"""The progress line of a tuning session that takes long."""

from __future__ import annotations

import sys
import time
from typing import Any

_QUIET_S = 1.0


class Progress:
    """A line on stderr: what is measured, and how many keys are done. Needs rich."""

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._quiet_s = _QUIET_S if wanted is None else 0.0
        self._started_at = time.monotonic()
        self._done = 0
        self._line: Any = None

    def show(self, name: str, description: list[Any], tactic: str) -> None:
        """Say what is measured now."""
        if not self._wanted or time.monotonic() - self._started_at < self._quiet_s:
            return
        if self._line is None and not self._open():
            return
        sizes = " ".join(str(part) for part in description[1:] if isinstance(part, str))
        self._line.update(0, description=f"tuning {name} {sizes}: {tactic}", completed=self._done)

    def _open(self) -> bool:
        try:
            from rich import console, progress
        except ImportError:  # rich is an extra
            self._wanted = False
            return False
        self._line = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.TextColumn("{task.completed} keys done"),
            progress.TimeElapsedColumn(),
            console=console.Console(stderr=True, force_terminal=True),
            transient=True,
        )
        self._line.add_task("tuning", total=None)
        self._line.start()
        return True

    def count(self) -> None:
        """One more key is done."""
        self._done += 1

    def close(self) -> None:
        """Take the line away."""
        if self._line is not None:
            self._line.stop()
