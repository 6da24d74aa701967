"""Progress of the demo's phases: a bar on a terminal, one plain line per phase anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as rich_progress
from rich.console import Console

REFRESH_S = 0.1


class Progress:
    """Shows the phases of one run on a console."""

    def __init__(self, console: Console) -> None:
        """Show progress on `console`."""
        self._console = console

    @contextmanager
    def phase(self, title: str, total: int, *, timed: bool = True) -> Iterator[Callable[[], None]]:
        """Show one phase of `total` parts; call what this yields after each part.

        Args:
            title: What to call the phase.
            total: Number of parts.
            timed: Whether the phase measures times, so that no thread may redraw the bar.
        """
        if not self._console.is_terminal:
            began = time.perf_counter()
            self._console.print(f"{title} ...")
            yield lambda: None
            self._console.print(f"{title}: done in {time.perf_counter() - began:.1f} s")
            return
        bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description:>9}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            console=self._console,
            auto_refresh=not timed,
        )
        with bar:
            task = bar.add_task(title, total=total)
            bar.refresh()
            shown = time.perf_counter()

            def advance() -> None:
                nonlocal shown
                bar.advance(task)
                if time.perf_counter() - shown > REFRESH_S:
                    bar.refresh()
                    shown = time.perf_counter()

            yield advance
            bar.refresh()
