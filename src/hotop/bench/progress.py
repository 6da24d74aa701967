"""The progress bar of a run, which keeps quiet while something is being timed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["show_progress"]


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar on stderr, if that is a terminal, and gives the function that moves it.

    The bar is drawn only when it moves: a refreshing thread would take the GIL from the timer.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )
    with progress:
        task = progress.add_task("", total=None)

        def on_step(title: str, step: int, steps: int) -> None:
            progress.update(
                task, description=escape(title), completed=step, total=steps, refresh=True
            )

        yield on_step
