"""A worker process of a long run: what it says, line by line, and how it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STARTING = 3  # times longer than the others: the silence before the first words, of imports
LAST_LINES = 60  # of standard error


def _environment() -> dict[str, str]:
    quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL", "KINETO_LOG_LEVEL": "99", "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def worker_lines(module: str, *arguments: str, silence: float) -> Iterator[dict[str, Any]]:
    """Start a worker and yield what it says; last comes how it ended.

    Args:
        module: What `python -m` runs; it says JSON objects, one a line.
        arguments: Its arguments.
        silence: Seconds without a word after which it hangs and is killed.

    Yields:
        What it says; then its `exit` status, whether it was a `hang`, and the end of its `stderr`.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env=_environment(),
        )
        assert process.stdout is not None
        hung = threading.Event()

        def kill() -> None:
            hung.set()
            process.kill()

        def watch(seconds: float) -> threading.Timer:
            timer = threading.Timer(seconds, kill)
            timer.daemon = True
            timer.start()
            return timer

        timer = watch(silence * STARTING)
        try:
            for line in process.stdout:
                timer.cancel()
                timer = watch(silence)
                if line.startswith("{"):  # PyTorch's tracing library prints too
                    yield json.loads(line)
            process.wait()
            timer.cancel()
            errors.seek(0)
            tail = [line.rstrip() for line in errors.readlines()[-LAST_LINES:]]
            yield {"exit": process.returncode, "hang": hung.is_set(), "stderr": tail}
        finally:
            timer.cancel()
            process.kill()
            process.wait()
